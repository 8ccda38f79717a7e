"""Tabulates the numbers behind the figures, and writes tables as Markdown or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any

from cpsbs.experiments.analysis import Estimates, hindsight_deviation, runtimes, trade_offs
from cpsbs.experiments.cells import look_up
from cpsbs.experiments.figures import LABELS
from cpsbs.experiments.plan import Scale
from cpsbs.experiments.store import Row

TableRows = list[dict[str, Any]]
"""The rows of a table, each by column name."""


def tables(experiment: str, rows: Sequence[Row], scale: Scale) -> dict[str, TableRows]:
    """Return the numbers behind the figures of an experiment, by the names of their tables.

    Raises:
        ValueError: if the experiment is unknown.
    """

    def spread(f: str, normalized: bool = True, truncated: bool = False) -> dict[str, TableRows]:
        estimates = Estimates(rows, scale, f, normalized)
        return {experiment: _spread_table(estimates, truncated)}

    makers: dict[str, Callable[[], dict[str, TableRows]]] = {
        "bleu": lambda: spread("BLEU"),
        "bleu-unnormalized": lambda: spread("BLEU", normalized=False),
        "entropy": lambda: spread("entropy"),
        "truncation": lambda: spread("BLEU", truncated=True),
        "rmse": lambda: _rmse_tables(rows, scale),
        "diversity": lambda: {"diversity": _diversity_table(rows)},
        "runtime": lambda: {"runtime": _runtime_table(rows)},
        "hindsight": lambda: {"hindsight": _hindsight_table(rows)},
    }
    return look_up("experiment", experiment, makers)()


def _spread_table(estimates: Estimates, truncated: bool) -> TableRows:
    """Return mean and deviation for all designs, or for CPSBS with and without truncation."""
    return [
        {
            "sentence": line,
            "τ": temperature,
            "K": k,
            "design": LABELS[design] + ("" if nucleus is None else f", {nucleus}"),
            "mean": s.mean,
            "deviation": s.deviation,
        }
        for (line, temperature, k, design, nucleus), s in estimates.spread.items()
        if (design == "conditional-poisson" if truncated else nucleus is None)
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


def markdown(rows: TableRows) -> str:
    """Return a table as Markdown."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(cell_text(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def cell_text(value: Any) -> str:
    """Return the value as the text of a table cell, with three digits of a float."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def csv_text(rows: TableRows) -> str:
    """Return a table as CSV."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
