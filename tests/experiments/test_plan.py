"""Plans, names, and what is kept on the disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cpsbs.experiments.cells import Cell
from cpsbs.experiments.compute import Subjects
from cpsbs.experiments.enumeration import inclusion, tempered
from cpsbs.experiments.plan import EXPERIMENTS, FULL, QUICK, Subject, plan
from cpsbs.experiments.running import _line, subject_of
from cpsbs.experiments.store import Store
from cpsbs.models.table import TableModel
from tests import exact

SUBJECT = Subject(
    "en-fr", "abc", "def", 3003, ("CPU, 2 processors",), "float32", "float32", "float16"
)


def test_every_cell_is_planned_once_and_has_its_own_seed() -> None:
    cells = plan(EXPERIMENTS, FULL, SUBJECT)
    assert len({cell.name for cell in cells}) == len(cells)
    assert len({cell.seed for cell in cells}) == len(cells)
    kinds = [cell.kind for cell in cells]
    assert kinds[-1] == "runtime"
    assert kinds.index("runtime") == len(kinds) - kinds.count("runtime")
    alone = plan(["bleu"], FULL, SUBJECT)
    assert {cell.name for cell in alone} == {cell.name for cell in plan(["entropy"], FULL, SUBJECT)}
    assert {cell.name for cell in alone} < {cell.name for cell in cells}


def test_a_changed_setting_model_or_test_set_makes_new_cells() -> None:
    before = {cell.name for cell in plan(["bleu", "diversity", "hindsight"], QUICK, SUBJECT)}
    changes = [
        (replace(QUICK, max_length=61), SUBJECT),
        (QUICK, replace(SUBJECT, model_fingerprint="abd")),
        (QUICK, replace(SUBJECT, texts_fingerprint="deg")),
    ]
    for scale, subject in changes:
        after = {cell.name for cell in plan(["bleu", "diversity", "hindsight"], scale, subject)}
        # What is computed on a table depends on neither.
        assert all(name.startswith("enumerated") for name in before & after)
    assert {c.name for c in plan(["runtime"], QUICK, SUBJECT)}.isdisjoint(
        c.name for c in plan(["runtime"], QUICK, replace(SUBJECT, devices=("another",)))
    )


def test_the_whole_test_set_is_decoded_once_for_every_setting() -> None:
    cells = plan(["diversity"], FULL, SUBJECT)
    mine = [
        cell.settings["ranks"]
        for cell in cells
        if cell.settings["k"] == 5
        and cell.settings["design"] == "diverse"
        and cell.settings["strength"] == 0.3
    ]
    assert sorted(i for first, last in mine for i in range(first, last)) == list(range(3003))


def test_the_store_has_whole_cells_or_none(tmp_path: Path) -> None:
    store = Store(tmp_path)
    cell = Cell("estimates", {"k": 2, "design": "top-k"}, 1.0)
    assert not store.has(cell)
    assert store.rows([cell]) == []
    store.write(cell, [{"value": 0.5}, {"value": 1.5}], seconds=2.5)
    assert store.has(cell)
    assert store.seconds(cell) == 2.5
    expected = [{"k": 2, "design": "top-k", "value": v} for v in (0.5, 1.5)]
    assert store.rows([cell]) == expected
    assert [file.suffix for file in (tmp_path / "cells").iterdir()] == [".parquet"]


def test_times_on_other_devices_are_found_again(tmp_path: Path) -> None:
    """A folder that was on two machines has the times of both; of nothing else."""
    scale = replace(FULL, runtime_sizes=(2,))
    here = plan(["runtime"], scale, SUBJECT)
    both = plan(["runtime"], scale, replace(SUBJECT, devices=("a card", *SUBJECT.devices)))
    assert len(both) == 2 * len(here)
    assert {cell.name for cell in here} < {cell.name for cell in both}
    other = plan(["runtime"], replace(scale, max_length=7), replace(SUBJECT, devices=("a card",)))
    store = Store(tmp_path)
    for cell in (*both, *other):
        store.write(cell, [{"seconds": 1.0}], seconds=1.0)
    devices = tuple(store.devices())
    assert devices == ("CPU, 2 processors", "a card")
    planned = plan(["runtime"], scale, replace(SUBJECT, devices=devices))
    assert {cell.name for cell in planned} == {cell.name for cell in both}
    assert len(store.rows(planned)) == len(both)


def test_models_are_told_apart_by_their_files(tmp_path: Path) -> None:
    def fingerprint() -> str:
        subjects = Subjects(str(tmp_path), None, None, False, ["a"], ["b"])
        return subject_of(subjects, ("here",)).model_fingerprint

    (tmp_path / "config.json").write_text('{"model_type": "marian"}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = fingerprint()
    (tmp_path / "README.md").write_text("a card")
    assert fingerprint() == before
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    assert fingerprint() != before


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_enumerated_inclusion_is_the_sum_over_all_paths(temperature: float) -> None:
    model = tempered(TableModel.random(3, 3, seed=4), temperature)
    rule = exact.conditional_poisson(lambda p: p / (1 - p))
    law = exact.beam_law(model, 2, 3, rule)
    expected: dict[tuple[int, ...], float] = {}
    for beam, probability in law.items():
        for y in beam:
            expected[y] = expected.get(y, 0.0) + probability
    found = inclusion(model, 2, 3)
    assert found == pytest.approx(expected, rel=1e-9)
    assert sum(found.values()) == pytest.approx(2)


def test_time_is_shared_out_by_a_line() -> None:
    assert _line([(10, 3.0), (20, 5.0)]) == pytest.approx((1.0, 0.2))
    assert _line([(10, 3.0)]) == (3.0, 0.0)
    assert _line([(10, 1.0), (20, 4.0)]) == pytest.approx((0.0, 2.5 / 15))
