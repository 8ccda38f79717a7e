"""Writes figures, tables and a report in HTML, from stored results only."""

from __future__ import annotations

import html
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cpsbs.experiments.cells import look_up
from cpsbs.experiments.claims import Claim
from cpsbs.experiments.figures import PAGE, image, plot
from cpsbs.experiments.plan import EXPERIMENTS, Scale
from cpsbs.experiments.store import Row, replacing
from cpsbs.experiments.tables import TableRows, cell_text, csv_text, markdown, tables

QUICK_RUN = "quick run"
"""The label beside every verdict of a quick run."""

STYLE = """
:root { color-scheme: light dark; --text: #222; --page: #fff; --line: #ddd; --code: #f3f3f3;
        --yes: #00724f; --no: #b34700; --partly: #7a6000; --faint: #666; }
@media (prefers-color-scheme: dark) {
  :root { --text: #ddd; --page: #16181c; --line: #3a3d44; --code: #2a2d33;
          --yes: #4cc79f; --no: #ff9559; --partly: #e0c252; --faint: #9a9ea6; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
       color: var(--text); background: var(--page); }
h1, h2 { line-height: 1.2; }
h2 { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1rem; }
figure { margin: 1rem 0; overflow-x: auto; background: #fff; border-radius: 0.3rem; }
figure svg { display: block; height: auto; margin: 0 auto; }
.scroll { overflow-x: auto; } details .scroll { max-height: 28rem; overflow-y: auto; }
table { border-collapse: collapse; font-size: 0.85rem; margin: 1rem 0; }
th, td { padding: 0.2rem 0.6rem; border-bottom: 1px solid var(--line); text-align: left;
         vertical-align: top; }
.yes { color: var(--yes); } .no { color: var(--no); } .partly { color: var(--partly); }
.label { color: var(--faint); white-space: nowrap; }
.settings { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr));
            gap: 0 2rem; }
.settings td { overflow-wrap: anywhere; }
code { background: var(--code); padding: 0 0.2rem; }
@media (max-width: 44rem) { .settings { grid-template-columns: 1fr; }
  figure svg { margin: 0; width: auto !important; } figure svg.wide { min-width: 50rem; }
  .claims thead { display: none; } .claims tr, .claims td { display: block; }
  .claims td { border: 0; padding: 0; } .claims td:first-child { font-weight: bold; }
  .claims tr { border-bottom: 1px solid var(--line); padding: 0.5rem 0; } }
"""


@dataclass(frozen=True)
class _Image:
    """A figure as SVG, and the share of the page's width that it takes."""

    svg: str
    width: float


