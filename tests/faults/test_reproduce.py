"""``cpsbs reproduce`` mixes no results, trusts no damaged ones, and never waits for the dead."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cpsbs.cli import reproduction
from cpsbs.experiments import plan as planning
from cpsbs.experiments import running
from cpsbs.experiments.cells import Cell
from cpsbs.experiments.claims import claims
from cpsbs.experiments.compute import Subjects, Worker
from cpsbs.experiments.figures import plot
from cpsbs.experiments.plan import EXPERIMENTS, QUICK, Subject, plan
from cpsbs.experiments.report import write_report
from cpsbs.experiments.running import fill, subject_of
from cpsbs.experiments.store import Row, Store
from cpsbs.experiments.tables import tables
from cpsbs.extras import required
from cpsbs.text import demonstration
from tests.cli.test_commands import run
from tests.cli.test_reproduce import TINY
from tests.workers.computing import Here

pyarrow: Any = required("pyarrow", "parquet")
parquet: Any = required("pyarrow.parquet", "parquet")

SUBJECT = Subject(
    "en-fr", "abc", "def", 3003, ("CPU, 2 processors",), "float32", "float32", "float16"
)
SUBJECTS = Subjects("en-fr", "cpu", None, False, ["Yes."], ["Oui."])
SMALL = replace(TINY, lines=(0,), temperatures=(0.5,), hindsight_runs=1)


def quick_rows(cell: Cell) -> list[Row]:
    """What could have come out of a cell of ``hindsight``; it needs no model."""
    more: Row = {"normalized": True} if cell.kind == "hindsight" else {"truth": 0.5}
    value = (1 + cell.seed % 7) / 8
    places = itertools.product(range(2), range(2))
    return [{"runs": m, "repeat": i, "value": value + i / 99, **more} for m, i in places]


class Canned:
    """Has results of all cells at once."""

    facts = None

    def compute(self, cell: Cell) -> tuple[list[Row], float]:
        return quick_rows(cell), 1.0


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command for two cells, whose results are there at once."""
    monkeypatch.setattr(reproduction, "QUICK", SMALL)
    monkeypatch.setattr(reproduction.Reproduction, "_pool", lambda *_: Here(Canned))
    monkeypatch.setattr(Worker, "compute", lambda self, cell: (quick_rows(cell), 1.0))
    given = ["reproduce", "hindsight", "--quick", "--workers=1", f"--out={tmp_path / 'out'}"]
    for name, texts in zip(
        ("source", "reference"), zip(*demonstration(), strict=True), strict=True
    ):
        (tmp_path / name).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        given.append(f"--{name}={tmp_path / name}")
    return given


# What a result depends on


def test_a_run_in_another_dtype_draws_nothing_of_the_first(arguments: list[str]) -> None:
    first = run(*arguments)
    assert first.exit_code == 0, first.stderr
    same = run(*arguments, "--dtype=float32", "--plot-only")
    assert same.exit_code == 0, same.stderr
    other = run(*arguments, "--dtype=bfloat16", "--plot-only")
    assert other.exit_code == 1
    assert "has no complete experiment" in other.stderr
    assert "2 cells, 1 to compute" in run(*arguments, "--dtype=bfloat16", "--dry-run").stderr


def test_every_cell_is_named_by_dtype_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = plan(EXPERIMENTS, QUICK, SUBJECT)
    assert all({"dtype", "version"} <= cell.settings.keys() for cell in before)
    changed = replace(SUBJECT, dtype="float16", cpu_dtype="float16")
    names = {cell.name for cell in before}
    kept = names & {cell.name for cell in plan(EXPERIMENTS, QUICK, changed)}
    assert all(name.startswith("enumerated") for name in kept)  # computed without the model
    monkeypatch.setattr(planning, "__version__", "another")
    assert names.isdisjoint(cell.name for cell in plan(EXPERIMENTS, QUICK, SUBJECT))


def test_seeds_depend_on_neither_dtype_nor_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {cell.seed for cell in plan(EXPERIMENTS, QUICK, SUBJECT)}
    # As they were before cells had a dtype and a version.
    assert {1046164429750994748, 542527003307543367, 322342504693784174} < before
    assert {326272301064977298, 297089444112736401} < before
    monkeypatch.setattr(planning, "__version__", "another")
    changed = replace(SUBJECT, dtype="bfloat16", cpu_dtype="bfloat16")
    assert {cell.seed for cell in plan(EXPERIMENTS, QUICK, changed)} == before


@pytest.mark.parametrize(
    ("device", "option", "dtype"),
    [
        ("cpu", None, "float32"),
        ("cuda", None, "float16"),  # as the embedded model is stored
        ("cpu", "auto", "float16"),
        ("cuda", "float32", "float32"),
        ("cuda:1", "half", "float16"),
    ],
)
def test_the_dtype_is_the_one_that_the_model_computes_in(
    device: str, option: str | None, dtype: str
) -> None:
    assert subject_of(replace(SUBJECTS, device=device, dtype=option), ()).dtype == dtype


