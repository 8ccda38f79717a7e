"""Keeps workers at work: every task is computed, whoever dies on the way."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cpsbs.workers.pools import Done, Event, Failed, Pool, Ready, Refused

TRIES = 3
"""How many workers may die on the same task, or while they start, before that counts as failed."""

START_TIMEOUT = 600.0
"""Seconds to wait for a worker when there is none: a cluster may have to start a machine first."""

PATIENCE = 30.0
"""Seconds after which the user is told what is being waited for."""

T = TypeVar("T")


@dataclass(eq=False)
class _Task(Generic[T]):
    number: int
    given: T
    deaths: int = 0
    """How many workers have died while they computed it."""


class Crew:
    """Workers of a pool, which all compute the same.

    Args:
        pool: starts the workers.
        workers: how many there should be.
        note: takes a sentence about a worker that cannot be used, or about a long wait.
        facts: what the facts of every worker must be; by default those of the first one.

    Attributes:
        facts: what the results depend on, once a worker is ready.
    """

    def __init__(
        self,
        pool: Pool,
        workers: int,
        note: Callable[[str], None] = lambda _: None,
        facts: object = None,
    ) -> None:
        self.facts = facts
        self._pool, self._wanted, self._note = pool, workers, note
        self._starting: set[Any] = set()
        self._idle: list[Any] = []
        self._busy: dict[Any, _Task[Any]] = {}
        self._stillborn = 0
        self._told = set[str]()

    def ready(self) -> object:
        """Wait until a worker is ready, and return its facts.

        Raises:
            RuntimeError: if no worker can be made; it says why.
        """
        while not self._idle:
            self._meet()
        return self.facts

    def compute(
        self, tasks: Iterable[T], may_begin: Callable[[], bool] = lambda: True
    ) -> Iterator[tuple[int, T, Done | Failed]]:
        """Yield the number of each task, the task and what became of it, as they are completed.

        Args:
            tasks: the tasks, possibly without an end; each is taken when a worker has time for it.
            may_begin: returns whether one more task may be begun now, or else after the next one is
                completed.

        Raises:
            RuntimeError: if there are no workers left, and none can be made.
        """
        numbered = (_Task(number, task) for number, task in enumerate(tasks))
        again: deque[_Task[T]] = deque()

        def take() -> _Task[T] | None:
            # What is computed again has begun already, so that it is never held up.
            if again:
                return again.popleft()
            return next(numbered, None) if may_begin() else None

        while True:
            while self._idle and (task := take()) is not None:
                worker = self._idle.pop()
                self._busy[worker] = task
                self._pool.send(worker, task.given)
            if not self._busy:
                # Nobody is there. A worker is waited for only if there is something to do.
                if (task := take()) is None:
                    return
                again.append(task)
            for task, event in self._meet():
                if event is not None:
                    yield task.number, task.given, event
                    continue
                task.deaths += 1
                if task.deaths < TRIES:
                    again.append(task)
                else:
                    died = Failed("RuntimeError", f"its worker died {TRIES} times")
                    yield task.number, task.given, died

    def stop(self) -> None:
        """Stop all workers, and release the pool."""
        for worker in [*self._starting, *self._idle, *self._busy]:
            self._pool.stop(worker)
        self._starting.clear()
        self._idle.clear()
        self._busy.clear()
        self._pool.close()

    def _meet(self) -> list[tuple[_Task[Any], Done | Failed | None]]:
        """Wait for news of any worker, and return those of tasks; None where a worker has died."""
        count = len(self._starting) + len(self._idle) + len(self._busy)
        for _ in range(self._wanted - count):
            self._starting.add(self._pool.start())
        news = []
        for worker, event in self._news():
            if worker in self._busy:
                task = self._busy.pop(worker)
                assert event is None or isinstance(event, Done | Failed)
                news.append((task, event))
                if event is not None:
                    self._idle.append(worker)
            else:
                self._starting.discard(worker)
                self._begin(worker, event)
        return news

    def _news(self) -> list[tuple[Any, Event]]:
        """Wait for an event; with nobody at work, only for so long."""
        awaited, begin, noted = [*self._starting, *self._busy], time.monotonic(), False
        while True:
            found = self._pool.wait(awaited, PATIENCE)
            waited = time.monotonic() - begin
            if found:
                return found
            if self._busy or self._idle:
                continue
            if waited >= START_TIMEOUT:
                raise RuntimeError(
                    f"no worker was ready within {waited:.0f} seconds; free a processor or GPU, or "
                    "use fewer --workers"
                )
            if not noted:
                self._note("waiting for a worker to start: its place may be taken by others")
                noted = True

    def _begin(self, worker: Any, event: Event) -> None:
        """Let a worker that has just started join, unless it cannot."""
        if isinstance(event, Ready):
            if self.facts is None:
                self.facts = event.facts
            if event.facts == self.facts:
                self._stillborn = 0
                self._idle.append(worker)
                return
            self._pool.stop(worker)
            event = Refused(f"{event.where}: {_unlike(event.facts, self.facts)}")
        if event is None:
            self._stillborn += 1
            if self._stillborn < TRIES:
                return
            event = Refused(
                f"workers died {TRIES} times in a row while they started; the model may be too "
                "large for the memory there"
            )
        assert isinstance(event, Refused)
        # Others may do; but another one in its place would not.
        self._wanted -= 1
        if self._wanted <= 0:
            raise RuntimeError(f"no worker can be used: {event.reason}")
        if event.reason not in self._told:  # a node refuses all its workers for the same reason
            self._told.add(event.reason)
            self._note(f"a worker cannot be used, and others do its work: {event.reason}")


def in_order(crew: Crew, tasks: Iterable[T], ahead: int) -> Iterator[tuple[T, Done | Failed]]:
    """Yield each task with what became of it, in the order of the tasks.

    Args:
        crew: the workers.
        tasks: the tasks, possibly without an end.
        ahead: the largest number of tasks that are begun or done, and not yielded yet. It bounds
            the memory that results take while an earlier one is late.
    """
    turn = begun = 0
    waiting: dict[int, tuple[T, Done | Failed]] = {}

    def counted() -> Iterator[T]:
        nonlocal begun
        for task in tasks:
            begun += 1
            yield task

    def may_begin() -> bool:
        return begun - turn < ahead

    for number, task, event in crew.compute(counted(), may_begin):
        waiting[number] = (task, event)
        while turn in waiting:
            yield waiting.pop(turn)
            turn += 1


def _unlike(found: object, expected: object) -> str:
    """Return in what two values of facts differ, in words."""
    if isinstance(found, dict) and isinstance(expected, dict):
        names = [n for n in expected.keys() | found.keys() if found.get(n) != expected.get(n)]
        differences = [f"{n} is {found.get(n)}, not {expected.get(n)}" for n in sorted(names)]
        return ", ".join(differences)
    return f"it would compute with {found}, not {expected}"
