"""Lets searches that share a random generator draw from it one after another, in their order.

Searches run in several threads. Two that drew from one generator at the same time would get the
same numbers, or others with every run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from types import TracebackType

import torch

from cpsbs.search.requests import Request


class Turns:
    """The turns that are not over, by generator."""

    def __init__(self) -> None:
        self._latest: dict[int, Turn] = {}
        """The last turn of each generator, which is alive as long as its turn is not over."""
        self._lock = threading.Lock()

    def take(self, request: Request) -> Turn:
        """Return the turn of a request, which comes after those that were taken before."""
        given = request.streams.generator
        every: Iterable[torch.Generator | None] = given if isinstance(given, Sequence) else [given]
        # Counters are copied for each search; only without them None is torch's own generator.
        every = [] if request.streams.counters is not None else every
        names = {id(torch.default_generator if one is None else one) for one in every}
        with self._lock:
            earlier = {self._latest[name] for name in names if name in self._latest}
            turn = Turn(self, request, names, earlier)
            self._latest |= dict.fromkeys(names, turn)
        return turn

    def end(self, turn: Turn) -> None:
        """Forget a turn that is over."""
        with self._lock:
            for name in turn.names:
                if self._latest.get(name) is turn:
                    del self._latest[name]


class Turn:
    """A request that may be searched once the earlier turns of its generators are over.

    Earlier turns are handed to threads first, so that no turn waits for one that has not begun.
    """

    def __init__(self, turns: Turns, request: Request, names: set[int], earlier: set[Turn]) -> None:
        self.names, self._turns, self._request, self._earlier = names, turns, request, earlier
        self._over = threading.Event()

    def __enter__(self) -> Request:
        for turn in self._earlier:
            turn._over.wait()
        self._earlier.clear()  # otherwise each turn would keep all earlier ones alive
        return self._request

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._turns.end(self)
        self._over.set()
