"""Running a command: errors in a line, results where they belong, long work resumed."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from cpsbs import __version__
from cpsbs.cli.batches import Work, go_through, refill_size
from cpsbs.cli.draws import Draw
from cpsbs.cli.inputs import refuse
from cpsbs.cli.outputs import InOrder, Record, ResumableFile, Sink
from cpsbs.cli.stored import to_line
from cpsbs.cli.terminal import tell, visible, visible_json
from cpsbs.fingerprint import model_fingerprint
from cpsbs.text import TextModel

EPILOG = (
    "Exit status: 0 all is well; 1 something failed, and the message says what to do; 2 an "
    "option is unknown or malformed; 3 lines were left out, with --skip; 130 stopped by Ctrl-C."
)


class LinesLeftOutError(Exception):
    """Some of the lines were skipped."""


class ReaderGoneError(Exception):
    """Whoever read standard output has closed it."""


@contextmanager
def errors_told() -> Iterator[None]:
    """Tell an error in a line on standard error, and turn it into an exit status."""
    try:
        yield
    except ReaderGoneError as gone:
        # The reader has had enough; nothing more can be written, not even at the end.
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
        tell("error", str(error) or type(error).__name__)
        raise typer.Exit(1) from error
    except LinesLeftOutError as left_out:
        tell("note", str(left_out))
        raise typer.Exit(3) from left_out
    except KeyboardInterrupt as stop:
        tell("stopped", "the same command goes on from here, if it keeps results in a file")
        raise typer.Exit(130) from stop


@dataclass(frozen=True)
class Task:
    """What a command does with many texts, and where the results go."""

    draw: Draw
    model: TextModel
    texts: list[str]
    references: list[str] | None
    work: Work
    """From batches of numbers of texts to their records."""
    together: bool
    """Whether it searches batches together."""
    batch_size: int
    skip: bool
    output: Path | None
    show: Callable[[Record], None]
    more: Record
    """What else the results depend on."""

    def job(self) -> Record:
        """Return all that the results depend on, to the last digit on the same machine."""
        content = json.dumps([self.texts, self.references])
        return {
            **asdict(self.draw),
            "design": repr(self.draw.design),
            "model": self.model.name,
            "model_content": model_fingerprint(self.model.name, self.model.model.config),
            "dtype": str(self.model.model.dtype),
            "device": self.model.model.device.type,
            "batch_size": self.batch_size,
            "input": hashlib.sha256(content.encode()).hexdigest()[:16],
            "version": __version__,
            **self.more,
        }

    def run(self) -> None:
        """Do what is not done yet, for all texts that can be used."""
        wrong = self.model.unusable(self.texts, self.draw.max_length)
        numbers = [i for i in range(len(self.texts)) if i not in wrong]
        if not self.skip:
            refuse(wrong)
        if not numbers:
            refuse(wrong, ": no line is left")
        say = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)
        if self.output is None:
            # Closing it shows what is done, also when the work is stopped.
            with closing(InOrder(self.show, numbers)) as shown_in_order:
                self._go(shown_in_order, numbers)
        else:
            with closing(ResumableFile(self.output, self.job(), numbers)) as sink:
                if sink.complete:
                    say.print(visible(f"{self.output} is complete already."))
                else:
                    if sink.done:
                        say.print(f"Going on: {len(sink.done):,} of {len(numbers):,} are there.")
                    self._go(sink, numbers)
                    say.print(visible(f"{len(numbers):,} texts are in {self.output}."))
        if wrong:
            number, reason = next(iter(wrong.items()))
            raise LinesLeftOutError(
                f"{len(wrong)} of {len(self.texts)} lines were left out; line {number + 1} {reason}"
            )

    def _go(self, sink: Sink, numbers: list[int]) -> None:
        lengths = [len(text) for text in self.texts]
        # Progress and results on one terminal would get in each other's way.
        alone = self.output is not None or not sys.stdout.isatty()
        size = self.batch_size
        # On a GPU new texts join those that are not through, as soon as there is room.
        joins = self.together and self.model.model.device.type == "cuda"
        refill = refill_size(size) if joins else size
        go_through(self.work, lengths, numbers, size, refill, sink, progress=alone)
        sink.finish()


def shown(json_lines: bool, as_seen: Callable[[Record], Any]) -> Callable[[Record], None]:
    """How a record is shown: to a person, or to a program."""
    if for_programs(json_lines):
        return print_json
    console = Console(highlight=False, markup=False, emoji=False)
    return lambda record: console.print(as_seen(record))


def for_programs(json_lines: bool) -> bool:
    """Whether JSON is wanted: it was asked for, or nobody looks."""
    return json_lines or not sys.stdout.isatty()


def print_json(record: Record) -> None:
    """Print a record as a line of JSON, for a program to read."""
    try:
        sys.stdout.write(visible_json(to_line(record).decode()))
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise ReaderGoneError from error
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"standard output could not be written: {reason}") from error
