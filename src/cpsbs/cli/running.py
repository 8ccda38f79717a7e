"""Runs a command over many texts, and turns errors into one line and an exit status."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import typer
from rich.console import Console

from cpsbs import __version__
from cpsbs.cli.batches import ComputeBatches, Note, process_batches, refill_size
from cpsbs.cli.draws import Draw
from cpsbs.cli.formats import Format, long_rows
from cpsbs.cli.inputs import refuse_texts
from cpsbs.cli.outputs import OrderedOutput, Record, ResumableFile, Sink
from cpsbs.cli.stored import to_line
from cpsbs.cli.terminal import print_message, visible, visible_json
from cpsbs.estimation.weights import WeightWarning
from cpsbs.fingerprint import model_fingerprint
from cpsbs.text import Prompt, TextModel

EPILOG = (
    "Exit status: 0 success; 1 an error, whose message says what to do; 2 an unknown or malformed "
    "option; 3 lines were skipped because of --skip; 130 interrupted by Ctrl-C."
)


class LinesSkippedError(Exception):
    """Raised at the end of a run that skipped some lines."""


class ReaderGoneError(Exception):
    """Raised when the process that reads standard output has closed it."""


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Report an error inside the block in one line on standard error, and exit with its status."""
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
        print_message("error", str(error) or type(error).__name__)
        raise typer.Exit(1) from error
    except LinesSkippedError as skipped:
        print_message("note", str(skipped))
        raise typer.Exit(3) from skipped
    except KeyboardInterrupt as stop:
        print_message("stopped", "with --output, run the same command again to resume")
        raise typer.Exit(130) from stop


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


@dataclass(frozen=True)
class Job:
    """The work of one command on many texts, and where its results go."""

    draw: Draw
    model: TextModel
    texts: list[str]
    references: list[str] | None
    compute: ComputeBatches
    """Computes the records of batches of texts."""
    continuous_batching: bool
    """Whether texts of later batches can join the search while earlier ones go on."""
    batch_size: int
    skip: bool
    output: Path | None
    show: Callable[[Record], None]
    settings: Record
    """The settings of the command that the results depend on, besides those of the draw."""
    prompts: Sequence[Prompt] | None = None
    """What the texts stand for, if it is not the texts themselves."""
    long: bool = False
    """Whether a file has a row for each sequence, instead of one for each text."""
    plain: Format | None = None
    """The format of a file that ends in ``.txt``, if it is not JSON lines."""
    note: Note | None = None
    """What to show beside the progress of a batch, if it takes long."""
    then: Callable[[list[int]], None] | None = None
    """Called with the numbers of the texts that were not skipped, when all results are there and
    before skipped lines are reported."""

    def identity(self) -> Record:
        """Return everything that the results depend on, to the last digit on one machine."""
        content = json.dumps([self.texts, self.references])
        return {
            **self.draw.settings.as_record(),
            "seed": self.draw.seed,
            "model": self.model.name,
            "model_content": model_fingerprint(self.model.name, self.model.model.config),
            "dtype": str(self.model.model.dtype),
            "device": self.model.model.device.type,
            "batch_size": self.batch_size,
            "input": hashlib.sha256(content.encode()).hexdigest()[:16],
            "version": __version__,
            **self.settings,
        }

    def run(self) -> None:
        """Compute the results that are not there yet, for all texts that can be used."""
        prompts = self.texts if self.prompts is None else self.prompts
        unusable = self.model.unusable(prompts, self.draw.settings.max_length)
        numbers = [i for i in range(len(self.texts)) if i not in unusable]
        if not self.skip:
            refuse_texts(unusable)
        if not numbers:
            refuse_texts(unusable, "--skip leaves no line; fix one of them")
        messages = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)
        if self.output is None:
            # Closing it shows the results so far, also when the run is interrupted.
            with closing(OrderedOutput(self.show, numbers)) as ordered:
                self._process(ordered, numbers)
        else:
            stored = ResumableFile(self.output, self.identity(), numbers, self.long, self.plain)
            with closing(stored) as sink:
                if sink.complete:
                    messages.print(visible(f"{self.output} is already complete."))
                else:
                    if sink.done:
                        done = f"{len(sink.done):,} of {len(numbers):,}"
                        messages.print(f"Resuming: {done} are done.")
                    self._process(sink, numbers)
                    messages.print(visible(f"Wrote {len(numbers):,} results to {self.output}."))
        if self.then is not None:
            self.then(numbers)
        if unusable:
            number, reason = next(iter(unusable.items()))
            raise LinesSkippedError(
                f"{len(unusable)} of {len(self.texts)} lines were skipped; line {number + 1} "
                f"{reason}"
            )

    def _process(self, sink: Sink, numbers: list[int]) -> None:
        lengths = [len(text) for text in self.texts]
        # A progress bar would garble results on the same terminal.
        progress = self.output is not None or not sys.stdout.isatty()
        size = self.batch_size
        joins = self.continuous_batching and self.model.model.device.type == "cuda"
        refill = refill_size(size) if joins else size
        process_batches(self.compute, lengths, numbers, size, refill, sink, progress, self.note)
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
