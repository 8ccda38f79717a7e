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
from rich.markup import escape

from cpsbs import __version__
from cpsbs.cli.batches import Work, go_through, refill_size
from cpsbs.cli.draws import Draw
from cpsbs.cli.inputs import refuse
from cpsbs.cli.outputs import InOrder, Record, ResumableFile, Sink
from cpsbs.text import TextModel

EPILOG = (
    "Exit status: 0 all is well; 1 something failed, and the message says what to do; 2 an "
    "option is unknown or malformed; 3 lines were left out, with --skip; 130 stopped by Ctrl-C."
)


class LinesLeftOutError(Exception):
    """Some of the lines were skipped."""


@contextmanager
def errors_told() -> Iterator[None]:
    """An error is a line on standard error, and an exit status."""
    say = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
    try:
        yield
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        if isinstance(error, BrokenPipeError):
            # Whoever read has had enough; nothing more can be written, not even at the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from error
        message = " ".join(str(error).split()) or type(error).__name__
        say.print(f"[bold red]error:[/] {escape(message)}")
        raise typer.Exit(1) from error
    except LinesLeftOutError as left_out:
        say.print(f"[bold yellow]note:[/] {escape(str(left_out))}")
        raise typer.Exit(3) from left_out
    except KeyboardInterrupt as stop:
        say.print("[bold yellow]stopped.[/] With --output, the same command goes on from here.")
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
        """All that the results depend on, but for rounding."""
        content = json.dumps([self.texts, self.references], ensure_ascii=False)
        folder = Path(self.model.name)
        return {
            **asdict(self.draw),
            "design": repr(self.draw.design),
            "model": str(folder.resolve()) if folder.is_dir() else self.model.name,
            "dtype": str(self.model.model.dtype),
            "device": self.model.model.device.type,
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
            self._go(InOrder(self.show, numbers), numbers)
        else:
            sink = ResumableFile(self.output, self.job(), len(numbers))
            if sink.complete:
                say.print(f"{self.output} is complete already.")
            else:
                if sink.done:
                    say.print(f"Going on: {len(sink.done):,} of {len(numbers):,} are there.")
                self._go(sink, numbers)
                say.print(f"{len(numbers):,} texts are in {self.output}.")
        if wrong:
            number, reason = next(iter(wrong.items()))
            raise LinesLeftOutError(
                f"{len(wrong)} of {len(self.texts)} lines were left out; line {number + 1} {reason}"
            )

    def _go(self, sink: Sink, numbers: list[int]) -> None:
        lengths = [len(text) for text in self.texts]
        # Progress and results on one terminal would get in each other's way.
        alone = self.output is not None or not sys.stdout.isatty()
        with closing(sink):
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
    """For a program."""
    sys.stdout.write(json.dumps(record, ensure_ascii=False) + "\n")
    sys.stdout.flush()
