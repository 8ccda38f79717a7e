"""Workers for tests: what they compute takes no model, and they can be told to misbehave."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpsbs.workers import Crew, Done, Event, Pool, Ready, Worker
from cpsbs.workers.pools import made, outcome


@dataclass(frozen=True)
class Doubling:
    """Doubles numbers.

    Args:
        facts: what it tells of itself.
        seconds: how long a task takes.
        traps: a folder; a number that has a file there kills its worker, and removes the file.
        ballast: makes it large.
    """

    facts: object = "doubles"
    seconds: float = 0.0
    traps: Path | None = None
    ballast: bytes = b""

    def compute(self, task: int) -> int:
        """Return twice the number; 13 is refused, and 7 is warned of."""
        time.sleep(self.seconds)
        if self.traps is not None:
            trap = self.traps / str(task)
            if trap.exists():
                trap.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        if task == 7:
            warnings.warn("7 is odd", stacklevel=2)
        if task == 13:
            raise ValueError("13 is refused")
        return 2 * task


@dataclass(frozen=True)
class Refusing:
    """Cannot be made."""

    def __call__(self) -> Worker:
        """Fail, as where a model is missing."""
        raise ValueError("there is no model")


@dataclass(frozen=True)
class Making:
    """Makes a worker, wherever it is sent."""

    worker: Doubling

    def __call__(self) -> Worker:
        """Return the worker."""
        return self.worker


class Here(Pool):
    """Computes in this process, where ``reports`` says in turn what becomes of workers that start.

    A report that is a function makes a worker.
    """

    def __init__(self, *reports: Event | Callable[[], Worker]) -> None:
        self.reports = list(reports)
        self.stopped: list[int] = []
        self.closed = False
        self._workers: list[Worker | None] = []
        self._news: dict[int, Event] = {}

    def start(self) -> int:
        """Take the next report; the last one is used again and again."""
        report = self.reports.pop(0) if len(self.reports) > 1 else self.reports[0]
        number, worker = len(self._workers), None
        if callable(report):
            worker, report = made(report, f"worker {number}")
        self._workers.append(worker)
        self._news[number] = report
        return number

    def send(self, worker: int, task: Any) -> None:
        """Compute at once."""
        computing = self._workers[worker]
        assert computing is not None
        self._news[worker] = outcome(computing, task)

    def wait(self, workers: list[int], timeout: float | None) -> list[tuple[int, Event]]:
        """Report of all of them."""
        return [(worker, self._news.pop(worker)) for worker in sorted(workers)]

    def stop(self, worker: int) -> None:
        """Note it."""
        self.stopped.append(worker)

    def close(self) -> None:
        """Note it."""
        self.closed = True


def results(pool: Pool, tasks: Iterable[int], workers: int = 2) -> dict[int, Event]:
    """Return what became of every task, in the order in which they were completed."""
    crew = Crew(pool, workers)
    try:
        return {task: event for _, task, event in crew.compute(tasks)}
    finally:
        crew.stop()


def values(found: dict[int, Event]) -> dict[int, Any]:
    """Return the values of tasks that were all computed."""
    assert all(isinstance(event, Done) for event in found.values()), found
    return {task: event.value for task, event in found.items() if isinstance(event, Done)}


READY = Ready("doubles", "a worker of the test")
