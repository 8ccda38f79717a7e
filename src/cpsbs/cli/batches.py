"""Long input: batches of texts of like length, with progress on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from cpsbs.cli.outputs import Record, Sink

WINDOW = 64
"""Batches whose texts are sorted by length together. Results of a window come in any order."""


def batches(lengths: Sequence[int], numbers: Sequence[int], size: int) -> Iterator[list[int]]:
    """Numbers of texts, ``size`` at a time, alike in length."""
    for begin in range(0, len(numbers), WINDOW * size):
        window = sorted(numbers[begin : begin + WINDOW * size], key=lambda i: -lengths[i])
        for first in range(0, len(window), size):
            yield window[first : first + size]


def go_through(
    work: Callable[[list[int]], list[Record]],
    lengths: Sequence[int],
    numbers: Sequence[int],
    size: int,
    sink: Sink,
    progress: bool,
) -> None:
    """Do the work for every batch that is not done yet.

    A batch of which a part is done is computed again as a whole, so that a resumed run computes
    what an uninterrupted one does.
    """
    with progress_bar(progress and len(numbers) > size) as bar:
        task = bar.add_task("", total=len(numbers), completed=len(sink.done))
        for batch in batches(lengths, numbers, size):
            missing = [i for i in batch if i not in sink.done]
            if not missing:
                continue
            try:
                records = work(batch)
            except torch.OutOfMemoryError as error:
                raise ValueError(
                    f"the GPU's memory is too small for --batch-size {size}; "
                    f"try --batch-size {max(1, size // 4)}"
                ) from error
            sink.write([r for r in records if r["number"] in missing])
            bar.advance(task, len(missing))


class _Rate(ProgressColumn):
    """How many a second."""

    def render(self, task: Task) -> Text:
        speed = task.speed
        return Text("" if speed is None else f"{speed:.1f}/s", style="progress.data.speed")


def progress_bar(wanted: bool) -> Progress:
    """On standard error, if somebody looks at it."""
    return Progress(
        TextColumn("{task.percentage:>3.0f} %"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TextColumn("remaining"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # what goes into a pipe must stay there
        disable=not (wanted and sys.stderr.isatty()),
    )
