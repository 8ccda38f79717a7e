"""Workers in processes of this machine, which are killed at every moment."""

from __future__ import annotations

import multiprocessing.util
import os
import queue
import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from cpsbs.workers import Crew, Done, Event, Failed, Pool, ProcessPool
from cpsbs.workers.processes import Process
from tests.workers.computing import Doubling, Making, results, values

LARGE = Making(Doubling(ballast=bytes(10**7)))
"""More than a pipe holds, so that it can be sent only while somebody reads."""


def in_a_thread(pool: Pool, tasks: Iterable[int], workers: int = 1) -> dict[int, Event]:
    """Return the results; a run that hangs fails the test and no more."""
    found: queue.SimpleQueue[dict[int, Event] | BaseException] = queue.SimpleQueue()

    def work() -> None:
        try:
            found.put(results(pool, tasks, workers))
        except BaseException as error:
            found.put(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        got = found.get(timeout=90)
    except queue.Empty:
        pytest.fail("the run hangs")
    if isinstance(got, BaseException):
        raise got
    return got


def test_processes_compute_and_survive_kills(tmp_path: Path) -> None:
    for task in (0, 3):
        (tmp_path / str(task)).touch()
    found = in_a_thread(ProcessPool(Making(Doubling(traps=tmp_path))), range(5), workers=2)
    assert values(found) == {i: 2 * i for i in range(5)}
    assert not list(tmp_path.iterdir())  # both traps did kill


class Deadly(ProcessPool):
    """Kills every process that gets a task."""

    def send(self, worker: Process, task: Any) -> None:
        super().send(worker, task)
        assert worker.connection.poll(60)  # until it says that it has begun
        kill(worker, signal.SIGKILL)


def test_a_task_that_kills_its_workers_is_given_up() -> None:
    pool = Deadly(Making(Doubling(seconds=60)))
    assert in_a_thread(pool, [1]) == {1: Failed("RuntimeError", "its worker died 3 times")}


def test_workers_that_die_while_they_are_idle_cost_no_task() -> None:
    pool = Killable(Making(Doubling()))
    crew = Crew(pool, 4)
    try:
        assert len(list(crew.compute(range(4)))) == 4
        for worker in pool.started:
            kill(worker, signal.SIGKILL)
            worker.process.join()
        assert [event for _, _, event in crew.compute([5])] == [Done(10, ANY)]
    finally:
        crew.stop()


class Killable(ProcessPool):
    """Remembers its processes."""

    def __init__(self, make: Making) -> None:
        super().__init__(make)
        self.started: list[Process] = []

    def start(self) -> Process:
        self.started.append(super().start())
        return self.started[-1]


def test_a_worker_killed_as_it_starts_does_not_hang_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = multiprocessing.util.spawnv_passfds
    killed: list[int] = []

    def deadly(path: bytes, arguments: list[Any], passed: list[int]) -> int:
        pid: int = start(path, arguments, passed)
        if "spawn_main" in str(arguments) and not killed:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        return pid

    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", deadly)
    assert values(in_a_thread(ProcessPool(LARGE), [1])) == {1: 2}
    assert len(killed) == 1


class DyingReader(ProcessPool):
    """The first process dies while its worker is on the way: it stops reading, then is killed."""

    deaths = 0

    def _hand_over(self, worker: Process) -> None:
        if not self.deaths:
            self.deaths += 1
            kill(worker, signal.SIGSTOP)
            threading.Timer(0.3, kill, (worker, signal.SIGKILL)).start()
        super()._hand_over(worker)


def test_a_worker_killed_while_it_is_sent_does_not_hang_the_run() -> None:
    pool = DyingReader(LARGE)
    assert values(in_a_thread(pool, [1])) == {1: 2}
    assert pool.deaths == 1


def kill(worker: Process, number: signal.Signals) -> None:
    """Send a signal to a process."""
    pid = worker.process.pid
    assert pid is not None
    os.kill(pid, number)
