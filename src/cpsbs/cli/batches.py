"""Groups many texts into batches of similar length, with a progress bar on the terminal."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

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

from cpsbs.backends import backend_for
from cpsbs.cli.ordered import Record, Sink
from cpsbs.cli.source import Source, Window
from cpsbs.text import TextModel

LONGEST_TEXT = 256
"""The number of tokens of a text for which batches on a GPU are predicted to fit."""

REFILL = 128
"""The fewest texts that join a running search at once on a GPU.

Prefill for a group of new texts takes as long as some fifty steps of the search.
"""

ROWS = {"cpu": 320, "cuda": 5120}
"""The most hypotheses to decode at once, by type of device.

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
        self.captured_on_average(float(mass.mean()))

    def captured_on_average(self, mass: float | None) -> None:
        """Show the average probability that was captured, if there is one."""
        if mass is not None:
            self.show(f"captured {mass:.3f}")


def batches(
    lengths: Mapping[int, int], numbers: Iterable[int], size: int, refill: int
) -> Iterator[list[int]]:
    """Yield the numbers of a window's texts in batches, the longest first.

    So lengths in a batch are alike. The first batch has ``size`` texts, all others ``refill``: with
    continuous batching these take the places of texts that have finished.
    """
    window = sorted(numbers, key=lambda i: -lengths[i])
    yield window[:size]
    for first in range(size, len(window), refill):
        yield window[first : first + refill]


def default_batch_size(loaded: TextModel, k: int, max_length: int) -> int:
    """Return how many texts are decoded at once unless the user says otherwise.

    On a GPU that is no more than its memory has room for, by what a search of texts of
    ``LONGEST_TEXT`` tokens is predicted to take. Neither the texts, which are not read yet, nor the
    memory that happens to be free count: work that was interrupted must find the same batches
    again.
    """
    device = loaded.model.device
    most = max(1, ROWS.get(device.type, ROWS["cpu"]) // k)
    room = loaded.room(max_length)
    longest = LONGEST_TEXT if room is None else max(1, min(LONGEST_TEXT, room))
    fitting = backend_for(device).sources_that_fit(loaded.model, k, longest, max_length)
    return most if fitting is None else min(most, fitting)


def refill_size(size: int) -> int:
    """Return how many texts join a running search on a GPU at a time; all, if they are few."""
    return size // 2 if size // 2 >= REFILL else size


class Batches:
    """The batches of all windows, one after another.

    A batch that is complete in part is computed again as a whole, so that a resumed run computes
    the same as an uninterrupted one. With continuous batching (``refill < size``) that is not
    possible, and only the texts that are left are put into batches.

    Attributes:
        failure: why the input ended early. It is kept, so that what was read before it is computed
            and written.
    """

    def __init__(self, source: Source, size: int, refill: int, sink: Sink) -> None:
        self.failure: Exception | None = None
        self.missing: set[int] = set()
        """The numbers of the texts that were put into batches and have no result yet."""
        self._source, self._size, self._refill, self._sink = source, size, refill, sink
        self._held: deque[Window] = deque()

    def of(self, windows: Iterator[Window]) -> Iterator[list[int]]:
        """Yield the batches of each window that are not complete in the sink yet."""
        while (window := self._next(windows)) is not None:
            done = self._sink.begin(window)
            self._held.append(window)
            self.missing.update(set(window.numbers) - done)
            lengths = {i: len(self._source.texts[i]) for i in window.numbers}
            left = [i for i in window.numbers if self._refill == self._size or i not in done]
            for batch in batches(lengths, left, self._size, self._refill):
                if not done.issuperset(batch):
                    yield batch
            self._release()

    def write(self, records: list[Record]) -> int:
        """Write those of the records that are missing, and return how many they are."""
        new = [record for record in records if record["number"] in self.missing]
        self._sink.write(new)
        self.missing.difference_update(record["number"] for record in new)
        self._release()
        return len(new)

    def _next(self, windows: Iterator[Window]) -> Window | None:
        try:
            return next(windows, None)
        except (OSError, ValueError) as error:
            self.failure = error
            return None

    def _release(self) -> None:
        """Forget the texts of windows that are complete."""
        while self._held and self.missing.isdisjoint(self._held[0].numbers):
            self._source.release(self._held.popleft())


def process_batches(
    compute: ComputeBatches,
    windows: Iterator[Window],
    source: Source,
    size: int,
    refill: int,
    sink: Sink,
    progress: bool,
    captured: Callable[[Record], float | None],
    note: Note,
    resuming: Callable[[], None],
) -> None:
    """Compute every batch that is not complete in the sink yet, and write its records there.

    Args:
        compute: computes the records of batches.
        windows: the windows of the source.
        source: holds their texts.
        size: the number of texts to compute at once.
        refill: the number of texts that join a running search.
        sink: where the records go.
        progress: whether to show a progress bar.
        captured: returns the probability that the sequences of a record have together.
        note: what to show beside the progress bar.
        resuming: called once before the first batch is computed.
    """
    every = Batches(source, size, refill, sink)

    def batches_with_progress() -> Iterator[list[int]]:
        for count, batch in enumerate(every.of(windows)):
            if count == 0:
                resuming()
                bar.reset(task, completed=sink.count, total=source.total)
            yield batch

    with progress_bar(progress) as bar:
        task = bar.add_task("", total=source.total, note="")
        note.show = lambda words: bar.update(task, note=words)
        masses = _Mean()
        try:
            for records in compute(batches_with_progress()):
                new = every.write(records)
                masses.add(mass for record in records if (mass := captured(record)) is not None)
                note.captured_on_average(masses.value)
                total = source.total
                bar.update(task, advance=new, total=total and total - source.skipped)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"--batch-size is {size}, for which the GPU has too little memory; try "
                f"--batch-size {max(1, size // 4)}"
            ) from error
    if every.failure is not None:
        raise every.failure


class _Mean:
    """The mean of numbers that come one by one."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, numbers: Iterable[float]) -> None:
        for number in numbers:
            self._sum, self._count = self._sum + number, self._count + 1

    @property
    def value(self) -> float | None:
        return self._sum / self._count if self._count else None


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
