"""Keeps workers at work: every task is computed, even if workers die."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cpsbs.workers.pools import Died, Done, Event, Failed, Pool, Ready, Refused

TRIES = 3
"""How many workers may die on the same task, or while they start, before that counts as failed."""

LOSSES = 100
"""How many workers may be found dead when they are given the same task, having died while idle."""

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
    losses: int = 0
    """How many workers were found dead when they were to compute it."""


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
        self._starting: dict[Any, int] = {}
        """The workers that are starting, with the number of attempts before each."""
        self._idle: list[Any] = []
        self._busy: dict[Any, _Task[Any]] = {}
        self._attempts = 0
        """How many times in a row workers died while they started; together they count once."""
        self._told = set[str]()

    def ready(self) -> object:
        """Wait until a worker is ready, and return its facts.

        Raises:
            RuntimeError: if no worker can be made; it says why.
        """
        while not self._idle:
            self._meet(PATIENCE)
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
            # A task that is computed again counts as begun, so that may_begin does not delay it.
            if again:
                return again.popleft()
            return next(numbered, None) if may_begin() else None

        while True:
            # What is done is reported before the next task is taken, since that may take long.
            news = self._meet(0.0) if self._busy else []
            if not news:
                task = take() if self._idle or not self._busy else None
                if task is None and not self._busy:
                    return
                if task is not None and self._idle:
                    worker = self._idle.pop()
                    self._busy[worker] = task
                    self._pool.send(worker, task.given)
                    continue
                if task is not None:  # there is something to do, and nobody to do it
                    again.append(task)
                news = self._meet(PATIENCE)
            for done, event in news:
                if isinstance(event, Died):
                    if (failed := _given_up(done, event)) is None:
                        again.append(done)
                        continue
                    event = failed
                yield done.number, done.given, event

    def stop(self) -> None:
        """Stop all workers, and release the pool."""
        for worker in [*self._starting, *self._idle, *self._busy]:
            with suppress(Exception):  # the others must be stopped too
                self._pool.stop(worker)
        self._starting.clear()
        self._idle.clear()
        self._busy.clear()
        self._pool.close()

    def _meet(self, timeout: float) -> list[tuple[_Task[Any], Done | Failed | Died]]:
        """Wait for news of any worker, and return those of tasks."""
        count = len(self._starting) + len(self._idle) + len(self._busy)
        for _ in range(self._wanted - count):
            self._starting[self._pool.start()] = self._attempts
        news = []
        for worker, event in self._news(timeout):
            if worker in self._busy:
                task = self._busy.pop(worker)
                assert isinstance(event, Done | Failed | Died)
                news.append((task, event))
                if not isinstance(event, Died):
                    self._idle.append(worker)
            else:
                self._begin(worker, event, self._starting.pop(worker))
        return news

    def _news(self, timeout: float) -> list[tuple[Any, Event]]:
        """Wait for an event for so long; with nobody at work, until there is one."""
        awaited, begin, noted = [*self._starting, *self._busy], time.monotonic(), False
        while True:
            found = self._pool.wait(awaited, timeout)
            waited = time.monotonic() - begin
            if found or self._busy or self._idle:
                return found
            if waited >= START_TIMEOUT:
                raise RuntimeError(
                    f"no worker was ready within {waited:.0f} seconds; free a processor or GPU, or "
                    "use fewer --workers"
                )
            if not noted:
                self._note("waiting for a worker: it loads the model, or others occupy its place")
                noted = True

    def _begin(self, worker: Any, event: Event, attempt: int) -> None:
        """Let a worker that has just started join, unless it cannot."""
        if isinstance(event, Ready):
            if self.facts is None:
                self.facts = event.facts
            if event.facts == self.facts:
                self._attempts = 0
                self._idle.append(worker)
                return
            reason = f"{event.where}: {_unlike(event.facts, self.facts)}"
        elif isinstance(event, Died):
            # All that died of the same cause, such as a lost node, had been started before.
            self._attempts = max(self._attempts, attempt + 1)
            if self._attempts < TRIES:
                return
            reason = (
                f"workers died {TRIES} times in a row while they started; the model may be too "
                "large for the memory there"
            )
        else:
            assert isinstance(event, Refused | Failed)
            reason = event.reason
        if not isinstance(event, Died):
            self._pool.stop(worker)
        # Others may do; but another one in its place would not.
        self._wanted -= 1
        if self._wanted <= 0 or not (self._starting or self._idle or self._busy):
            raise RuntimeError(f"no worker can be used: {reason}")
        if reason not in self._told:  # a node refuses all its workers for the same reason
            self._told.add(reason)
            self._note(f"a worker cannot be used, and others do its work: {reason}")


def _given_up(task: _Task[Any], died: Died) -> Failed | None:
    """Count the death of a task's worker, and return a failure if there were too many."""
    if died.at_work:
        task.deaths += 1
    else:
        task.losses += 1
    if task.deaths >= TRIES:
        return Failed("RuntimeError", f"its worker died {TRIES} times")
    if task.losses >= LOSSES:
        return Failed("RuntimeError", f"{LOSSES} workers were dead before they began it")
    return None


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
