"""How the time of a search grows with K, the vocabulary, the number of sources and the length.

    python -m benchmarks.growth [--device cpu|cuda] [--json FILE] [--figure FILE]

A Marian with random weights: on a CPU of the size of the embedded model, in float32; on a GPU twice
as wide, with twice as many layers of the decoder, in float16. From 8 sources of 20 tokens, K = 5,
V = 16,000 and 64 steps, in which nothing ends, one of the four is changed at a time. The figures
are medians of whole searches that take turns, divided by the number of steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.decoding import marian as small_marian
from benchmarks.tables import table
from benchmarks.timing import machine
from cpsbs import TransformersModel, search
from cpsbs.experiments.figures import PLOT, STYLES, image
from cpsbs.extras import required

ROOT = Path(__file__).parents[1]
DESIGNS = {"top-k": "beam search", "conditional-poisson": "CPSBS", "stratified": "stratified"}
SOURCE, ROUNDS = 20, 5


@dataclass(frozen=True)
class Shape:
    """What a search is asked for."""

    k: int = 5
    vocabulary: int = 16_000
    sources: int = 8
    steps: int = 64


GROWS = {
    "k": ("K", (1, 2, 5, 10, 20, 50)),
    "vocabulary": ("vocabulary", (4_000, 16_000, 64_000, 128_000)),
    "sources": ("sources", (1, 2, 4, 8, 16, 32, 64)),
    "steps": ("steps", (16, 32, 64, 128, 256)),
}
"""What is changed, how it is called on the axis, and its values."""


def model_of(device: str, vocabulary: int) -> Any:
    """Return the model, which ends nothing."""
    if device == "cpu":
        model = small_marian(vocabulary)
    else:
        from benchmarks.gpu_models import marian

        model = marian(vocabulary)
    model.generation_config.eos_token_id = None
    return model


def milliseconds(model: Any, shape: Shape) -> dict[str, float]:
    """Return the milliseconds a step of every design; they take turns."""
    random = torch.Generator().manual_seed(0)
    size = (shape.sources, SOURCE)
    ids = torch.randint(2, shape.vocabulary, size, generator=random).to(model.device)

    def run(design: str) -> float:
        start = time.perf_counter()
        inputs = TransformersModel(model, input_ids=ids)
        beams = search(inputs, shape.k, design, max_length=shape.steps, generator=0)
        beams.sequences.cpu()
        return time.perf_counter() - start

    for design in DESIGNS:
        run(design), run(design)
    seconds: dict[str, list[float]] = {design: [] for design in DESIGNS}
    for _ in range(ROUNDS):
        for design, own in seconds.items():
            own.append(run(design))
    return {name: 1e3 * statistics.median(own) / shape.steps for name, own in seconds.items()}


def measured(device: str) -> list[dict[str, object]]:
    """Return a row for each shape; a model is made once for each vocabulary."""
    rows: list[dict[str, object]] = []
    make = partial(model_of, device)
    usual = make(Shape.vocabulary)
    for name, (_, values) in GROWS.items():
        for value in values:
            shape = replace(Shape(), **{name: value})
            model = usual if shape.vocabulary == Shape.vocabulary else make(shape.vocabulary)
            times = milliseconds(model, shape)
            rows.append({"grows": name, **asdict(shape), **times})
            print(rows[-1], flush=True)
    return rows


def figure(results: dict[str, Any]) -> bytes:
    """Return the figure as SVG: a row of panels for each device, a panel for what grows."""
    matplotlib: Any = required("matplotlib", "plots")
    matplotlib.use("agg")
    pyplot: Any = required("matplotlib.pyplot", "plots")
    devices = {d: text for d, text in (("cpu", "CPU"), ("cuda", "GPU")) if f"growth_{d}" in results}
    with matplotlib.rc_context(PLOT):
        size = (9.0, 0.7 + 2.3 * len(devices))
        made, grid = pyplot.subplots(len(devices), len(GROWS), figsize=size, squeeze=False)
        pyplot.close(made)
        for axes, (device, title) in zip(grid, devices.items(), strict=True):
            for axis, (name, (label, values)) in zip(axes, GROWS.items(), strict=True):
                rows = [row for row in results[f"growth_{device}"] if row["grows"] == name]
                for design, text in DESIGNS.items():
                    colour, marker = STYLES[design]
                    x, y = ([row[key] for row in rows] for key in (name, design))
                    axis.plot(x, y, color=colour, marker=marker, label=text)
                axis.set_xscale("log"), axis.set_yscale("log")
                axis.minorticks_off()
                axis.set_xticks(values, [f"{v:,}" if v < 1000 else f"{v // 1000}k" for v in values])
                axis.set_xlabel(label)
            axes[0].set_ylabel(f"ms a step, {title}")
            low = min(axis.get_ylim()[0] for axis in axes)
            high = max(axis.get_ylim()[1] for axis in axes)
            ticks = [t for n in range(-1, 4) for t in (10**n, 2 * 10**n, 5 * 10**n)]
            ticks = [t for t in ticks if low <= t <= high]
            for axis in axes:
                axis.set_yticks(ticks, [f"{t:g}" for t in ticks])
                axis.set_ylim(low, high)
        handles, labels = grid[0][0].get_legend_handles_labels()
        made.legend(handles, labels, loc="outside lower center", ncols=len(DESIGNS))
    return image(made, "svg")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="measure on this device")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/growth.json")
    parser.add_argument("--figure", type=Path, help="draw all that was measured into this SVG file")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    if arguments.json.exists():
        results = json.loads(arguments.json.read_text())
    if arguments.device:
        name = f"growth_{arguments.device}"
        results[name] = measured(arguments.device)
        on = machine() if arguments.device == "cpu" else {"card": torch.cuda.get_device_name()}
        results[f"machine_{arguments.device}"] = on
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
        print(table(results[name]))
    if arguments.figure:
        arguments.figure.write_bytes(figure(results))


if __name__ == "__main__":
    main()
