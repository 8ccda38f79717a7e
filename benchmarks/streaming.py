"""What does a long input cost beside the model: memory, and time to the first and to every result?

    python -m benchmarks.streaming --source FILE [--lines N] [--seconds S] [--json FILE]
        [--pages FILE …]

The lines of a file are repeated, and go from a file through reading, checking, batching and writing
to a file of results, as in ``cpsbs sample --file FILE --output FILE``: N lines with results that
cost nothing, and then so many through the embedded model as it takes in S seconds. Each run is a
process of its own. Memory is the peak of the process, at several numbers of results; the time of
the model is that of the search alone, everything else is overhead.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.tables import into_readme, table
from benchmarks.timing import machine
from cpsbs.cli.batches import default_batch_size
from cpsbs.cli.draws import Draw, captured_mass, draw_with, load_quietly, sample_records
from cpsbs.cli.inputs import Lines, read_texts
from cpsbs.cli.ordered import Record
from cpsbs.cli.running import Job
from cpsbs.cli.source import Source
from cpsbs.designs import design_named
from cpsbs.search.beams import Beams
from cpsbs.text import TextModel

K, TEMPERATURE = 5, 0.5
MARKS = (0.1, 0.25, 0.5, 1.0)
"""At which shares of all results the memory is noted."""


class Clock:
    """Seconds since the beginning, those of the model, and peaks of memory on the way."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self.model = 0.0
        self.first: float | None = None
        self.peaks: list[tuple[int, float]] = []
        self.results = 0

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._begin

    def note(self, records: list[Record]) -> None:
        """Note what was reached before these records are written."""
        if self.first is None:
            self.first = self.seconds
        self.results += len(records)
        self.peaks.append((self.results, peak()))

    def report(self) -> dict[str, Any]:
        """Return all that was measured."""
        self.peaks.append((self.results, peak()))  # and when the file is complete
        at = [next(p for p in self.peaks if p[0] >= share * self.results) for share in MARKS]
        return {
            "lines": self.results,
            "seconds": self.seconds,
            "model_seconds": self.model,
            "first_result_seconds": self.first,
            "peaks_mb": [*at[:-1], self.peaks[-1]],
        }


def peak() -> float:
    """Return the largest memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def timed_search(
    draw: Draw, model: TextModel, source: Source, batches: Iterable[list[int]], clock: Clock
) -> Iterator[tuple[list[int], Beams]]:
    """Yield the beams of every batch, and count the time that the search takes."""
    for numbers in batches:
        begin = time.perf_counter()
        beams = draw.beams(model, source.prompts, numbers)
        clock.model += time.perf_counter() - begin
        yield numbers, beams


def measured(source: Source, output: Path, through_model: bool) -> dict[str, Any]:
    """Do what ``cpsbs sample`` does, with the embedded model or with results that cost nothing."""
    model = load_quietly("en-fr", "cpu", None, False)
    draw = draw_with(model, K, design_named("stratified"), TEMPERATURE, None, None, 0)
    canned = sample_records(draw.beams(model, ["Yes."], [0]), model, ["Yes."], [0], None)[0]
    clock = Clock()

    def compute(batches: Iterable[list[int]]) -> Iterator[list[Record]]:
        if through_model:
            for numbers, beams in timed_search(draw, model, source, batches, clock):
                records = sample_records(beams, model, source.texts, numbers, None)
                clock.note(records)
                yield records
            return
        for numbers in batches:
            records = [{**canned, "number": i, "text": source.texts[i]} for i in numbers]
            clock.note(records)
            yield records

    Job(
        draw,
        model,
        source,
        compute,
        continuous_batching=False,
        batch_size=default_batch_size(model, K, draw.settings.max_length),
        output=output,
        show=lambda _: None,
        settings={"command": "sample"},
        captured=captured_mass,
    ).run()
    return clock.report()


def until(texts: list[str], seconds: float) -> Lines:
    """Return texts, again and again, until the time is up."""

    def found() -> Iterator[str]:
        end = time.perf_counter() + seconds
        for text in cycle(texts):
            if time.perf_counter() > end:
                return
            yield text

    return Lines(found(), lambda _: None)


def work(arguments: argparse.Namespace) -> dict[str, Any]:
    """Do one of the runs, in a process of its own."""
    texts = arguments.source.read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "results.jsonl")
        if arguments.work == "model":
            return measured(Source(until(texts, arguments.seconds)), output, True)
        repeated = Path(folder, "texts.txt")
        with repeated.open("w", encoding="utf-8") as file:
            file.writelines(f"{text}\n" for text in islice(cycle(texts), arguments.lines))
        return measured(Source(read_texts(None, repeated)), output, False)


def tables(results: dict[str, Any]) -> dict[str, list[dict[str, object]]]:
    """A row for each run."""
    names = {"costless": "results that cost nothing", "model": "embedded model"}
    lines: list[dict[str, object]] = []
    for name, told in names.items():
        own = results[name]
        rest = own["seconds"] - own["model_seconds"]
        share = f"{100 * rest / own['model_seconds']:.1f}" if own["model_seconds"] else ""
        lines.append(
            {
                "": told,
                "lines": own["lines"],
                "lines/s": own["lines"] / own["seconds"],
                "first results, s": own["first_result_seconds"],
                **{
                    f"peak at {share_of:.0%}, MB": round(mb)
                    for share_of, (_, mb) in zip(MARKS, own["peaks_mb"], strict=True)
                },
                "all but the model, ms/line": f"{1000 * rest / own['lines']:.2f}",
                "of the model's time, %": share,
            }
        )
    return {"streaming": lines}


def main() -> None:
    """Measure both runs, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pages", type=Path, nargs="*", default=[], help="with tables to fill in")
    parser.add_argument("--work", choices=["costless", "model"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        print(json.dumps(work(arguments)))
        return
    results: dict[str, Any] = {"machine": machine()}
    for name in ("model", "costless"):
        command = [sys.executable, "-m", "benchmarks.streaming", "--work", name]
        command += ["--source", str(arguments.source), "--lines", str(arguments.lines)]
        command += ["--seconds", str(arguments.seconds)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        results[name] = json.loads(done.stdout)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(table(tables(results)["streaming"]))
    for page in arguments.pages:
        page.write_text(into_readme(page.read_text(), tables(results)))


if __name__ == "__main__":
    main()
