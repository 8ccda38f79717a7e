"""Computes many cells at once, in processes of this machine or on a Ray cluster.

Workers compute rows and send them back; only the caller writes files, so that workers need no
shared disk. If a worker dies, its cell goes to another one.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from cpsbs.experiments.cells import Cell
from cpsbs.experiments.compute import Subjects, Worker
from cpsbs.experiments.store import Row
from cpsbs.extras import required

TRIES = 3
"""How many workers may die on the same cell before it counts as failed."""

START_TIMEOUT = 120.0
"""Seconds that a worker may take to start."""

RESOURCE_TIMEOUT = 10.0
"""Seconds to wait until Ray frees the processor of a dead worker."""


class CellsFailedError(RuntimeError):
    """Raised when some cells could not be computed, after all others were."""


@dataclass(frozen=True)
class Done:
    """The rows of a computed cell, and the seconds it took."""

    rows: list[Row]
    seconds: float


@dataclass(frozen=True)
class Failed:
    """The reason why a cell could not be computed."""

    reason: str


Outcome = Done | Failed | None
"""What a worker reports about its cell; None means that the worker has died."""


class Pool(ABC):
    """A source of workers, which are referred to by handles."""

    @abstractmethod
    def start(self) -> Any | None:
        """Start one more worker and return its handle, or None if there is no room for it."""

    @abstractmethod
    def send(self, worker: Any, cell: Cell) -> None:
        """Give a worker a cell to compute."""

    @abstractmethod
    def wait(self, workers: Sequence[Any]) -> list[tuple[Any, Outcome]]:
        """Wait for at least one of these workers, and return what they report."""

    @abstractmethod
    def stop(self, worker: Any) -> None:
        """Stop a worker, even if it is busy."""


def compute_cells(pool: Pool, cells: Sequence[Cell], workers: int) -> Iterator[tuple[Cell, Done]]:
    """Yield cells with their results, in the order in which they are completed.

    Raises:
        CellsFailedError: at the end, if some cells failed.
    """
    waiting = deque(cells)
    busy: dict[Any, Cell] = {}
    idle: list[Any] = []
    lost: Counter[str] = Counter()
    failed: list[str] = []
    try:
        for _ in range(min(workers, len(cells))):
            started = pool.start()
            if started is not None:
                idle.append(started)
        while waiting or busy:
            while waiting and idle:
                worker, cell = idle.pop(), waiting.popleft()
                busy[worker] = cell
                pool.send(worker, cell)
            if not busy:
                raise RuntimeError(
                    "no worker could be started; free a processor, or use fewer --workers"
                )
            for worker, outcome in pool.wait(list(busy)):
                cell = busy.pop(worker)
                if outcome is not None:
                    idle.append(worker)
                if isinstance(outcome, Done):
                    yield cell, outcome
                elif isinstance(outcome, Failed):
                    failed.append(f"{cell.name}: {outcome.reason}")
                else:
                    lost[cell.name] += 1
                    if lost[cell.name] < TRIES:
                        waiting.appendleft(cell)
                    else:
                        failed.append(f"{cell.name}: its worker died {TRIES} times")
                    replacement = pool.start()
                    if replacement is not None:
                        idle.append(replacement)
    finally:
        for worker in [*idle, *busy]:
            pool.stop(worker)
    if failed:
        raise CellsFailedError(f"{len(failed)} of {len(cells)} cells failed; {failed[0]}")


@dataclass(frozen=True, eq=False)
class _Process:
    process: BaseProcess
    connection: Connection


class LocalPool(Pool):
    """Processes of this machine.

    A process requests the subjects when it has its first cell. They may be large, and writing more
    than a pipe holds blocks until the other end reads. So they are written only when the process
    reads, and to a pipe whose other end no other process holds, so that writing fails if the
    process dies meanwhile. The arguments of a spawned process have neither guarantee; they are
    small.

    Args:
        subjects: the model and the test set.
        threads: the number of threads that each process computes with.
    """

    def __init__(self, subjects: Subjects, threads: int) -> None:
        self._subjects, self._threads = subjects, threads
        self._context = multiprocessing.get_context("spawn")  # CUDA does not work after a fork

    def start(self) -> _Process:
        """Start one more process."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._threads), daemon=True)
        process.start()
        theirs.close()
        return _Process(process, ours)

    def send(self, worker: _Process, cell: Cell) -> None:
        """Write a cell to the pipe of a process."""
        with suppress(OSError):  # the process has died, and ``wait`` will report it
            worker.connection.send(cell)

    def wait(self, workers: Sequence[_Process]) -> list[tuple[_Process, Outcome]]:
        """Return what is in the pipes; a closed pipe means that its process has died."""
        found: list[tuple[_Process, Outcome]] = []
        while not found:
            ready = wait([worker.connection for worker in workers])
            for worker in workers:
                if worker.connection in ready:
                    try:
                        message: Done | Failed | _Request = worker.connection.recv()
                        if isinstance(message, _Request):
                            self._hand_over(worker)
                        else:
                            found.append((worker, message))
                    except (EOFError, OSError):
                        self.stop(worker)
                        found.append((worker, None))
        return found

    def _hand_over(self, worker: _Process) -> None:
        """Send the subjects to a process that has requested them and waits."""
        worker.connection.send(self._subjects)

    def stop(self, worker: _Process) -> None:
        """Close the pipe, which ends an idle process, and kill a busy one; it writes no files."""
        worker.connection.close()
        worker.process.join(timeout=1.0)
        worker.process.kill()
        worker.process.join()


