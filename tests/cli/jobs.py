"""The work of a command with a model that costs nothing, for tests of everything around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cpsbs.cli.batches import Note, process_batches
from cpsbs.cli.formats import Format
from cpsbs.cli.inputs import Lines
from cpsbs.cli.ordered import OrderedOutput, Record
from cpsbs.cli.outputs import ResumableFile
from cpsbs.cli.source import Source
from cpsbs.windows import WINDOW

JOB = {"seed": 1, "k": 2}


def record_of(number: int, text: str) -> Record:
    """Return a result that depends on the number and the text of its source alone."""
    return {
        "number": number,
        "text": text,
        "texts": [text.upper(), f"{number} é"],
        "sequences": [[number, 1], [2]],
        "finished": [True, False],
        "log_prob": [-1.0, -2.5],
        "log_inclusion": [0.0, -number / 7],
        "log_weight": None,
        "settings": {"k": 2},
    }


def costless_model(bad: Callable[[str], bool] = lambda text: not text) -> Any:
    """Return a model that can take all texts but bad ones."""

    def unusable(texts: Sequence[str], _: int) -> dict[int, str]:
        return {i: "is empty" for i, text in enumerate(texts) if bad(text)}

    return SimpleNamespace(unusable=unusable)


def source_of(texts: Iterable[str], skip: bool = False, total: int | None = None) -> Source:
    return Source(Lines(iter(texts), lambda _: total), skip=skip)


class Costless:
    """Computes records; ``ahead`` batches are taken before the first result, as on a GPU.

    Args:
        source: holds the texts.
        stop: raises what stops the run before this many batches were computed.
        ahead: the number of batches.
    """

    def __init__(self, source: Source, stop: int | None = None, ahead: int = 0) -> None:
        self.computed = 0
        self._source, self._stop, self._ahead = source, stop, ahead

    def __call__(self, batches: Iterable[list[int]]) -> Iterator[list[Record]]:
        rest = iter(batches)
        waiting = list(islice(rest, self._ahead))
        while waiting or self._ahead == 0:
            waiting += islice(rest, 1)
            if not waiting:
                return
            if self.computed == self._stop:
                raise KeyboardInterrupt
            batch = waiting.pop(0)
            self.computed += 1
            yield [record_of(i, self._source.texts[i]) for i in batch]


def run(
    source: Source,
    output: Path | None,
    show: Callable[[Record], None] = lambda _: None,
    *,
    size: int = 2,
    refill: int | None = None,
    stop: int | None = None,
    ahead: int = 0,
    long: bool = False,
    plain: Format | None = None,
) -> int:
    """Do what a command does, and return how many batches were computed."""
    windows = source.windows(costless_model(), 10, size, WINDOW * size)
    sink: Any
    if output is None:
        sink = OrderedOutput(show)
    else:
        sink = ResumableFile(output, JOB, long, plain, seen=None if long else show)
    compute = Costless(source, stop, ahead)
    try:
        if output is not None and sink.complete:
            sink.check(windows)
            return 0
        settings = (False, lambda _: 0.5, Note(), lambda: None)
        process_batches(compute, windows, source, size, refill or size, sink, *settings)
        sink.finish()
    finally:
        sink.close()
    return compute.computed
