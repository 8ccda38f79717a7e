"""Workers in processes of this machine."""

from __future__ import annotations

import multiprocessing
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from cpsbs.workers.pools import Died, Event, Make, Pool, Worker, made, outcome


@dataclass(frozen=True, eq=False)
class Process:
    """A process, and the connection to it."""

    process: BaseProcess
    connection: Connection


class _Request:
    """The message with which a process requests what it makes its worker with."""


class _Begun:
    """The message with which a process says that it has read a task."""


class ProcessPool(Pool):
    """Processes of this machine.

    What makes a worker may be large, and writing more than a pipe holds blocks until the other end
    reads. So it is written only when the process reads, and to a pipe whose other end no other
    process holds, so that writing fails if the process dies meanwhile. The arguments of a spawned
    process have neither guarantee; they are small.

    Args:
        make: makes a worker in its process.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self._at_work = set[Process]()
        self._context = multiprocessing.get_context("spawn")  # CUDA does not work after a fork

    def start(self) -> Process:
        """Start one more process."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return Process(process, ours)

    def send(self, worker: Process, task: Any) -> None:
        """Write a task to the pipe of a process."""
        self._at_work.discard(worker)
        with suppress(OSError):  # the process has died, and ``wait`` will report it
            worker.connection.send(task)

    def wait(self, workers: list[Process], timeout: float | None) -> list[tuple[Process, Event]]:
        """Return what is in the pipes; a closed pipe means that its process has died."""
        found: list[tuple[Process, Event]] = []
        while not found:
            ready = wait([worker.connection for worker in workers], timeout)
            if not ready:
                break
            for worker in workers:
                if worker.connection in ready:
                    try:
                        message: Event | _Request | _Begun = worker.connection.recv()
                        if isinstance(message, _Request):
                            self._hand_over(worker)
                        elif isinstance(message, _Begun):
                            self._at_work.add(worker)
                        else:
                            found.append((worker, message))
                    except (EOFError, OSError):
                        found.append((worker, Died(worker in self._at_work)))
                        self.stop(worker)
        return found

    def _hand_over(self, worker: Process) -> None:
        worker.connection.send(self._make)

    def stop(self, worker: Process) -> None:
        """Close the pipe, which ends an idle process, and kill a busy one; it writes no files."""
        self._at_work.discard(worker)
        worker.connection.close()
        worker.process.join(timeout=1.0)
        worker.process.kill()
        worker.process.join()


def _serve(connection: Connection) -> None:
    """Compute the tasks that come through the pipe, until it is closed."""
    worker: Worker | None = None
    try:
        connection.send(_Request())
        worker, report = made(connection.recv(), "a process of this machine")
        connection.send(report)
        while worker is not None:
            task = connection.recv()
            connection.send(_Begun())
            connection.send(outcome(worker, task))
    except (EOFError, OSError, KeyboardInterrupt):
        pass
