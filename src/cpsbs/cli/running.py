"""Runs a command over many texts, and turns errors into one line and an exit status."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import torch
import typer
from rich.console import Console

from cpsbs import __version__
from cpsbs.cli.batches import Note, process_batches, refill_size
from cpsbs.cli.draws import Draw
from cpsbs.cli.engines import Engine, Place, Work
from cpsbs.cli.formats import Format, long_rows
from cpsbs.cli.ordered import OrderedOutput, Record, Sink
from cpsbs.cli.outputs import ResumableFile, of_total
from cpsbs.cli.source import Source, Window
from cpsbs.cli.stored import to_line
from cpsbs.cli.terminal import print_message, visible, visible_json
from cpsbs.estimation.weights import WeightWarning
from cpsbs.windows import WINDOW, first_window

EPILOG = (
    "Exit status: 0 success; 1 an error, whose message says what to do; 2 an unknown or malformed "
    "option; 3 lines were skipped because of --skip; 130 interrupted by Ctrl-C."
)


OPTIONS = {
    "name": "--model",
    "quantize": "--int8",
    "max_length": "--max-length",
    **{x: f"--{x}" for x in ("device", "dtype", "design", "temperature", "nucleus", "anneal")},
}
"""The options of the arguments that errors begin with."""

NO_MEMORY = ("bad_alloc", "can't allocate memory")
"""How torch says on a CPU that there is too little memory."""


class LinesSkippedError(Exception):
    """Raised at the end of a run that skipped some lines."""


class ReaderGoneError(Exception):
    """Raised when the process that reads standard output has closed it."""


@contextmanager
def reporting_errors(
    stopped: str = "with --output, run the same command again to resume",
) -> Iterator[None]:
    """Report an error inside the block in one line on standard error, and exit with its status.

    Args:
        stopped: what to say after Ctrl-C.
    """
    try:
        with _reporting_warnings():
            yield
    except ReaderGoneError as gone:
        # Nothing more can be written, not even when Python flushes the stream at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from gone
    except (
        ArithmeticError,
        AssertionError,
        ImportError,
        MemoryError,
        OSError,
        RuntimeError,
        ValueError,
    ) as error:
        print_message("error", _said(error))
        raise typer.Exit(1) from error
    except LinesSkippedError as skipped:
        print_message("note", str(skipped))
        raise typer.Exit(3) from skipped
    except KeyboardInterrupt as stop:
        print_message("stopped", stopped)
        raise typer.Exit(130) from stop


def _said(error: BaseException) -> str:
    """Return what an error says, by the names of the options instead of those in Python."""
    message = str(error) or type(error).__name__
    if isinstance(error, MemoryError) or any(sign in message for sign in NO_MEMORY):
        return f"there is too little memory; choose a smaller -k or --batch-size ({message})"
    for name, option in OPTIONS.items():
        if message.startswith(f"{name} is "):
            return option + message.removeprefix(name)
    return message


@contextmanager
def _reporting_warnings() -> Iterator[None]:
    """Report the first warning about weights as a note, and ignore further ones."""
    reported = False

    def report(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        nonlocal reported
        if not issubclass(category, WeightWarning):
            show(message, category, filename, lineno, file, line)
        elif not reported:
            reported = True
            print_message("note", str(message))

    with warnings.catch_warnings():
        show = warnings.showwarning
        warnings.showwarning = report
        warnings.simplefilter("always", WeightWarning)
        yield


Process = Callable[..., None]
"""Takes a sink and windows, and computes what the sink does not have; see ``Job``."""


@dataclass(frozen=True)
class Job:
    """The work of one command on many texts, and where its results go."""

    draw: Draw
    engine: Engine
    work: Work
    source: Source
    continuous_batching: bool
    """Whether texts of later batches can join the search while earlier ones go on."""
    batch_size: int | None
    """The number of texts to compute at once; None for what the engine has room for."""
    output: Path | None
    show: Callable[[Record], None]
    settings: Record
    """The settings of the command that the results depend on, besides those of the draw."""
    captured: Callable[[Record], float | None]
    """Returns the probability of the sequences of a record, where it is known."""
    long: bool = False
    """Whether a file has a row for each sequence, instead of one for each text."""
    plain: Format | None = None
    """The format of a file that ends in ``.txt``, if it is not JSON lines."""
    rounds: bool = False
    """Whether a batch takes several rounds, so that progress is shown even for a single one."""
    largest: int | None = None
    """The largest number of sequences for a text, if it is not K."""
    seen: Callable[[Record], None] | None = None
    """Called with every record, in the order of the input, also those of an earlier run."""
    then: Callable[[], None] | None = None
    """Called when all results are there, before skipped lines are reported."""

    def identity(self, place: Place, batch_size: int, alone: bool) -> Record:
        """Return what the results depend on besides the input, to the last digit on one machine."""
        return {
            **self.draw.settings.as_record(),
            "seed": self.draw.seed,
            "model": self.engine.model.name,
            "model_content": self.engine.content,
            "dtype": place.dtype,
            "device": place.device,
            **({"threads": self.engine.threads(alone)} if place.device == "cpu" else {}),
            "batch_size": batch_size,
            "version": __version__,
            **self.settings,
        }

    def run(self) -> None:
        """Compute the results that are not there yet, for all texts that can be used."""
        settings = self.draw.settings
        place = self.engine.prepare(self.largest or settings.k, settings.max_length)
        size = self.batch_size or place.batch_size
        first_size = first_window(size, torch.device(place.device))
        read = self.source.windows(
            self.engine.model, settings.max_length, first_size, WINDOW * size
        )
        # The first window is read before a file is begun, which a bad text in it would prevent.
        windows = chain([first] if (first := next(read, None)) else [], read)
        # Only texts that somebody has typed are all there is: a resumed file has the same digits.
        alone = self.source.given is not None and self.source.given <= first_size
        refill = refill_size(size) if self.continuous_batching and place.device == "cuda" else size
        process = partial(self._process, size, refill, alone)
        if self.output is None:
            self._print(windows, process)
        else:
            self._store(self.output, self.identity(place, size, alone), windows, process)
        if self.then is not None:
            self.then()
        skipped = self.source.skipped_lines()
        if skipped is not None:
            raise LinesSkippedError(skipped)

    def _print(self, windows: Iterator[Window], process: Process) -> None:
        def show(record: Record) -> None:
            if self.seen is not None:
                self.seen(record)
            self.show(record)

        # Closing it shows the results so far, also when the run is interrupted.
        with closing(OrderedOutput(show)) as ordered:
            process(ordered, windows)

    def _store(
        self, output: Path, identity: Record, windows: Iterator[Window], process: Process
    ) -> None:
        messages = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)
        in_order = None if self.seen is None else OrderedOutput(self.seen)

        def followed() -> Iterator[Window]:
            for window in windows:
                if in_order is not None:
                    in_order.begin(window)
                yield window

        sink = ResumableFile(
            output,
            identity,
            self.long,
            self.plain,
            None if in_order is None else lambda record: in_order.write([record]),
            lambda: self.source.total,
        )

        def resuming() -> None:
            if sink.count:
                messages.print(f"Resuming: {of_total(sink.count, self.source.total)} are done.")

        with closing(sink):
            if sink.complete:
                sink.check(self._released(followed()))
                messages.print(visible(f"{output} is already complete."))
            else:
                process(sink, followed(), resuming)
                messages.print(visible(f"Wrote {sink.count:,} results to {output}."))

    def _released(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Yield windows, and forget the texts of each when the next one is asked for."""
        for window in windows:
            yield window
            self.source.release(window)

    def _process(
        self,
        size: int,
        refill: int,
        alone: bool,
        sink: Sink,
        windows: Iterator[Window],
        resuming: Callable[[], None] = lambda: None,
    ) -> None:
        """Compute all batches that are not complete in the sink yet.

        Args:
            size: the number of texts to compute at once.
            refill: the number of texts that join a running search.
            alone: whether there is only one batch, and somebody waits for it.
            sink: where the results go.
            windows: the texts.
            resuming: called once before the first batch is computed.
        """
        note, total = Note(), self.source.total

        def compute(batches: Iterable[list[int]]) -> Iterator[list[Record]]:
            return self.engine.compute(self.work, map(self.source.batch, batches), note, alone)

        many = self.rounds or total is None or total > size
        process_batches(
            compute,
            windows,
            self.source,
            size,
            refill,
            sink,
            # A progress bar would garble results on the same terminal.
            many and (self.output is not None or not sys.stdout.isatty()),
            self.captured,
            note,
            resuming,
        )
        sink.finish()


def printer(
    json_lines: bool, render: Callable[[Record], Any], long: bool = False
) -> Callable[[Record], None]:
    """Return a function that prints a record, as JSON or as ``render`` lays it out for people.

    With ``long``, JSON has a line for each sequence.
    """
    if wants_json(json_lines):
        return print_rows if long else print_json
    console = Console(highlight=False, markup=False, emoji=False)
    return lambda record: console.print(render(record))


def wants_json(json_lines: bool) -> bool:
    """Return whether to print JSON: on request, or if standard output is not a terminal."""
    return json_lines or not sys.stdout.isatty()


def print_rows(record: Record) -> None:
    """Print a line of JSON for each sequence of a record."""
    for row in long_rows(record):
        print_json(row)


def print_json(record: Record) -> None:
    """Print a record as a line of JSON."""
    try:
        sys.stdout.write(visible_json(to_line(record).decode()))
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise ReaderGoneError from error
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"standard output cannot be written: {reason}") from error
