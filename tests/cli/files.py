"""Result files of one window, as the tests of resuming need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from cpsbs.cli.ordered import Record
from cpsbs.cli.outputs import ResumableFile
from cpsbs.cli.source import Window


def window_of(numbers: Sequence[int], digest: str = "f" * 16) -> Window:
    """Return a window with texts of these numbers, and others that are skipped."""
    return Window(numbers[0], numbers[-1] + 1, list(numbers), digest)


class OneWindow(ResumableFile):
    """A file of one window, which is begun or checked at once; ``done`` is what is there."""

    def __init__(
        self,
        file: Path,
        job: Record,
        numbers: Sequence[int],
        seen: Callable[[Record], None] | None = None,
    ) -> None:
        super().__init__(file, job, seen=seen, total=lambda: len(numbers))
        self.done: set[int] = set()
        try:
            if self.complete:
                self.check([window_of(numbers)])
            else:
                self.done |= self.begin(window_of(numbers))
        except BaseException:
            self.close()
            raise

    def write(self, records: list[Record]) -> None:
        super().write(records)
        self.done.update(record["number"] for record in records)