def write_report(
    folder: Path,
    experiments: Sequence[str],
    rows: Sequence[Row],
    scale: Scale,
    found: Sequence[Claim],
    settings: Mapping[str, Mapping[str, Any]],
    quick: bool = False,
) -> Path:
    """Write figures, tables and ``report.html``, and return the path of the report.

    Args:
        folder: the folder to write to.
        experiments: the experiments to report on.
        rows: the stored rows of these experiments.
        scale: the size of the experiments.
        found: the claims with their verdicts.
        settings: groups of settings, for ``settings.json`` and the report.
        quick: whether this was a quick run, which is stated beside every verdict.
    """
    images: dict[str, list[_Image]] = {}
    for experiment in experiments:
        images[experiment] = []
        for name, figure in plot(experiment, rows, scale):
            svg = image(figure, "svg")
            _write(folder / "figures" / f"{name}.svg", svg)
            _write(folder / "figures" / f"{name}.png", image(figure, "png"))
            width = min(1.0, figure.get_figwidth() / PAGE)
            images[experiment].append(_Image(svg.decode(), width))
    by_experiment = {name: tables(name, rows, scale) for name in experiments}
    for some in ({"claims": _claim_table(found, quick)}, *by_experiment.values()):
        for name, table in some.items():
            if table:
                _write(folder / "tables" / f"{name}.md", markdown(table).encode())
                _write(folder / "tables" / f"{name}.csv", csv_text(table).encode())
    all_settings = {**settings, "versions": versions()}
    _write(folder / "settings.json", json.dumps(all_settings, indent=1).encode() + b"\n")
    file = folder / "report.html"
    _write(file, _html(experiments, images, found, by_experiment, all_settings, quick).encode())
    return file


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that made the report."""
    found = {"python": platform.python_version()}
    for package in ("cpsbs", "torch", "transformers", "numpy", "sacrebleu", "matplotlib", "ray"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _claim_table(found: Sequence[Claim], quick: bool) -> TableRows:
    label = f" ({QUICK_RUN})" if quick else ""
    return [
        {
            "experiment": c.experiment,
            "the paper": c.statement,
            "measured": c.measured,
            "holds": c.verdict + label,
        }
        for c in found
    ]


def _html(
    experiments: Sequence[str],
    images: Mapping[str, Sequence[_Image]],
    found: Sequence[Claim],
    by_experiment: Mapping[str, dict[str, TableRows]],
    settings: Mapping[str, Mapping[str, Any]],
    quick: bool,
) -> str:
    parts = ["<h1>Conditional Poisson stochastic beams: the experiments</h1>"]
    if quick:
        parts.append(
            f"<p><b>This is a {QUICK_RUN}</b>: every experiment with few repeats and sizes. Its "
            "verdicts are not reliable; leave out <code>--quick</code> for the full experiments."
            "</p>"
        )
    parts.append(f"<h2>Claim by claim</h2>{_html_claims(found, quick)}")
    for experiment in experiments:
        title = html.escape(look_up("experiment", experiment, EXPERIMENTS))
        parts.append(f"<h2>{html.escape(experiment)}: {title}</h2>")
        parts += [_html_figure(each) for each in images[experiment]]
        for claim in found:
            if claim.experiment == experiment:
                parts.append(
                    f"<p><b>Claim:</b> {_text(claim.statement)} <b>Measured:</b> "
                    f"{_text(claim.measured)} <b>Holds:</b> {_html_verdict(claim, quick)}</p>"
                )
        for name, table in by_experiment[experiment].items():
            parts.append(
                f"<details><summary>{html.escape(name)}, {len(table)} rows</summary>"
                f"{_html_table(table)}</details>"
            )
    parts.append(f"<h2>Settings and versions</h2>{_html_settings(settings)}")
    body = "\n".join(parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>cpsbs: experiments</title><style>{STYLE}</style></head><body>\n{body}\n"
        "</body></html>\n"
    )


def _html_figure(each: _Image) -> str:
    """Return a figure that takes its share of the page's width, and scrolls on narrow screens."""
    svg = each.svg[each.svg.index("<svg") :]  # without the XML declaration
    kind = ' class="wide"' if each.width > 0.6 else ""
    style = f'style="width: {100 * each.width:.0f}%"'
    return f"<figure><svg{kind} {style}{svg.removeprefix('<svg')}</figure>"


def _html_verdict(claim: Claim, quick: bool) -> str:
    label = f' <span class="label">({QUICK_RUN})</span>' if quick else ""
    return f'<span class="{claim.verdict}">{claim.verdict}</span>{label}'


def _html_claims(found: Sequence[Claim], quick: bool) -> str:
    columns = ("experiment", "the paper", "measured", "holds")
    rows = [
        [_text(c.experiment), _text(c.statement), _text(c.measured), _html_verdict(c, quick)]
        for c in found
    ]
    return _html_cells(columns, rows, "claims")


def _html_settings(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one table per group of settings, side by side where there is room."""
    groups = []
    for group, values in settings.items():
        rows = [[_text(name.replace("_", " ")), _text(_setting(v))] for name, v in values.items()]
        groups.append(f"<div>{_html_cells((group, 'value'), rows)}</div>")
    return f'<div class="settings">{"".join(groups)}</div>'


def _setting(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "–" if value is None else str(value)


def _html_table(rows: TableRows) -> str:
    cells = [[_text(cell_text(value)) for value in row.values()] for row in rows]
    return _html_cells(tuple(rows[0]) if rows else (), cells)


def _html_cells(columns: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """Return a table of a kind that ``STYLE`` knows, whose cells are HTML."""
    if not rows:
        return "<p>Nothing was computed.</p>"
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    table = f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _text(text: str) -> str:
    """Return the text as HTML, with `code` marked."""
    pieces = html.escape(text).split("`")
    return "".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(pieces))


def _write(file: Path, data: bytes) -> None:
    with replacing(file) as out:
        out.write(data)
