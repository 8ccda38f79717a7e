"""Running a command: errors in a line, results where they belong, long work resumed."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from cpsbs import __version__
from cpsbs.cli.batches import go_through
from cpsbs.cli.draws import Draw
from cpsbs.cli.inputs import refuse, unusable
from cpsbs.cli.outputs import InOrder, Record, ResumableFile, Sink
from cpsbs.text import TextModel

EPILOG = (
    "Exit status: 0 all is well; 1 something failed, and the message says what to do; 2 the "
    "arguments are wrong; 3 some lines were left out, with --skip; 130 stopped by Ctrl-C."
)


class LinesLeftOutError(Exception):
    """Some of the lines were skipped."""


@contextmanager
def errors_told() -> Iterator[None]:
    """An error is a line on standard error, and an exit status."""
    say = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        yield
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        say.print(f"[bold red]error:[/] {escape(message)}")
        raise typer.Exit(1) from error
    except LinesLeftOutError as left_out:
        say.print(f"[bold yellow]note:[/] {escape(str(left_out))}")
        raise typer.Exit(3) from left_out
    except KeyboardInterrupt as stop:
        say.print("[bold yellow]stopped.[/] With --output, the same command goes on from here.")
        raise typer.Exit(130) from stop


def job_of(
    command: str,
    draw: Draw,
    model: TextModel,
    texts: list[str],
    references: list[str] | None,
    batch_size: int,
) -> Record:
    """All that the results depend on."""
    content = json.dumps([texts, references], ensure_ascii=False)
    return {
        **asdict(draw),
        "design": repr(draw.design),
        "command": command,
        "model": model.name,
        "dtype": str(model.model.dtype),
        "batch_size": batch_size,
        "input": hashlib.sha256(content.encode()).hexdigest()[:16],
        "version": __version__,
    }


def go(
    work: Callable[[list[int]], list[Record]],
    model: TextModel,
    texts: list[str],
    draw: Draw,
    batch_size: int,
    skip: bool,
    output: Path | None,
    job: Record,
    show: Callable[[Record], None],
) -> None:
    """Do the work for all texts that can be used, and put the results where they belong."""
    wrong = unusable(model, texts, draw.max_length)
    if not skip:
        refuse(wrong)
    numbers = [i for i in range(len(texts)) if i not in wrong]
    say = Console(stderr=True, soft_wrap=True, highlight=False)
    sink: Sink
    if output is None:
        sink = InOrder(show, numbers)
    else:
        sink = ResumableFile(output, job, len(numbers))
        if sink.complete:
            say.print(f"{output} is complete already.")
            return
        if sink.done:
            say.print(f"Going on: {len(sink.done):,} of {len(numbers):,} are there.")
    lengths = [len(text) for text in texts]
    with closing(sink):
        go_through(work, lengths, numbers, batch_size, sink)
        sink.finish()
    if output is not None:
        say.print(f"{len(numbers):,} texts are in {output}.")
    if wrong:
        number, reason = next(iter(wrong.items()))
        raise LinesLeftOutError(
            f"{len(wrong)} of {len(texts)} lines were left out; line {number + 1} {reason}"
        )


def shown(json_lines: bool, as_seen: Callable[[Record], Any]) -> Callable[[Record], None]:
    """How a record is shown: to a person, or to a program."""
    if json_lines or not sys.stdout.isatty():
        return print_json
    console = Console(highlight=False)
    return lambda record: console.print(as_seen(record))


def print_json(record: Record) -> None:
    """For a program."""
    sys.stdout.write(json.dumps(record, ensure_ascii=False) + "\n")
    sys.stdout.flush()
