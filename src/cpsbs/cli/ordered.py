"""Writes results to the terminal or a pipe, in the order of the input."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from cpsbs.cli.source import Window

Record = dict[str, Any]


class Sink(Protocol):
    """Receives records, each with a ``number``: in any order within a window."""

    @property
    def count(self) -> int:
        """The number of records received so far, in this run or an earlier one."""

    def begin(self, window: Window) -> set[int]:
        """Expect the records of another window, and return the numbers of those that are there."""

    def write(self, records: list[Record]) -> None:
        """Receive the records of a batch."""

    def finish(self) -> None:
        """Complete the output, after all records were received."""

    def close(self) -> None:
        """Release the output, whether it is complete or not."""


class OrderedOutput:
    """Shows each record as soon as all records before it are shown."""

    def __init__(self, show: Callable[[Record], None]) -> None:
        self.count = 0
        self._show = show
        self._waiting: dict[int, Record] = {}
        self._order: deque[int] = deque()

    def begin(self, window: Window) -> set[int]:
        """Expect the records of another window."""
        self._order.extend(window.numbers)
        return set()

    def write(self, records: list[Record]) -> None:
        """Receive the records of a batch, and show those whose turn it is."""
        self._waiting |= {record["number"]: record for record in records}
        self.count += len(records)
        while self._order and self._order[0] in self._waiting:
            # It is shown before it is dropped, so that Ctrl-C in between does not lose it.
            self._show(self._waiting[self._order[0]])
            del self._waiting[self._order.popleft()]

    def finish(self) -> None:
        """Do nothing, since the last record was shown when it came."""

    def close(self) -> None:
        """Show the records that still wait for earlier ones, which will never come."""
        for number in sorted(self._waiting):
            self._show(self._waiting[number])
            del self._waiting[number]
