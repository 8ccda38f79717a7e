"""Cells that many workers compute; ``tests.workers`` has those that die."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from cpsbs.experiments.cells import Cell
from cpsbs.experiments.compute import Subjects, Worker
from cpsbs.experiments.engines import CellsFailedError, compute_cells
from cpsbs.experiments.running import fill
from cpsbs.experiments.store import Row, Store
from cpsbs.workers import Pool, ProcessPool
from tests.workers.computing import Here

SUBJECTS = Subjects("en-fr", "cpu", None, False, ["Yes."], ["Oui."])


def cell(number: int) -> Cell:
    """Needs no model; some tenths of a second."""
    settings = {"k": 2, "temperature": 1.0 + number / 10, "repeats": 2, "runs": 2}
    return Cell("enumerated", settings, 1.0)


CELLS = [cell(i) for i in range(3)]


def here() -> Pool:
    """Compute in this process, which saves the seconds that processes take to start."""
    return Here(partial(Worker, SUBJECTS))


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
    assert results(ProcessPool(partial(Worker, SUBJECTS, 1))) == expected


def test_a_cell_that_fails_does_not_stop_the_others() -> None:
    bad = Cell("enumerated", {"k": 2}, 1.0)
    found: list[str] = []
    with pytest.raises(CellsFailedError, match=r"1 of 2 cells failed; enumerated-.*: KeyError"):
        found.extend(c.name for c, _ in compute_cells(here(), [bad, CELLS[0]], 1))
    assert found == [CELLS[0].name]


def test_what_is_there_is_not_computed_again(
    tmp_path: Path, expected: dict[str, list[Row]]
) -> None:
    store = Store(tmp_path)
    store.write(CELLS[0], expected[CELLS[0].name], 1.0)

    timed: list[bool] = []

    def pool(is_timed: bool) -> Pool:
        timed.append(is_timed)
        return here()

    done = list(fill(store, CELLS[:2], pool, 1))
    assert done == [CELLS[1]]
    assert list(fill(store, CELLS[:2], pool, 1)) == []
    assert timed == [False]
