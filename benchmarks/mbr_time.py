"""What does MBR decoding cost beside sampling, and where does the time go?

    python -m benchmarks.mbr_time --source FILE [--limit N] [--json FILE] [--pages FILE …]

``cpsbs mbr`` with its defaults and ``cpsbs sample`` with the same number of sequences take turns on
the lines of a file, each run a process of its own; the ratio is that of their medians. The parts of
the time are measured in this process: the two searches, turning sequences into texts, comparing
all pairs, and everything else, which is mostly expectations and their errors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import cpsbs
from benchmarks.tables import into_readme, table
from benchmarks.timing import machine
from cpsbs.cli.batches import default_batch_size
from cpsbs.decisions.plan import DEFAULT_TEMPERATURE, Plan
from cpsbs.utilities import Chrf

PLAN = Plan.parse()
DRAWN = PLAN.k + sum(part.size for part in PLAN.parts)
"""The number of sequences that the defaults draw for a text."""


def commands(lines: list[str], device: str, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of runs of both commands, which take turns."""
    own = {
        "sample": ["sample", "-k", str(DRAWN), "--temperature", str(DEFAULT_TEMPERATURE)],
        "mbr": ["mbr"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in own}
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder, "texts.txt")
        texts.write_text("\n".join(lines) + "\n", encoding="utf-8")
        for turn in range(repeats):
            for name, words in own.items():
                output = Path(folder, f"{name}{turn}.jsonl")
                command = [sys.executable, "-m", "cpsbs", *words, "--file", str(texts)]
                command += ["--device", device, "--output", str(output)]
                begin = time.perf_counter()
                subprocess.run(command, check=True, capture_output=True)
                seconds[name].append(time.perf_counter() - begin)
    return seconds


class Stopwatch:
    """Adds up the time that is spent in parts of a program."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time spent inside for the part of this name."""
        begin = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def timed(self, name: str, f: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose calls count for the part of this name."""

        def wrapped(*arguments: Any) -> Any:
            with self.part(name):
                return f(*arguments)

        return wrapped


class TimedChrf(Chrf):
    """chrF that tells a stopwatch how long it takes."""

    def __init__(self, watch: Stopwatch) -> None:
        self.tables = watch.timed("all pairs", super().tables)  # type: ignore[method-assign]


def parts(lines: list[str], device: str) -> dict[str, float]:
    """Return the seconds of every part of the decisions for these texts."""
    model = cpsbs.load("en-fr", device=device)
    settings = PLAN.evidence_settings(model.usual_length, DEFAULT_TEMPERATURE)
    order = sorted(range(len(lines)), key=lambda i: -len(lines[i]))
    size = default_batch_size(model, PLAN.k, model.usual_length)
    batches = [order[i : i + size] for i in range(0, len(order), size)]

    def run(watch: Stopwatch) -> None:
        decode, utility = watch.timed("texts", model.decode), TimedChrf(watch)
        for numbers in batches:
            texts, drawn = [lines[i] for i in numbers], []
            for offset, part in PLAN.searches:
                own = settings if part is None else part.settings(settings)
                with watch.part("searches"):
                    found = model.draw([texts], own, seed=offset, streams=[numbers])
                    drawn.append(next(found))
            with watch.part("decisions"):
                PLAN.decide(drawn, numbers, _refuse, settings, utility, decode)

    run(Stopwatch())  # compiles kernels and records steps
    watch = Stopwatch()
    run(watch)
    found = watch.seconds
    found["the rest"] = found.pop("decisions") - found["texts"] - found["all pairs"]
    return found


def _refuse(numbers: list[int], settings: object, seed_offset: int) -> cpsbs.Beams:
    raise AssertionError("a plan that is not adaptive draws no more evidence")


def tables(results: dict[str, Any]) -> dict[str, list[dict[str, object]]]:
    """A row for each device."""
    lines: list[dict[str, object]] = []
    for device, own in results.items():
        medians = {name: statistics.median(own["commands"][name]) for name in own["commands"]}
        whole = sum(own["parts"].values())
        lines.append(
            {
                "device": device,
                "sentences": own["sentences"],
                f"sample -k {DRAWN}, s": f"{medians['sample']:.1f}",
                "mbr, s": f"{medians['mbr']:.1f}",
                "ratio": f"{medians['mbr'] / medians['sample']:.2f}",
                **{f"{n}, %": f"{100 * s / whole:.0f}" for n, s in sorted(own["parts"].items())},
            }
        )
    return {"mbr_time": lines}


def main() -> None:
    """Measure on one device, and print the table of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="read, and written with the device of this run")
    parser.add_argument("--pages", type=Path, nargs="*", default=[], help="with tables to fill in")
    arguments = parser.parse_args()
    lines = arguments.source.read_text(encoding="utf-8").splitlines()[: arguments.limit]
    results: dict[str, Any] = {}
    if arguments.json is not None and arguments.json.exists():
        results = json.loads(arguments.json.read_text())
    results[arguments.device] = {
        "machine": machine(),
        "sentences": len(lines),
        "commands": commands(lines, arguments.device, arguments.repeats),
        "parts": parts(lines, arguments.device),
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(table(tables(results)["mbr_time"]))
    for page in arguments.pages:
        page.write_text(into_readme(page.read_text(), tables(results)))


if __name__ == "__main__":
    main()
