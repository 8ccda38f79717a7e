"""Figures, tables and a report, from what is stored."""

from __future__ import annotations

import csv
import html
import io
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cpsbs.experiments.analysis import Estimates, hindsight_deviation, runtimes, trade_offs
from cpsbs.experiments.cells import entry_of
from cpsbs.experiments.claims import Claim, claims
from cpsbs.experiments.figures import LABELS, draw, saved
from cpsbs.experiments.plan import EXPERIMENTS, Scale
from cpsbs.experiments.store import Row, replacing

TableRows = list[dict[str, Any]]

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 3rem; border-top: 1px solid #ddd; padding-top: 1rem; }
figure { margin: 1rem 0; overflow-x: auto; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 0.85rem; margin: 1rem 0; }
th, td { padding: 0.2rem 0.6rem; border-bottom: 1px solid #ddd; text-align: left; }
.scroll { overflow-x: auto; max-height: 28rem; } .yes { color: #00724f; } .no { color: #b34700; }
.partly { color: #8a6d00; } code { background: #f3f3f3; padding: 0 0.2rem; }
"""


def write_report(
    folder: Path,
    experiments: Sequence[str],
    rows: Sequence[Row],
    scale: Scale,
    settings: Mapping[str, Any],
) -> Path:
    """Write figures, tables and ``report.html`` into the folder; returns the report's file."""
    figures: dict[str, list[tuple[str, str]]] = {}
    for experiment in experiments:
        figures[experiment] = []
        for name, figure in draw(experiment, rows, scale):
            svg = saved(figure, "svg")
            _write(folder / "figures" / f"{name}.svg", svg)
            _write(folder / "figures" / f"{name}.png", saved(figure, "png"))
            figures[experiment].append((name, svg.decode()))
    found = claims(experiments, rows, scale)
    written = {experiment: tables(experiment, rows, scale) for experiment in experiments}
    for some in ({"claims": _claim_table(found)}, *written.values()):
        for name, table in some.items():
            if table:
                _write(folder / "tables" / f"{name}.md", markdown(table).encode())
                _write(folder / "tables" / f"{name}.csv", _csv(table).encode())
    told = {**settings, "versions": versions()}
    _write(folder / "settings.json", json.dumps(told, indent=1).encode() + b"\n")
    file = folder / "report.html"
    _write(file, _html(experiments, figures, found, written, told).encode())
    return file


def tables(experiment: str, rows: Sequence[Row], scale: Scale) -> dict[str, TableRows]:
    """Return the numbers behind the figures of an experiment, by the names of their tables.

    Raises:
        ValueError: if the experiment is unknown.
    """

    def spread() -> dict[str, TableRows]:
        return {experiment: _spread_table(experiment, rows, scale)}

    makers: dict[str, Callable[[], dict[str, TableRows]]] = {
        "bleu": spread,
        "bleu-unnormalized": spread,
        "entropy": spread,
        "truncation": spread,
        "rmse": lambda: _rmse_tables(rows, scale),
        "diversity": lambda: {"diversity": _diversity_table(rows)},
        "runtime": lambda: {"runtime": _runtime_table(rows)},
        "hindsight": lambda: {"hindsight": _hindsight_table(rows)},
    }
    return entry_of("experiment", experiment, makers)()


def _spread_table(experiment: str, rows: Sequence[Row], scale: Scale) -> TableRows:
    f = "entropy" if experiment == "entropy" else "BLEU"
    spread = Estimates(rows, scale, f, experiment != "bleu-unnormalized").spread
    kept = ("conditional-poisson",) if experiment == "truncation" else tuple(LABELS)
    return [
        {
            "sentence": line,
            "τ": temperature,
            "K": k,
            "design": LABELS[design] + ("" if nucleus is None else f", {nucleus}"),
            "mean": s.mean,
            "deviation": s.deviation,
        }
        for (line, temperature, k, design, nucleus), s in spread.items()
        if design in kept and (nucleus is None or experiment == "truncation")
    ]


def _diversity_table(rows: Sequence[Row]) -> TableRows:
    return [
        {
            "K": k,
            "design": LABELS[design],
            "τ or strength": temperature,
            "D": t.diversity,
            "min BLEU": t.least,
            "mean": t.mean,
            "max": t.most,
            "sentences": t.sentences,
        }
        for (k, design, temperature), t in sorted(trade_offs(rows).items())
    ]


def _runtime_table(rows: Sequence[Row]) -> TableRows:
    return [
        {"device": device, "design": LABELS[design], "K": k, "seconds": seconds}
        for (device, design, k), seconds in runtimes(rows).items()
    ]


def _hindsight_table(rows: Sequence[Row]) -> TableRows:
    return [
        {"τ": t, "normalised": "yes" if normalized else "", "M": m or "own path", "deviation": v}
        for (t, normalized, m), v in hindsight_deviation(rows).items()
    ]


def _rmse_tables(rows: Sequence[Row], scale: Scale) -> dict[str, TableRows]:
    found: dict[str, TableRows] = {}
    variances: TableRows = []
    for f in ("BLEU", "entropy", "entropy RB"):
        estimates = Estimates(rows, scale, f, normalized=True)
        errors = estimates.rmse()
        designs = list(dict.fromkeys(key[2] for key in errors))
        found[f"rmse-{f.lower().replace(' ', '-')}"] = [
            {"τ": t, "K": k} | {LABELS[d]: errors.get((t, k, d), "") for d in designs}
            for t, k in dict.fromkeys(key[:2] for key in errors)
        ]
        if f != "entropy RB":
            for line in dict.fromkeys(key[0] for key in estimates.truth):
                row: dict[str, Any] = {"f": f, "sentence": line}
                for temperature in scale.temperatures:
                    truth = estimates.truth.get((line, temperature))
                    row[f"τ = {temperature}"] = "" if truth is None else truth.variance
                variances.append(row)
    return found | {"baseline-variance": variances}


def versions() -> dict[str, str]:
    """Of what was used to draw the report."""
    found = {"python": platform.python_version()}
    for package in ("cpsbs", "torch", "transformers", "numpy", "sacrebleu", "matplotlib", "ray"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def markdown(rows: TableRows) -> str:
    """A table."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(_cell(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _csv(rows: TableRows) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _claim_table(found: Sequence[Claim]) -> TableRows:
    return [
        {"experiment": c.experiment, "the paper": c.said, "measured": c.seen, "holds": c.holds}
        for c in found
    ]


def _html(
    experiments: Sequence[str],
    figures: Mapping[str, list[tuple[str, str]]],
    found: Sequence[Claim],
    written: Mapping[str, dict[str, TableRows]],
    settings: Mapping[str, Any],
) -> str:
    parts = ["<h1>Conditional Poisson stochastic beams: the experiments</h1>"]
    parts.append("<h2>Claim by claim</h2>" + _html_table(_claim_table(found), verdict="holds"))
    for experiment in experiments:
        title = html.escape(EXPERIMENTS[experiment])
        parts.append(f"<h2>{html.escape(experiment)}: {title}</h2>")
        parts += [f"<figure>{_inline(svg)}</figure>" for _, svg in figures[experiment]]
        for claim in found:
            if claim.experiment == experiment:
                parts.append(
                    f"<p><b>Said:</b> {_text(claim.said)} <b>Measured:</b> {_text(claim.seen)}</p>"
                )
        for name, table in written[experiment].items():
            parts.append(
                f"<details><summary>{html.escape(name)}, {len(table)} rows</summary>"
                f'<div class="scroll">{_html_table(table)}</div></details>'
            )
    told = html.escape(json.dumps(settings, indent=1))
    parts.append(f"<h2>Settings and versions</h2><pre>{told}</pre>")
    body = "\n".join(parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>cpsbs: experiments</title><style>{STYLE}</style></head><body>\n{body}\n"
        "</body></html>\n"
    )


def _inline(svg: str) -> str:
    """The picture alone, without what an SVG file has before it."""
    return svg[svg.index("<svg") :]


def _text(text: str) -> str:
    """Escaped, with `code` marked."""
    pieces = html.escape(text).split("`")
    return "".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(pieces))


def _html_table(rows: TableRows, verdict: str | None = None) -> str:
    if not rows:
        return "<p>Nothing was computed.</p>"
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    lines = []
    for row in rows:
        cells = "".join(
            f'<td class="{value}">{value}</td>'
            if name == verdict
            else f"<td>{_text(_cell(value))}</td>"
            for name, value in row.items()
        )
        lines.append(f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _write(file: Path, data: bytes) -> None:
    with replacing(file) as out:
        out.write(data)
