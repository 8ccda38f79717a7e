"""Long input: batches of texts of like length, with progress on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

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


REFILL = 128
"""Texts that are worth a beginning of their own, which takes as long as some fifty steps on a
GPU."""

ROWS = {"cpu": 640, "cuda": 1280}
"""Hypotheses at once: fewer do not keep a GPU busy; with more, a CPU spends its time on memory."""

Work = Callable[[Iterable[list[int]]], Iterator[list[Record]]]
"""From batches of numbers of texts to the records of each batch, in their order."""


def batches(
    lengths: Sequence[int], numbers: Sequence[int], size: int, refill: int
) -> Iterator[list[int]]:
    """Numbers of texts, the longest first, so that a batch's are alike in length.

    First ``size`` of them, then ``refill`` at a time, to take the places of those that are through.
    """
    for begin in range(0, len(numbers), WINDOW * size):
        window = sorted(numbers[begin : begin + WINDOW * size], key=lambda i: -lengths[i])
        yield window[:size]
        for first in range(size, len(window), refill):
            yield window[first : first + refill]


def usual_size(device: torch.device, k: int) -> int:
    """How many texts are decoded at once where nothing is said."""
    return max(1, ROWS.get(device.type, ROWS["cpu"]) // k)


def refill_size(size: int) -> int:
    """How many texts take the places of others at a time, on a GPU; all of them, if that is few."""
    return size // 2 if size // 2 >= REFILL else size


def go_through(
    work: Work,
    lengths: Sequence[int],
    numbers: Sequence[int],
    size: int,
    refill: int,
    sink: Sink,
    progress: bool,
) -> None:
    """Do the work for every batch that is not done yet.

    A batch of which a part is done is computed again as a whole, so that a resumed run computes
    what an uninterrupted one does; but where texts are refilled the batches are made anew.
    """
    with progress_bar(progress and len(numbers) > size) as bar:
        task = bar.add_task("", total=len(numbers), completed=len(sink.done))
        done = set(sink.done)
        if refill < size:
            numbers = [i for i in numbers if i not in done]
        every = batches(lengths, numbers, size, refill)
        try:
            for records in work(batch for batch in every if not done.issuperset(batch)):
                new = [r for r in records if r["number"] not in done]
                sink.write(new)
                bar.advance(task, len(new))
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"the GPU's memory is too small for --batch-size {size}; "
                f"try --batch-size {max(1, size // 4)}"
            ) from error


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
