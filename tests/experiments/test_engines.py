"""Many workers, and what happens when they die."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cpsbs.experiments.cells import Cell
from cpsbs.experiments.compute import Subjects, Worker
from cpsbs.experiments.engines import (
    CellsFailedError,
    LocalPool,
    Outcome,
    Pool,
    RayPool,
    _outcome,
    _Process,
    compute_cells,
)
from cpsbs.experiments.running import fill
from cpsbs.experiments.store import Row, Store

SUBJECTS = Subjects("en-fr", "cpu", None, False, ["Yes."], ["Oui."])


def cell(number: int) -> Cell:
    """Needs no model; some tenths of a second."""
    settings = {"k": 2, "temperature": 1.0 + number / 10, "repeats": 2, "runs": 2}
    return Cell("enumerated", settings, 1.0)


CELLS = [cell(i) for i in range(3)]


class Here(Pool):
    """Computes in this process, which saves the seconds that processes take to start."""

    def __init__(self, subjects: Subjects = SUBJECTS) -> None:
        self._worker = Worker(subjects)
        self._cell: Cell | None = None

    def start(self) -> str:
        return "this process"

    def send(self, worker: str, cell: Cell) -> None:
        self._cell = cell

    def wait(self, workers: Sequence[str]) -> list[tuple[str, Outcome]]:
        assert self._cell is not None
        return [(workers[0], _outcome(self._worker, self._cell))]

    def stop(self, worker: str) -> None:
        pass


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Row]]:
    """Computed here, one after the other."""
    worker = Worker(SUBJECTS)
    return {c.name: worker.compute(c)[0] for c in CELLS}


def results(pool: Pool, workers: int = 2) -> dict[str, list[Row]]:
    found = {}
    for c, done in compute_cells(pool, CELLS, workers):
        assert c.name not in found
        found[c.name] = done.rows
    return found


def test_processes_compute_the_same(expected: dict[str, list[Row]]) -> None:
    assert results(LocalPool(SUBJECTS, 1)) == expected


class Mortal(LocalPool):
    """Every process that is started gets killed while it works, up to a number of them."""

    def __init__(self, deaths: int) -> None:
        super().__init__(SUBJECTS, 1)
        self.deaths = deaths

    def send(self, worker: _Process, cell: Cell) -> None:
        super().send(worker, cell)
        if self.deaths > 0:
            self.deaths -= 1
            pid = worker.process.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)


def test_a_killed_process_costs_only_time(expected: dict[str, list[Row]]) -> None:
    pool = Mortal(deaths=2)
    assert results(pool) == expected
    assert pool.deaths == 0


def test_a_cell_that_kills_its_workers_is_given_up() -> None:
    with pytest.raises(CellsFailedError, match=r"1 of 1 cells failed; .* died 3 times"):
        list(compute_cells(Mortal(deaths=3), CELLS[:1], 1))


def test_a_cell_that_fails_does_not_stop_the_others() -> None:
    bad = Cell("enumerated", {"k": 2}, 1.0)
    found: list[str] = []
    with pytest.raises(CellsFailedError, match=r"1 of 2 cells failed; enumerated-.*: KeyError"):
        found.extend(c.name for c, _ in compute_cells(Here(), [bad, CELLS[0]], 1))
    assert found == [CELLS[0].name]


def test_what_is_there_is_not_computed_again(
    tmp_path: Path, expected: dict[str, list[Row]]
) -> None:
    store = Store(tmp_path)
    store.write(CELLS[0], expected[CELLS[0].name], 1.0)

    timed: list[bool] = []

    def pool(is_timed: bool) -> Pool:
        timed.append(is_timed)
        return Here()

    done = list(fill(store, CELLS[:2], pool, 1))
    assert done == [CELLS[1]]
    assert list(fill(store, CELLS[:2], pool, 1)) == []
    assert timed == [False]


@pytest.fixture
def ray() -> Iterator[Any]:
    module = pytest.importorskip("ray")
    yield module
    module.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ray_computes_the_same_and_survives_a_killed_worker(
    ray: Any, expected: dict[str, list[Row]]
) -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    assert results(RayPool(SUBJECTS, 1)) == expected
    pool = RayPool(SUBJECTS, 1)
    started: list[int] = []
    start = pool.start

    def noted() -> Any:
        actor: Any = start()
        started.append(ray.get(actor.ready.remote()))
        return actor

    pool.start = noted  # type: ignore[method-assign]
    killer = threading.Thread(target=_kill_first, args=(started,))
    killer.start()
    assert results(pool) == expected
    killer.join()
    assert len(started) == 3


def _kill_first(started: list[int]) -> None:
    """The first worker, as soon as both are there."""
    while len(started) < 2:
        time.sleep(0.01)
    os.kill(started[0], signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_node_that_goes_away_takes_nothing_with_it(
    ray: Any, expected: dict[str, list[Row]]
) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    other = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    pool = RayPool(SUBJECTS, 1, address=cluster.address)
    sent = 0
    send = pool.send

    def noted(worker: Any, cell: Cell) -> None:
        nonlocal sent
        send(worker, cell)
        sent += 1
        if sent == 2:  # both nodes have work
            cluster.remove_node(other, allow_graceful=False)

    pool.send = noted  # type: ignore[method-assign]
    try:
        assert results(pool) == expected
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_cluster_without_room_is_told(ray: Any) -> None:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    with pytest.raises(ValueError, match="the Ray cluster has 1 CPU; a worker needs 2"):
        RayPool(SUBJECTS, 2)
