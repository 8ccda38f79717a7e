"""Engines compute the same; the workers of a cluster are in this process here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import cpsbs
from cpsbs.cli import engines
from cpsbs.cli.batches import Note
from cpsbs.cli.draws import Draw, ModelChoice, draw_with
from cpsbs.cli.engines import GPU_BATCHES, Engine, LocalEngine, RayEngine
from cpsbs.cli.ordered import Record
from cpsbs.cli.sample import SampleWork
from cpsbs.cli.source import Batch
from cpsbs.designs import design_named
from cpsbs.search.more import Progress
from tests.models.folders import causal_folder
from tests.workers.computing import Here

TEXTS = ["the dog", "a cat sees", "one", "two red house", "the old dog and"]


class Cluster(Here):
    """Workers in this process, and what was asked of the pool."""

    asked: list[tuple[Any, ...]]
    fitting = 2

    def __init__(self, make: Any, *asked: Any, wait_for_room: bool) -> None:
        super().__init__(make)
        Cluster.asked.append((*asked, wait_for_room))


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    Cluster.asked = []
    monkeypatch.setattr(engines, "RayPool", Cluster)
    return Cluster.asked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return causal_folder(tmp_path_factory.mktemp("model"))


def batches(size: int = 2) -> Iterator[Batch]:
    for first in range(0, len(TEXTS), size):
        texts = TEXTS[first : first + size]
        yield Batch(list(range(first, first + len(texts))), texts, list(texts))


def draw(engine: Engine) -> Draw:
    return draw_with(engine.model, 2, design_named("stratified"), 1.0, None, 3, 0)


def computed(engine: Engine, work: Any = None) -> list[Record]:
    engine.prepare(2, 3)
    try:
        found = engine.compute(work or SampleWork(draw(engine), None), batches(), Note(), False)
        return [record for records in found for record in records]
    finally:
        engine.close()


@pytest.mark.usefixtures("cluster")
def test_a_cluster_computes_what_one_machine_does(folder: Path) -> None:
    choice = ModelChoice(str(folder), "cpu")
    assert computed(RayEngine(choice, None, None, 1)) == computed(LocalEngine(choice))


@pytest.mark.usefixtures("cluster")
def test_workers_find_a_folder_that_is_named_from_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their working directory is another one."""
    monkeypatch.chdir(folder.parent)
    made: list[str] = []
    start = engines.BatchWorker.__init__

    def noted(self: engines.BatchWorker, choice: ModelChoice, *more: Any) -> None:
        made.append(choice.name)
        start(self, choice, *more)

    monkeypatch.setattr(engines.BatchWorker, "__init__", noted)
    found = computed(RayEngine(ModelChoice(folder.name, "cpu"), None, None, 1))
    assert set(made) == {str(folder)}
    assert found[0]["settings"]["model"] == folder.name


@pytest.mark.parametrize(
    ("device", "workers", "asked"),
    [
        (None, None, (1, None, None, False)),
        ("cpu", None, (1, 0.0, None, False)),
        ("cuda", 3, (1, 1.0, None, True)),
    ],
)
def test_what_is_asked_of_the_cluster(
    device: str | None,
    workers: int | None,
    asked: tuple[Any, ...],
    folder: Path,
    cluster: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ModelChoice, "load", lambda self: cpsbs.load(folder, device="cpu"))
    engine = RayEngine(ModelChoice(str(folder), device), None, workers, 1)
    monkeypatch.setattr(engines, "content_of", lambda model: "same")
    engine.prepare(2, 3)
    assert cluster == [asked]
    engine.close()


def test_on_a_gpu_a_worker_gets_several_batches_after_the_first(folder: Path) -> None:
    engine = RayEngine(ModelChoice(str(folder)), None, None, 1)
    ten = [Batch.alone(str(i)) for i in range(2 * GPU_BATCHES)]
    assert [len(group) for group in engine._groups(ten)] == [1] * len(ten)
    engine._device = "cuda"
    assert [len(group) for group in engine._groups(ten)] == [1, GPU_BATCHES, GPU_BATCHES - 1]
    assert [batch for group in engine._groups(ten) for batch in group] == ten


@dataclass(frozen=True)
class Failing:
    """Fails at the second batch."""

    error: Exception

    def records(
        self, model: cpsbs.TextModel, batches: Iterable[Batch], progress: Progress
    ) -> Iterator[list[Record]]:
        for batch in batches:
            if batch.numbers[0] > 0:
                raise self.error
            yield [{"number": number} for number in batch.numbers]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (LocalEngine, ValueError("no"), (ValueError, "no")),
        (
            lambda choice: RayEngine(choice, None, None, 1),
            ValueError("no"),
            (RuntimeError, "^no .a worker computed some of texts 3 to 4.$"),
        ),
        (
            lambda choice: RayEngine(choice, None, None, 1),
            torch.OutOfMemoryError("too little"),
            (torch.OutOfMemoryError, "too little"),
        ),
    ],
)
def test_an_error_comes_after_the_results_before_it(
    make: Callable[[ModelChoice], Engine],
    error: Exception,
    told: tuple[type[Exception], str],
    folder: Path,
) -> None:
    engine = make(ModelChoice(str(folder), "cpu"))
    engine.prepare(2, 3)
    found = engine.compute(Failing(error), batches(), Note(), False)
    assert next(found) == [{"number": 0}, {"number": 1}]
    with pytest.raises(told[0], match=told[1]):
        next(found)
    engine.close()
