"""``cpsbs.ray.Sampler`` adds the sequences of ``TextModel.beams`` to rows, however they come."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import cpsbs
import cpsbs.ray
from cpsbs.text import demonstration
from tests.docs import pages

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")

TEXTS = [text for text, _ in demonstration()][:6]
DRAW: dict[str, Any] = {"k": 3, "temperature": 0.5, "max_length": 30}


@pytest.fixture(scope="module")
def sampler() -> cpsbs.ray.Sampler:
    return cpsbs.ray.Sampler(number="number", batch_size=2, **DRAW)


def rows(texts: list[Any], **columns: list[Any]) -> Any:
    return pa.table({"text": texts, "number": list(range(len(texts))), **columns})


def test_rows_get_the_sequences_of_the_library(sampler: cpsbs.ray.Sampler) -> None:
    beams = sampler.model.beams(TEXTS, seed=0, **DRAW)
    entries = beams.to_dict()["sources"]
    found = sampler(rows(TEXTS, other=["x"] * 6))
    assert found["other"].to_pylist() == ["x"] * 6
    assert found["texts"].to_pylist() == sampler.model.texts(beams)
    for name in ("sequences", "finished"):
        assert found[name].to_pylist() == [entry[name] for entry in entries]
    for name in ("log_prob", "log_inclusion", "log_weight"):
        for own, entry in zip(found[name].to_pylist(), entries, strict=True):
            assert own == pytest.approx(entry[name], abs=1e-4)


def test_blocks_change_nothing(sampler: cpsbs.ray.Sampler) -> None:
    whole = rows(TEXTS)
    parts = [sampler(whole.slice(first, 3)) for first in (3, 0)]
    texts = [part["texts"].to_pylist() for part in reversed(parts)]
    assert texts[0] + texts[1] == sampler(whole)["texts"].to_pylist()


def test_without_numbers_a_text_selects_its_stream() -> None:
    sampler = cpsbs.ray.Sampler(**DRAW)
    found = sampler(pa.table({"text": [*TEXTS[:2], TEXTS[0]]}))["texts"].to_pylist()
    assert found[0] == found[2]
    assert sampler(pa.table({"text": TEXTS[1:2]}))["texts"].to_pylist() == found[1:2]


def test_what_a_design_does_not_have_is_null_of_the_same_type() -> None:
    best = cpsbs.ray.Sampler(design="top-k", **DRAW)(rows(TEXTS[:1]))
    drawn = cpsbs.ray.Sampler(**DRAW)(rows(TEXTS[:1]))
    assert best["log_weight"].to_pylist() == [None]
    assert best.schema == drawn.schema


def test_bad_rows_are_refused_or_skipped(sampler: cpsbs.ray.Sampler) -> None:
    bad = ["Yes.", "", None, "word " * 600]
    with pytest.raises(ValueError, match="the text '' is empty; fix it, or use skip=True"):
        sampler(rows(bad))
    skipping = cpsbs.ray.Sampler(skip=True, **DRAW)
    found = skipping(rows(bad))
    assert [reason and reason[:9] for reason in found["error"].to_pylist()] == [
        None, "is empty", "is not a ", "has 601 t",
    ]  # fmt: skip
    assert [own is None for own in found["texts"].to_pylist()] == [False, True, True, True]
    assert skipping(rows(bad[1:2])).schema == found.schema


class Lengths(cpsbs.ray.Sampler):
    """Adds the expected length of a sequence."""

    added: ClassVar[dict[str, str]] = {"length": "float64"}

    def columns(self, beams: cpsbs.Beams) -> dict[str, Any]:
        found = cpsbs.estimate(beams, len, decode=self.model.decode)
        return super().columns(beams) | {"length": float(found.value[0])}


def test_a_subclass_adds_an_estimate() -> None:
    sampler = Lengths(skip=True, **DRAW)
    found = sampler(rows(TEXTS[:1]))
    (length,), (texts,) = found["length"].to_pylist(), found["texts"].to_pylist()
    assert min(map(len, texts)) <= length <= max(map(len, texts))
    for block in (rows([""]), rows(TEXTS).slice(0, 0)):
        assert sampler(block).schema.names == found.schema.names
        assert sampler(block).schema.field("length") == found.schema.field("length")


def test_a_column_without_a_type_is_refused() -> None:
    class Forgotten(Lengths):
        added: ClassVar[dict[str, str]] = {}

    with pytest.raises(ValueError, match="columns returned 'length'; name it in added"):
        Forgotten(**DRAW)(rows(TEXTS[:1]))


def test_mistakes_are_told(sampler: cpsbs.ray.Sampler) -> None:
    for wrong, told in (
        ({"text": TEXTS}, 'give batch_format="pyarrow" to map_batches'),
        (pa.table({"texts": TEXTS}), "there is no column 'text'; the columns are texts"),
        (pa.table({"text": TEXTS}), "there is no column 'number'"),
        (pa.table({"text": ["Yes."], "number": ["1"]}), "it must have integers"),
        (rows(["Yes."], finished=[1]), "have a column 'finished' already; rename it"),
    ):
        with pytest.raises(ValueError, match=told):
            sampler(wrong)
    with pytest.raises(ValueError, match="model is a TextModel; it must be the name of a model"):
        cpsbs.ray.Sampler(sampler.model)  # type: ignore[arg-type]


@pytest.fixture
def ray() -> Iterator[Any]:
    module = pytest.importorskip("ray")
    module.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield module
    module.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_it_runs_in_actors_of_ray_data(ray: Any, sampler: cpsbs.ray.Sampler) -> None:
    given = ray.data.from_arrow(rows(TEXTS)).repartition(3)
    found = given.map_batches(
        cpsbs.ray.Sampler,
        fn_constructor_kwargs={"number": "number", **DRAW},
        batch_format="pyarrow",
        batch_size=2,
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=1,
    ).take_all()
    texts = {row["number"]: list(row["texts"]) for row in found}
    assert [texts[i] for i in range(6)] == sampler(rows(TEXTS))["texts"].to_pylist()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_pipeline_of_the_page_runs(ray: Any, tmp_path: Path) -> None:
    page = Path(__file__).parents[1] / "docs/how-to/cluster.md"
    shown = [b for b in pages.blocks(page.read_text("utf-8")) if pages.ON_A_CLUSTER in b.info]
    with pages.session(tmp_path):
        for block in shown:
            exec(block.code.replace("/shared", str(tmp_path)), {})
    found = pa.parquet.read_table(tmp_path / "french")
    assert len(found) == pages.SENTENCES
    assert all(len(texts) == 5 for texts in found["texts"].to_pylist())
