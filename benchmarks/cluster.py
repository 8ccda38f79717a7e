"""Sentences a second of one-core workers on a Ray cluster, over those of one thread without Ray.

    python -m benchmarks.cluster --source FILE [--sentences N] [--rounds R] [--json FILE]
        [--page FILE]

The embedded model draws K = 5 sequences for sentences of FILE, as ``cpsbs sample`` does: in this
process with one thread, and with 1, 2, 4, … workers of one core each, up to the cores of the
machine. Workers are started and have drawn once before the clock runs. Runs take turns, and a ratio
is the median of the ratios of single rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from benchmarks.tables import into_readme, table
from benchmarks.timing import machine
from cpsbs.cli.batches import Note
from cpsbs.cli.draws import ModelChoice, draw_with
from cpsbs.cli.engines import Engine, LocalEngine, RayEngine
from cpsbs.cli.sample import SampleWork
from cpsbs.cli.source import Batch
from cpsbs.designs import design_named

K, TEMPERATURE, BATCH = 5, 0.5, 16
HERE = "one thread, without Ray"

Row = dict[str, object]


def batches(texts: list[str]) -> Iterator[Batch]:
    """Yield batches of sentences of similar length, the longest first."""
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    for first in range(0, len(texts), BATCH):
        numbers = order[first : first + BATCH]
        own = [texts[i] for i in numbers]
        yield Batch(numbers, own, list(own))


def seconds(engine: Engine, work: SampleWork, texts: list[str]) -> float:
    """Return how long an engine takes for the sentences."""
    begin = time.perf_counter()
    found = engine.compute(work, batches(texts), Note(), alone=False)
    assert sum(len(records) for records in found) == len(texts)
    return time.perf_counter() - begin


def measured(texts: list[str], rounds: int) -> list[Row]:
    """Return a row for each number of workers."""
    torch.set_num_threads(1)
    choice = ModelChoice("en-fr", "cpu")
    counts = [n for n in (1, 2, 4, 8, 16, 32) if n <= len(os.sched_getaffinity(0))]
    rates: dict[str, list[float]] = {}
    for n in range(-1, rounds):
        for name, workers in [(HERE, 0), *((f"workers: {count}", count) for count in counts)]:
            # One engine at a time: idle workers of another one would hold the cores.
            with ExitStack() as stack:
                engine: Engine = LocalEngine(choice)
                if workers:
                    engine = stack.enter_context(closing(RayEngine(choice, None, workers, 1)))
                draw = draw_with(
                    engine.model, K, design_named("stratified"), TEMPERATURE, None, None, 0
                )
                engine.prepare(K, draw.settings.max_length)
                work = SampleWork(draw, None)
                seconds(engine, work, texts[: 2 * BATCH * max(1, workers)])
                rate = len(texts) / seconds(engine, work, texts)
            print(n, name, f"{rate:.1f}", flush=True)
            if n >= 0:
                rates.setdefault(name, []).append(rate)
    return [
        {
            "": name,
            "sentences a second": statistics.median(own),
            "over one thread": _ratio(own, rates[HERE]),
            "over one worker": "" if name == HERE else _ratio(own, rates["workers: 1"]),
        }
        for name, own in rates.items()
    ]


def _ratio(own: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(own, other, strict=True))


def main() -> None:
    """Measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="sentences, one a line")
    parser.add_argument("--sentences", type=int, default=600, help="how many, evenly spread")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--page", type=Path, help="put the figures into the table of this page")
    arguments = parser.parse_args()
    texts = arguments.source.read_text(encoding="utf-8").splitlines()
    step = max(1, len(texts) // arguments.sentences)
    results: dict[str, Any] = {"cluster": measured(texts[::step], arguments.rounds)}
    results["on"] = machine() | {"sentences": len(texts[::step]), "rounds": arguments.rounds}
    print(table(results["cluster"]))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    if arguments.page:
        arguments.page.write_text(into_readme(arguments.page.read_text(), results))


if __name__ == "__main__":
    main()
