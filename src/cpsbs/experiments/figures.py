"""Plots the figures of the experiments, for the screen and for print.

The colours are Okabe and Ito's, which people with any kind of colour vision can tell apart; lines
differ in their markers as well.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cpsbs.experiments.analysis import (
    ALWAYS_PLAIN,
    Estimates,
    hindsight_deviation,
    inclusion_error,
    runtimes,
    trade_offs,
)
from cpsbs.experiments.cells import look_up
from cpsbs.experiments.plan import Scale
from cpsbs.experiments.store import Row
from cpsbs.extras import required

Figure = Any

PAGE = 11.0
"""The width of a figure with several panels, in inches; it fills the width of the report."""

WIDEST_PANEL = PAGE / 2

LABELS = {
    "independent": "Monte Carlo",
    "arithmetic": "arithmetic sampling",
    "sum-and-sample": "sum-and-sample",
    "gumbel-top-k": "SBS",
    "conditional-poisson": "CPSBS",
    "calibrated": "calibrated (ours)",
    "stratified": "stratified (ours)",
    "top-k": "beam search",
    "diverse": "diverse beam search",
}
STYLES = {
    "independent": ("#56B4E9", "s"),
    "arithmetic": ("#0072B2", "D"),
    "sum-and-sample": ("#CC79A7", "v"),
    "gumbel-top-k": ("#E69F00", "^"),
    "conditional-poisson": ("#D55E00", "o"),
    "calibrated": ("#999999", "P"),
    "stratified": ("#009E73", "*"),
    "top-k": ("#000000", "x"),
    "diverse": ("#F0E442", "h"),
}
PLOT = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "svg.fonttype": "none",
    "svg.hashsalt": "cpsbs",
}


def plot(experiment: str, rows: Sequence[Row], scale: Scale) -> list[tuple[str, Figure]]:
    """Return the figures of an experiment, with their names.

    Raises:
        ValueError: if the experiment is unknown.
    """

    def values(f: str, normalized: bool = True, curves: Sequence[Curve] | None = None) -> Figure:
        return _values(rows, scale, f, normalized, _of_designs(rows) if curves is None else curves)

    figures: dict[str, dict[str, Callable[[], Figure]]] = {
        "bleu": {"bleu": lambda: values("BLEU")},
        "bleu-unnormalized": {"bleu-unnormalized": lambda: values("BLEU", normalized=False)},
        "entropy": {
            "entropy": lambda: values("entropy"),
            "entropy-rao-blackwell": lambda: values("entropy RB"),
        },
        "truncation": {"truncation": lambda: values("BLEU", curves=TRUNCATION)},
        "rmse": {
            "rmse-bleu": lambda: _rmse(rows, scale, "BLEU"),
            "rmse-entropy": lambda: _rmse(rows, scale, "entropy"),
            "rmse-entropy-rao-blackwell": lambda: _rmse(rows, scale, "entropy RB"),
        },
        "diversity": {"diversity": lambda: _diversity(rows, scale)},
        "runtime": {"runtime": lambda: _runtime(rows)},
        "hindsight": {"hindsight": lambda: _hindsight(rows)},
    }
    chosen = look_up("experiment", experiment, figures)
    matplotlib: Any = required("matplotlib", "plots")
    matplotlib.use("agg")
    with matplotlib.rc_context(PLOT):
        return [(name, make()) for name, make in chosen.items()]


def image(figure: Figure, kind: str) -> bytes:
    """Return a figure as SVG or PNG; the same figure gives the same bytes."""
    out = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {}
    with required("matplotlib", "plots").rc_context(PLOT):
        figure.savefig(out, format=kind, dpi=160, metadata=metadata)
    return out.getvalue()


def _panels(rows: int, columns: int, height: float) -> tuple[Figure, Any]:
    """Return a figure with a grid of panels, each of that height in inches."""
    width = min(PAGE / columns, WIDEST_PANEL)
    pyplot: Any = required("matplotlib.pyplot", "plots")
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False
    )
    pyplot.close(figure)
    return figure, axes


def _legend(figure: Figure, axes: Any) -> None:
    entries: dict[str, Any] = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    columns = max(1, int(figure.get_figwidth() / 1.9))
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=columns)


def _line(axis: Any, design: str, x: Sequence[float], y: Sequence[float], **more: Any) -> None:
    colour, marker = STYLES[design]
    axis.plot(x, y, color=colour, marker=marker, **{"label": LABELS[design], **more})


Curve = tuple[str, float | None, str, str, str]
"""A curve of estimates: design, nucleus, label, colour and marker."""


def _of_designs(rows: Sequence[Row]) -> list[Curve]:
    """Return a curve for each design, without truncation."""
    designs = dict.fromkeys(row["design"] for row in rows if "f" in row)
    return [(design, None, LABELS[design], *STYLES[design]) for design in designs]


TRUNCATION: list[Curve] = [
    ("conditional-poisson", None, "all tokens", "#D55E00", "o"),
    ("conditional-poisson", 0.99, "0.99 of the mass", "#0072B2", "s"),
]


def _values(
    rows: Sequence[Row], scale: Scale, f: str, normalized: bool, curves: Sequence[Curve]
) -> Figure:
    """Plot mean and deviation against K, with a row per sentence, a column per temperature."""
    found = Estimates(rows, scale, f, normalized)
    figure, axes = _panels(len(scale.lines), len(scale.temperatures), 2.2)
    for r, line in enumerate(scale.lines):
        for c, temperature in enumerate(scale.temperatures):
            axis = axes[r, c]
            for design, nucleus, label, colour, marker in curves:
                keys = [(line, temperature, k, design, nucleus) for k in scale.sizes]
                spread = [found.spread[key] for key in keys if key in found.spread]
                sizes = [key[2] for key in keys if key in found.spread]
                axis.plot(sizes, [s.mean for s in spread], color=colour, marker=marker, label=label)
                low = [s.mean - s.deviation for s in spread]
                high = [s.mean + s.deviation for s in spread]
                axis.fill_between(sizes, low, high, color=colour, alpha=0.12, linewidth=0)
            truth = found.truth.get((line, temperature))
            if truth is not None:
                axis.axhline(truth.value, color="black", linewidth=0.8, linestyle=":")
            _limit(axis, found, line, temperature)
            axis.set_xticks(scale.sizes)
            if r == 0:
                axis.set_title(f"τ = {temperature}")
            if c == 0:
                axis.set_ylabel(f"sentence {line}\n{f}")
            if r == len(scale.lines) - 1:
                axis.set_xlabel("K")
    _legend(figure, axes)
    return figure


def _limit(axis: Any, found: Estimates, line: int, temperature: float) -> None:
    """Limit the axis to the bulk of the values, since heavy-tailed estimates flatten all others."""
    middle = [
        value
        for (sentence, t, _, design, _), s in found.spread.items()
        if (sentence, t) == (line, temperature) and design in ALWAYS_PLAIN
        for value in (s.mean - 2 * s.deviation, s.mean + 2 * s.deviation)
    ]
    if middle and max(middle) > min(middle):
        margin = 0.05 * (max(middle) - min(middle))
        axis.set_ylim(min(middle) - margin, max(middle) + margin)


def _rmse(rows: Sequence[Row], scale: Scale, f: str) -> Figure:
    """Plot the RMSE against K, averaged over the sentences, with one panel per temperature."""
    found = Estimates(rows, scale, f, normalized=True).rmse()
    figure, axes = _panels(1, len(scale.temperatures), 2.8)
    for axis, temperature in zip(axes[0], scale.temperatures, strict=True):
        for design in dict.fromkeys(key[2] for key in found):
            sizes = [k for k in scale.sizes if (temperature, k, design) in found]
            errors = (found[temperature, k, design] for k in sizes)
            _line(axis, design, sizes, [error or math.nan for error in errors])  # no zeros
        axis.set_yscale("log")
        axis.set_xticks(scale.sizes)
        axis.set_title(f"τ = {temperature}")
        axis.set_xlabel("K")
    axes[0, 0].set_ylabel(f"RMSE of {f}")
    _legend(figure, axes)
    return figure


def _diversity(rows: Sequence[Row], scale: Scale) -> Figure:
    """Plot min, mean and max BLEU against D: one panel per K, one point per temperature."""
    found = trade_offs(rows)
    figure, axes = _panels(1, len(scale.decoding_sizes), 3.4)
    for axis, k in zip(axes[0], scale.decoding_sizes, strict=True):
        for design in dict.fromkeys(key[1] for key in found):
            points = [found[key] for key in sorted(found) if key[:2] == (k, design)]
            colour, _ = STYLES[design]
            x = [p.diversity for p in points]
            _line(axis, design, x, [p.mean for p in points])
            low, high = [p.least for p in points], [p.most for p in points]
            axis.vlines(x, low, high, color=colour, linewidth=0.7, alpha=0.6)
        axis.set_title(f"K = {k}")
        axis.set_xlabel("n-gram diversity D")
    axes[0, 0].set_ylabel("sentence BLEU: min, mean, max")
    _legend(figure, axes)
    return figure


def _runtime(rows: Sequence[Row]) -> Figure:
    """Plot seconds per sentence against K, with one panel per device."""
    found = runtimes(rows)
    devices = list(dict.fromkeys(key[0] for key in found))
    figure, axes = _panels(1, max(1, len(devices)), 3.2)
    for axis, device in zip(axes[0], devices, strict=False):
        for design in dict.fromkeys(key[1] for key in found):
            sizes = sorted(k for d, name, k in found if (d, name) == (device, design))
            _line(axis, design, sizes, [found[device, design, k] for k in sizes])
        axis.set_title(device)
        axis.set_xlabel("K")
        axis.set_ylim(bottom=0)
        axis.locator_params(axis="x", integer=True)
    axes[0, 0].set_ylabel("seconds per sentence")
    _legend(figure, axes)
    return figure


def _hindsight(rows: Sequence[Row]) -> Figure:
    """Plot the error of log π on an enumerable model (left), and the deviation of BLEU (right)."""
    figure, axes = _panels(1, 2, 3.2)
    error, deviation = inclusion_error(rows), hindsight_deviation(rows)
    colours = ("#0072B2", "#009E73", "#E69F00", "#D55E00")
    for axis, curves, label in (
        (axes[0, 0], {(t, m): v for (t, m), v in error.items()}, "error of log π"),
        (
            axes[0, 1],
            {(t, m): v for (t, normalized, m), v in deviation.items() if normalized},
            "deviation of expected BLEU",
        ),
    ):
        for colour, temperature in zip(colours, _unique(t for t, _ in curves), strict=False):
            runs = sorted(m for t, m in curves if t == temperature and m > 0)
            values = [curves[temperature, m] for m in runs]
            axis.plot(runs, values, color=colour, marker="o", label=f"τ = {temperature}")
            if (temperature, 0) in curves:
                own = curves[temperature, 0]
                axis.axhline(own, color=colour, linewidth=0.8, linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_xlabel("M (dotted: own path)")
        axis.set_ylabel(label)
    _legend(figure, axes)
    return figure


def _unique(values: Iterable[float]) -> list[float]:
    return list(dict.fromkeys(values))
