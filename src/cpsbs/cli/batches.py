"""Groups many texts into batches of similar length, with a progress bar on the terminal."""

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
from torch import Tensor

from cpsbs.cli.outputs import Record, Sink

WINDOW = 64
"""The number of batches whose texts are sorted by length together.

The results of one window come in any order, so that a small window gives results early.
"""

REFILL = 128
"""The fewest texts that join a running search at once on a GPU.

Prefill for a group of new texts takes as long as some fifty steps of the search.
"""

ROWS = {"cpu": 640, "cuda": 1280}
"""The number of hypotheses to decode at once, by type of device.

Fewer do not keep a GPU busy; with more, a CPU spends its time on memory transfers.
"""

ComputeBatches = Callable[[Iterable[list[int]]], Iterator[list[Record]]]
"""Takes batches of numbers of texts, and yields the records of each batch in their order."""


class Note:
    """A few words beside the progress bar, on what goes on inside a batch."""

    def __init__(self) -> None:
        self.show: Callable[[str], object] = lambda _: None
        """Shows the words; set while there is a progress bar."""

    def captured(self, mass: Tensor) -> None:
        """Show the probability [B] that was captured so far, on average over the texts."""
        self.show(f"captured {float(mass.mean()):.3f}")


def batches(
    lengths: Sequence[int], numbers: Sequence[int], size: int, refill: int
) -> Iterator[list[int]]:
    """Yield batches of numbers of texts, the longest first, so that lengths in a batch are alike.

    The first batch of a window has ``size`` texts, all others ``refill``: with continuous batching
    these take the places of texts that have finished.
    """
    for begin in range(0, len(numbers), WINDOW * size):
        window = sorted(numbers[begin : begin + WINDOW * size], key=lambda i: -lengths[i])
        yield window[:size]
        for first in range(size, len(window), refill):
            yield window[first : first + refill]


def default_batch_size(device: torch.device, k: int) -> int:
    """Return how many texts are decoded at once unless the user says otherwise."""
    return max(1, ROWS.get(device.type, ROWS["cpu"]) // k)


def refill_size(size: int) -> int:
    """Return how many texts join a running search on a GPU at a time; all, if they are few."""
    return size // 2 if size // 2 >= REFILL else size


def process_batches(
    compute: ComputeBatches,
    lengths: Sequence[int],
    numbers: Sequence[int],
    size: int,
    refill: int,
    sink: Sink,
    progress: bool,
    note: Note | None = None,
) -> None:
    """Compute every batch that is not complete in the sink yet, and write its records there.

    A batch that is complete in part is computed again as a whole, so that a resumed run computes
    the same as an uninterrupted one. With continuous batching (``refill < size``) that is not
    possible, and only the texts that are left are put into batches. A note is shown beside the
    progress bar.
    """
    with progress_bar(progress and (len(numbers) > size or note is not None)) as bar:
        task = bar.add_task("", total=len(numbers), completed=len(sink.done), note="")
        if note is not None:
            note.show = lambda words: bar.update(task, note=words)
        done = set(sink.done)
        if refill < size:
            numbers = [i for i in numbers if i not in done]
        every = batches(lengths, numbers, size, refill)
        try:
            for records in compute(batch for batch in every if not done.issuperset(batch)):
                new = [r for r in records if r["number"] not in done]
                sink.write(new)
                bar.advance(task, len(new))
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"--batch-size is {size}, for which the GPU has too little memory; try "
                f"--batch-size {max(1, size // 4)}"
            ) from error


class _Rate(ProgressColumn):
    """A column with the number of texts per second."""

    def render(self, task: Task) -> Text:
        speed = task.speed
        return Text("" if speed is None else f"{speed:.1f}/s", style="progress.data.speed")


class _Words(ProgressColumn):
    """A column with the note of a task, if it has one."""

    def render(self, task: Task) -> Text:
        return Text(str(task.fields.get("note", "")))


def progress_bar(wanted: bool) -> Progress:
    """Return a progress bar that is shown only if standard error is a terminal."""
    return Progress(
        TextColumn("{task.percentage:>3.0f} %"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TextColumn("remaining"),
        TimeRemainingColumn(),
        _Words(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # results must reach the pipe or file that they are meant for
        disable=not (wanted and sys.stderr.isatty()),
    )
