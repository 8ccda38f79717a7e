"""What a pool of workers is, and what it reports about them."""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class Worker(Protocol):
    """Computes tasks, in a process of its own."""

    @property
    def facts(self) -> object:
        """What the results of all workers depend on, and must therefore be the same for all."""

    def compute(self, task: Any) -> Any:
        """Return the result of a task."""


Make = Callable[[], Worker]
"""Makes a worker where it will work. It is pickled, and must be small: a model is loaded there."""


@dataclass(frozen=True)
class Ready:
    """A worker is ready for its first task."""

    facts: object
    where: str
    """Where the worker is, as messages call it."""


@dataclass(frozen=True)
class Refused:
    """A worker could not be made, and could not be made there again either."""

    reason: str


@dataclass(frozen=True)
class Done:
    """The result of a task, and the seconds it took."""

    value: Any
    seconds: float
    warned: tuple[Warning, ...] = ()
    """What was warned of meanwhile."""


@dataclass(frozen=True)
class Failed:
    """The reason why a task cannot be computed."""

    kind: str
    """The name of the exception's class."""
    reason: str


@dataclass(frozen=True)
class Died:
    """A worker has died."""

    at_work: bool = False
    """Whether it had begun the task that it was given; it may have died long before, while idle."""


Event = Ready | Refused | Done | Failed | Died
"""What a worker reports, or what is found out about it."""


class Pool(ABC):
    """A source of workers, which are referred to by handles."""

    @abstractmethod
    def start(self) -> Any:
        """Begin to start one more worker, and return its handle without waiting for it."""

    @abstractmethod
    def send(self, worker: Any, task: Any) -> None:
        """Give a worker that is ready and has nothing to do a task."""

    @abstractmethod
    def wait(self, workers: list[Any], timeout: float | None) -> list[tuple[Any, Event]]:
        """Return what at least one of these workers reports, or nothing after so many seconds.

        Each of these workers is starting, or has a task. The pool forgets a worker once it has
        reported its death.
        """

    @abstractmethod
    def stop(self, worker: Any) -> None:
        """Stop a worker, even if it is busy."""

    def close(self) -> None:  # noqa: B027, because most pools hold nothing
        """Release what the pool holds, after all of its workers were stopped."""


def made(make: Make, where: str) -> tuple[Worker | None, Ready | Refused]:
    """Return a new worker, and what it reports."""
    try:
        worker = make()
        return worker, Ready(worker.facts, where)
    except Exception as error:
        return None, Refused(f"{where}: {told(error)}")


def outcome(worker: Worker, task: Any) -> Done | Failed:
    """Compute a task, and return what became of it."""
    begin = time.perf_counter()
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("default")
            value = worker.compute(task)
    except Exception as error:  # it is reported with the name of the task
        return Failed(type(error).__name__, told(error))
    messages = (warning.message for warning in warned)
    passed_on = tuple(message for message in messages if isinstance(message, Warning))
    return Done(value, time.perf_counter() - begin, passed_on)


def told(error: BaseException) -> str:
    """Return what an error says, or its name if it says nothing."""
    return str(error) or type(error).__name__
