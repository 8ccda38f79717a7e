"""What does a long input cost beside the model: memory, and time to the first and to every result?

    python -m benchmarks.streaming --source FILE [--lines N] [--through-model N] [--json FILE]
        [--pages FILE …]

The lines of a file are repeated, and go from a file through reading, checking, batching and writing
to a file of results, as in ``cpsbs sample --file FILE --output FILE``: N lines with results that
cost nothing, and fewer through the embedded model. Each run is a process of its own. Memory is the
peak of the process, at several numbers of results. Overhead is processor time, which other work on
the machine changes little: all that the process used but what its searches did.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.tables import into_readme, table
from benchmarks.timing import machine
from cpsbs.cli.batches import Note
from cpsbs.cli.draws import Draw, ModelChoice, captured_mass, draw_with, sample_records
from cpsbs.cli.engines import Engine, LocalEngine, Place, Work
from cpsbs.cli.inputs import read_texts
from cpsbs.cli.ordered import Record
from cpsbs.cli.running import Job
from cpsbs.cli.source import Batch, Source
from cpsbs.designs import design_named
from cpsbs.search.more import Progress
from cpsbs.text import TextModel

K, TEMPERATURE = 5, 0.5
MARKS = (0.1, 0.25, 0.5, 1.0)
"""At which shares of all results the memory is noted."""


class Clock:
    """Seconds since the beginning, those of the searches, and peaks of memory on the way."""

    def __init__(self) -> None:
        self._begin, self._begin_processor = time.perf_counter(), time.process_time()
        self._lock = threading.Lock()
        self.searching = 0.0
        self.first: float | None = None
        self.peaks: list[tuple[int, float]] = []
        self.results = 0

    def searched(self, seconds: float) -> None:
        """Add processor time of a search, from any thread."""
        with self._lock:
            self.searching += seconds

    def note(self, records: list[Record]) -> None:
        """Note what was reached before these records are written."""
        if self.first is None:
            self.first = time.perf_counter() - self._begin
        self.results += len(records)
        self.peaks.append((self.results, peak()))

    def report(self) -> dict[str, Any]:
        """Return all that was measured."""
        self.peaks.append((self.results, peak()))  # and when the file is complete
        at = [next(p for p in self.peaks if p[0] >= share * self.results) for share in MARKS]
        return {
            "lines": self.results,
            "seconds": time.perf_counter() - self._begin,
            "processor_seconds": time.process_time() - self._begin_processor,
            "search_processor_seconds": self.searching,
            "first_result_seconds": self.first,
            "peaks_mb": [*at[:-1], self.peaks[-1]],
        }


def peak() -> float:
    """Return the largest memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


@dataclass(frozen=True)
class TimedWork:
    """Does what ``cpsbs sample`` does, and notes the processor time of every search."""

    draw: Draw
    clock: Clock

    def records(
        self, model: TextModel, batches: Iterable[Batch], progress: Progress
    ) -> Iterator[list[Record]]:
        """Yield the records of each batch, in their order."""
        for batch in batches:
            begin = time.thread_time()
            beams = self.draw.beams(model, batch)
            self.clock.searched(time.thread_time() - begin)
            yield sample_records(beams, model, batch)


@dataclass(frozen=True)
class CannedWork:
    """Returns a copy of one record for every text."""

    canned: Record

    def records(
        self, model: TextModel, batches: Iterable[Batch], progress: Progress
    ) -> Iterator[list[Record]]:
        """Yield the records of each batch, in their order."""
        for batch in batches:
            told = zip(batch.numbers, batch.texts, strict=True)
            yield [{**self.canned, "number": number, "text": text} for number, text in told]


class Watched(Engine):
    """Computes with another engine, and notes what comes out."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.model, self._engine, self._clock = engine.model, engine, clock

    def prepare(self, k: int, max_length: int) -> Place:
        """Return what results depend on."""
        return self._engine.prepare(k, max_length)

    def threads(self, alone: bool) -> int:
        """Return the number of threads of the other engine."""
        return self._engine.threads(alone)

    def compute(
        self, work: Work, batches: Iterable[Batch], note: Note, alone: bool
    ) -> Iterator[list[Record]]:
        """Yield the records of each batch, in their order."""
        for records in self._engine.compute(work, batches, note, alone):
            self._clock.note(records)
            yield records


def measured(source: Path, lines: int, through_model: bool) -> dict[str, Any]:
    """Do what ``cpsbs sample`` does, with the embedded model or with results that cost nothing."""
    engine = LocalEngine(ModelChoice("en-fr", "cpu"))
    draw = draw_with(engine.model, K, design_named("stratified"), TEMPERATURE, None, None, 0)
    one = Batch.alone("Yes.")
    canned = sample_records(draw.beams(engine.model, one), engine.model, one)[0]
    texts = source.read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        repeated = Path(folder, "texts.txt")
        with repeated.open("w", encoding="utf-8") as file:
            file.writelines(f"{text}\n" for text in islice(cycle(texts), lines))
        clock = Clock()
        Job(
            draw,
            Watched(engine, clock),
            TimedWork(draw, clock) if through_model else CannedWork(canned),
            Source(read_texts(None, repeated)),
            continuous_batching=False,
            batch_size=None,
            output=Path(folder, "results.jsonl"),
            show=lambda _: None,
            settings={"command": "sample"},
            captured=captured_mass,
        ).run()
        return clock.report()


def tables(results: dict[str, Any]) -> dict[str, list[dict[str, object]]]:
    """A row for each run."""
    names = {"costless": "results that cost nothing", "model": "embedded model"}
    lines: list[dict[str, object]] = []
    for name, told in names.items():
        own = results[name]
        searching = own["search_processor_seconds"]
        rest = own["processor_seconds"] - searching
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
                "overhead, ms/line": f"{1000 * rest / own['lines']:.2f}",
                "over the searches, %": f"{100 * rest / searching:.1f}" if searching else "",
            }
        )
    return {"streaming": lines}


def main() -> None:
    """Measure both runs, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--through-model", type=int, default=30_000, metavar="N")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pages", type=Path, nargs="*", default=[], help="with tables to fill in")
    parser.add_argument("--work", choices=["costless", "model"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        print(json.dumps(measured(arguments.source, arguments.lines, arguments.work == "model")))
        return
    results: dict[str, Any] = {"machine": machine()}
    for name, lines in (("costless", arguments.lines), ("model", arguments.through_model)):
        command = [sys.executable, "-m", "benchmarks.streaming", "--work", name]
        command += ["--source", str(arguments.source), "--lines", str(lines)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        results[name] = json.loads(done.stdout)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(table(tables(results)["streaming"]))
    for page in arguments.pages:
        page.write_text(into_readme(page.read_text(), tables(results)))


if __name__ == "__main__":
    main()