def test_a_dtype_that_the_folder_does_not_tell_is_as_stored(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "marian"}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    subject = subject_of(replace(SUBJECTS, model=str(tmp_path), device="cuda"), ())
    assert subject.dtype == "as stored"


@pytest.mark.parametrize("dtype", ["float33", "int8", "nn"])
def test_an_unknown_dtype_is_an_error_before_any_work(dtype: str, arguments: list[str]) -> None:
    refused = run(*arguments, f"--dtype={dtype}", "--plot-only")
    assert refused.exit_code == 1
    assert f"dtype is {dtype}; allowed are auto, float32, " in refused.stderr


def test_a_gpu_and_a_cpu_share_cells_of_the_same_dtype() -> None:
    on_cpu = subject_of(replace(SUBJECTS, dtype="float32"), ("CPU, 2 processors",))
    on_gpu = subject_of(replace(SUBJECTS, dtype="float32", device="cuda"), ("CPU, 2 processors",))
    names = [{c.name for c in plan(EXPERIMENTS, QUICK, subject)} for subject in (on_cpu, on_gpu)]
    assert names[0] == names[1]


# What counts as a result


CELLS = [
    Cell("enumerated", {"k": 2, "temperature": 0.5 + i, "repeats": 2, "runs": 1}, 1.0)
    for i in range(2)
]
ROWS: list[Row] = [
    {"runs": i, "repeat": 0, "value": 0.25 * (i + 1), "truth": 0.5} for i in range(6)
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Has the results of two cells."""
    made = Store(tmp_path)
    made.write(CELLS[0], ROWS, 1.5)
    made.write(CELLS[1], ROWS[:3], 2.5)
    return made


def file_of(store: Store, cell: Cell) -> Path:
    return store.folder / f"{cell.name}.parquet"


def _rewritten(file: Path, change: Callable[[Any], Any]) -> None:
    """Another table under the same metadata."""
    table = parquet.read_table(file)
    changed = change(table).replace_schema_metadata(table.schema.metadata)
    parquet.write_table(changed, file)


def _cut(file: Path, other: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _garbage(file: Path, other: Path) -> None:
    file.write_bytes(b"PAR1 is how it begins, and that is all\n" * 20)


def _empty(file: Path, other: Path) -> None:
    file.write_bytes(b"")


def _folder(file: Path, other: Path) -> None:
    file.unlink()
    file.mkdir()
    (file / "somebody's").write_text("file")


def _link(file: Path, other: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


def _dangling_link(file: Path, other: Path) -> None:
    file.unlink()
    file.symlink_to(file.with_name("nowhere"))


def _pipe(file: Path, other: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _other_schema(file: Path, other: Path) -> None:
    _rewritten(file, lambda table: table.rename_columns(["runs", "repeat", "truth", "value"]))


def _fewer_rows(file: Path, other: Path) -> None:
    _rewritten(file, lambda table: table.slice(1))


def _no_metadata(file: Path, other: Path) -> None:
    table = parquet.read_table(file)
    parquet.write_table(table.replace_schema_metadata(None), file)


def _unlike_rows(file: Path, other: Path) -> None:
    parquet.write_table(pyarrow.table({"x": [b"bytes"]}), file)


def _of_another_cell(file: Path, other: Path) -> None:
    file.write_bytes(other.read_bytes())


DAMAGES = [
    _cut,
    _garbage,
    _empty,
    _folder,
    _link,
    _dangling_link,
    _pipe,
    _other_schema,
    _fewer_rows,
    _no_metadata,
    _unlike_rows,
    _of_another_cell,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_no_result_of_its_cell_is_computed_again(
    damage: Callable[[Path, Path], None], store: Store
) -> None:
    file = file_of(store, CELLS[0])
    damage(file, file_of(store, CELLS[1]))
    for looks in (store, Store(store.folder.parent)):  # it has seen the good file, or not
        assert not looks.has(CELLS[0])
        assert looks.rows(CELLS) == [{**CELLS[1].settings, **row} for row in ROWS[:3]]
        (said,) = looks.unusable(CELLS)
        assert said.startswith(f"{file} ")
    done = list(fill(store, CELLS, lambda _: Here(Canned), 1))
    assert done == CELLS[:1]
    assert store.rows(done) == [{**CELLS[0].settings, **row} for row in quick_rows(CELLS[0])]
    assert store.unusable(CELLS) == []
    assert file.is_file()
    assert not file.is_symlink()


def test_what_had_the_place_of_a_result_is_not_lost(store: Store) -> None:
    linked, folder = (file_of(store, cell) for cell in CELLS)
    _link(linked, folder)
    before = linked.read_bytes()
    _folder(folder, linked)
    for cell in CELLS:
        store.write(cell, ROWS, 1.0)
    assert (store.folder / "elsewhere").read_bytes() == before
    (aside,) = store.folder.glob(f"{folder.name}.*.aside")
    assert (aside / "somebody's").read_text() == "file"


def test_no_flipped_byte_is_drawn(store: Store) -> None:
    file = file_of(store, CELLS[0])
    good = file.read_bytes()
    expected = store.rows(CELLS[:1])
    for place in range(0, len(good), 7):
        file.write_bytes(good[:place] + bytes([good[place] ^ 0x55]) + good[place + 1 :])
        assert Store(store.folder.parent).rows(CELLS[:1]) in ([], expected)


def test_a_file_is_read_once_until_it_changes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []
    read = Path.read_bytes

    def noted(self: Path) -> bytes:
        reads.append(self)
        return read(self)

    monkeypatch.setattr(Path, "read_bytes", noted)
    for _ in range(3):
        assert store.has(CELLS[0])
        assert store.seconds(CELLS[0]) == 1.5
        assert len(store.rows(CELLS[:1])) == len(ROWS)
    file = file_of(store, CELLS[0])
    assert reads == [file]
    store.write(CELLS[0], ROWS[:1], 1.0)
    assert len(store.rows(CELLS[:1])) == 1
    assert reads == [file, file]


def test_a_write_that_fails_leaves_what_was_there(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {file.name: file.read_bytes() for file in store.folder.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.write(CELLS[0], ROWS[:1], 1.0)
    assert {file.name: file.read_bytes() for file in store.folder.iterdir()} == before


def test_no_two_writes_use_the_same_temporary_file(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    move = os.replace

    def noted(before: Path, after: Path) -> None:
        used.append(before.name)
        move(before, after)

    monkeypatch.setattr(os, "replace", noted)
    for _ in range(2):
        store.write(CELLS[0], ROWS, 1.0)
        write_report(store.folder.parent, ["hindsight"], store.rows(CELLS), SMALL, [], {})
    assert len(set(used)) == len(used) > 4


def test_the_command_tells_which_files_are_no_results(arguments: list[str], tmp_path: Path) -> None:
    cells = tmp_path / "out" / "cells"
    said = run(*arguments, "--plot-only")
    assert said.exit_code == 1
    assert not cells.exists()  # nothing was to be written
    assert run(*arguments).exit_code == 0
    (damaged,) = cells.glob("hindsight-*")
    good = parquet.read_table(damaged)
    damaged.write_bytes(b"")
    planned = run(*arguments, "--dry-run")
    assert "2 cells, 1 to compute" in planned.stderr
    assert f"{damaged} cannot be used" in planned.stderr
    drawn = run(*arguments, "--plot-only")
    assert drawn.exit_code == 1
    assert f"{damaged} cannot be used" in drawn.stderr
    again = run(*arguments)
    assert again.exit_code == 0, again.stderr
    assert again.stderr.count("cannot be used") == 1
    assert f"{damaged} cannot be used" in again.stderr
    assert parquet.read_table(damaged).equals(good)
    assert "cannot be used" not in run(*arguments).stderr


def test_times_of_another_device_are_drawn_in_the_dtype_they_would_have_here(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path)
    card = replace(SUBJECT, devices=("a card",))
    for subject in (SUBJECT, card, replace(card, gpu_dtype="bfloat16")):
        for cell in plan(["runtime"], TINY, subject):
            store.write(cell, [{"line": 0, "repeat": 0, "seconds": 1.0}], 1.0)
    (store.folder / "runtime-0.parquet").write_bytes(b"garbage")
    devices = store.devices()
    assert devices == ["CPU, 2 processors", "a card"]
    drawn = store.rows(plan(["runtime"], TINY, replace(SUBJECT, devices=tuple(devices))))
    assert {(row["device"], row["dtype"]) for row in drawn} == {
        ("CPU, 2 processors", "float32"),
        ("a card", "float16"),
    }


# What is not known


@pytest.mark.parametrize(
    "ask",
    [
        lambda name: plan([name], QUICK, SUBJECT),
        lambda name: plot(name, [], QUICK),
        lambda name: tables(name, [], QUICK),
        lambda name: claims([name], [], QUICK),
    ],
)
def test_an_unknown_experiment_is_an_error_everywhere(ask: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match="experiment is 'speed'; allowed are bleu, "):
        ask("speed")


def test_an_unknown_kind_of_cell_is_an_error() -> None:
    with pytest.raises(ValueError, match="kind is 'hindsigth'; allowed are estimates, "):
        Worker(SUBJECTS).compute(Cell("hindsigth", CELLS[0].settings, 1.0))


# Which model it is


def test_an_updated_model_of_the_hub_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "1" * 40

    def config(name: str, trust_remote_code: bool, gguf_file: str | None) -> Any:
        return SimpleNamespace(dtype=None, _commit_hash=commit)

    monkeypatch.setattr(running, "configuration", config)
    subjects = replace(SUBJECTS, model="somebody/model")
    before = subject_of(subjects, ()).model_fingerprint
    assert subject_of(subjects, ()).model_fingerprint == before
    commit = "2" * 40
    assert subject_of(subjects, ()).model_fingerprint != before


def test_a_model_that_is_not_there_is_an_error_before_any_work(arguments: list[str]) -> None:
    refused = run(*arguments, "--model=/no/such/model")
    assert refused.exit_code == 1
    assert "/no/such/model" in refused.stderr
    assert "cells failed" not in refused.stderr