class _Request:
    """The message with which a process requests the subjects."""


def _serve(connection: Connection, threads: int) -> None:
    """Compute the cells that come through the pipe, until it is closed."""
    worker: Worker | None = None
    try:
        while True:
            cell: Cell = connection.recv()
            if worker is None:
                connection.send(_Request())
                worker = Worker(connection.recv(), threads)
            connection.send(_outcome(worker, cell))
    except (EOFError, OSError, KeyboardInterrupt):
        pass


def _outcome(worker: Worker, cell: Cell) -> Outcome:
    try:
        return Done(*worker.compute(cell))
    except Exception as error:  # it is reported with the name of the cell
        return Failed(f"{type(error).__name__}: {error}")


class RayPool(Pool):
    """Actors on a Ray cluster, on every node of which cpsbs must be installed.

    Args:
        subjects: the model and the test set.
        threads: the number of processors that an actor occupies, and of threads that it uses.
        gpus: the share of a GPU that an actor occupies.
        address: the address of a running cluster; if it is None, a local one is started.
    """

    def __init__(
        self, subjects: Subjects, threads: int, gpus: float = 0.0, address: str | None = None
    ) -> None:
        self._ray: Any = required("ray", "ray")
        if not self._ray.is_initialized():
            self._ray.init(address=address, include_dashboard=False, log_to_driver=False)
        need = {"CPU": float(threads), "GPU": gpus}
        there = self._ray.cluster_resources()
        for name, amount in need.items():
            if there.get(name, 0.0) < amount:
                raise ValueError(
                    f"the Ray cluster has {there.get(name, 0.0):g} {name}; a worker needs "
                    f"{amount:g}. Add nodes, or choose another --device"
                )
        self._need = {name: amount for name, amount in need.items() if amount > 0}
        # Ray must neither restart nor retry: a dead worker's cell goes to another worker, and
        # nothing waits for resources that may never come.
        self._actor = self._ray.remote(num_cpus=threads, num_gpus=gpus, max_restarts=0)(_Actor)
        self._arguments = (subjects, threads)
        self._pending: dict[Any, Any] = {}

    def start(self) -> Any | None:
        """Start one more actor, if resources are free or become so in a moment."""
        deadline = time.monotonic() + RESOURCE_TIMEOUT
        while any(self._ray.available_resources().get(n, 0.0) < a for n, a in self._need.items()):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)
        actor = self._actor.remote(*self._arguments)
        try:
            self._ray.get(actor.ready.remote(), timeout=START_TIMEOUT)
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError):
            self._ray.kill(actor)
            return None
        return actor

    def send(self, worker: Any, cell: Cell) -> None:
        """Start computing a cell, without waiting for the result."""
        self._pending[worker] = worker.compute.remote(cell)

    def wait(self, workers: Sequence[Any]) -> list[tuple[Any, Outcome]]:
        """Wait for at least one actor, and return what they report."""
        calls = {self._pending[worker]: worker for worker in workers}
        ready, _ = self._ray.wait(list(calls), num_returns=1)
        found: list[tuple[Any, Outcome]] = []
        for call in ready:
            worker = calls[call]
            del self._pending[worker]
            try:
                found.append((worker, self._ray.get(call)))
            except self._ray.exceptions.RayError:
                self._ray.kill(worker)
                found.append((worker, None))
        return found

    def stop(self, worker: Any) -> None:
        """Kill the actor."""
        self._ray.kill(worker)


class _Actor:
    """A worker on the cluster, as Ray starts it."""

    def __init__(self, subjects: Subjects, threads: int) -> None:
        self._worker = Worker(subjects, threads)

    def ready(self) -> int:
        """Return the id of the process, which shows that it has started."""
        return os.getpid()

    def compute(self, cell: Cell) -> Outcome:
        """Compute one cell."""
        return _outcome(self._worker, cell)
