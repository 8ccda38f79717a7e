"""Many cells at once: in processes of this machine, or on a Ray cluster.

Workers compute and send rows back; nothing but the caller writes files, so that workers need no
disk in common. A worker that dies costs the cell it had, which goes to another one.
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
"""How often a cell may lose its worker."""

STARTING = 120.0
"""Seconds that a worker may take to start."""

ROOM = 10.0
"""Seconds to wait for a processor that a dead worker has left."""


class CellsFailedError(RuntimeError):
    """Some cells could not be computed; all others were."""


@dataclass(frozen=True)
class Done:
    """A cell's rows, and the seconds it took."""

    rows: list[Row]
    seconds: float


@dataclass(frozen=True)
class Failed:
    """What went wrong in computing it."""

    reason: str


Outcome = Done | Failed | None
"""None: the worker is gone."""


class Pool(ABC):
    """Workers, known by handles."""

    @abstractmethod
    def start(self) -> Any | None:
        """One more worker; None if there is no room for it."""

    @abstractmethod
    def send(self, worker: Any, cell: Cell) -> None:
        """Give a worker something to do."""

    @abstractmethod
    def wait(self, workers: Sequence[Any]) -> list[tuple[Any, Outcome]]:
        """What has come from these workers, at least one."""

    @abstractmethod
    def stop(self, worker: Any) -> None:
        """End a worker, whatever it does."""


def computed(pool: Pool, cells: Sequence[Cell], workers: int) -> Iterator[tuple[Cell, Done]]:
    """Results as they come.

    Raises:
        CellsFailedError: at the end, if some failed.
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
                raise RuntimeError("no worker could be started; are all processors in use?")
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
    """Processes of this machine, with some threads each.

    A process asks for the subjects when it has its first cell. They may be large, and whoever
    writes more than a pipe holds waits for the reader: so they are written only when the process
    reads, and to a pipe whose other end nobody else has, so that the writer is told if the process
    dies meanwhile. The arguments of a spawned process are written without either; they are small.
    """

    def __init__(self, subjects: Subjects, threads: int) -> None:
        self._subjects, self._threads = subjects, threads
        self._context = multiprocessing.get_context("spawn")  # a GPU does not survive a fork

    def start(self) -> _Process:
        """Start one more process."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._threads), daemon=True)
        process.start()
        theirs.close()
        return _Process(process, ours)

    def send(self, worker: _Process, cell: Cell) -> None:
        """Through the pipe."""
        with suppress(OSError):  # it is gone, and ``wait`` will say so
            worker.connection.send(cell)

    def wait(self, workers: Sequence[_Process]) -> list[tuple[_Process, Outcome]]:
        """Return what is in the pipes; the end of one is the end of its process."""
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
        """Send the subjects to a process that has asked for them and waits."""
        worker.connection.send(self._subjects)

    def stop(self, worker: _Process) -> None:
        """The end of the pipe ends it; if it is busy, kill it: it writes nothing."""
        worker.connection.close()
        worker.process.join(timeout=1.0)
        worker.process.kill()
        worker.process.join()


class _Request:
    """What a process sends that needs the subjects."""


def _serve(connection: Connection, threads: int) -> None:
    """A process: cells in, outcomes out, until the pipe ends."""
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
    except Exception as error:  # told to whoever asked, with the name of the cell
        return Failed(f"{type(error).__name__}: {error}")


class RayPool(Pool):
    """Actors on a Ray cluster, which must have cpsbs installed on every node.

    Args:
        subjects: the model and the test set.
        threads: processors that an actor takes.
        gpus: share of a GPU that an actor takes.
        address: of a cluster that runs; a local one is started if it is None.
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
                    f"{amount:g}"
                )
        self._need = {name: amount for name, amount in need.items() if amount > 0}
        # Neither restarts nor retries by Ray: a dead worker's cell goes to another, and nothing
        # waits for room that may never come.
        self._actor = self._ray.remote(num_cpus=threads, num_gpus=gpus, max_restarts=0)(_Actor)
        self._arguments = (subjects, threads)
        self._pending: dict[Any, Any] = {}

    def start(self) -> Any | None:
        """One more actor, if there is room, or will be in a moment."""
        deadline = time.monotonic() + ROOM
        while any(self._ray.available_resources().get(n, 0.0) < a for n, a in self._need.items()):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)
        actor = self._actor.remote(*self._arguments)
        try:
            self._ray.get(actor.ready.remote(), timeout=STARTING)
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError):
            self._ray.kill(actor)
            return None
        return actor

    def send(self, worker: Any, cell: Cell) -> None:
        """A call, whose result comes later."""
        self._pending[worker] = worker.compute.remote(cell)

    def wait(self, workers: Sequence[Any]) -> list[tuple[Any, Outcome]]:
        """What has come."""
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
    """A worker on the cluster."""

    def __init__(self, subjects: Subjects, threads: int) -> None:
        self._worker = Worker(subjects, threads)

    def ready(self) -> int:
        """The process's number, once there is one."""
        return os.getpid()

    def compute(self, cell: Cell) -> Outcome:
        """One cell."""
        return _outcome(self._worker, cell)
