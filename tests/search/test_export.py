"""Beams as tables."""

from __future__ import annotations

import math

import pytest

from cpsbs import Beams, TableModel, search
from cpsbs.search.export import COLUMNS

MODEL = TableModel({(): [0.5, 0.3, 0.2], (1,): [0.9, 0.1, 0], (2,): [0.2, 0.2, 0.6]}, eos=0)


def drawn(design: str, k: int = 3) -> Beams:
    return search(MODEL, k, design, max_length=2, generator=1)


def words(beams: Beams) -> list[list[str]]:
    return beams.decode(lambda sequences: [" ".join(map(str, y)) for y in sequences])


def test_a_row_for_every_sequence() -> None:
    beams = drawn("stratified")
    rows = beams.to_rows(words(beams))
    assert [row["rank"] for row in rows] == [0, 1, 2]
    assert [row["tokens"] for row in rows] == beams.tokens(0)
    assert [row["text"] for row in rows] == words(beams)[0]
    assert [row["p"] for row in rows] == pytest.approx(beams.log_prob[0].exp().tolist())
    assert beams.log_weight is not None
    assert [row["weight"] for row in rows] == pytest.approx(beams.log_weight[0].exp().tolist())
    for row in rows:
        assert list(row) == COLUMNS
        assert row["weight"] == pytest.approx(row["p"] / row["pi"])
        assert row["length"] == len(row["tokens"])


def test_empty_places_have_no_row_and_unknown_numbers_are_none() -> None:
    everything = drawn("top-k", k=40)
    rows = everything.to_rows()
    assert len(rows) == int(everything.present.sum()) < 40
    assert math.fsum(row["p"] for row in rows) == pytest.approx(1)
    assert all(row["pi"] is None and row["weight"] is None and row["text"] is None for row in rows)


def test_a_data_frame() -> None:
    pandas = pytest.importorskip("pandas")
    beams = drawn("stratified")
    frame = beams.to_pandas(words(beams))
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == COLUMNS
    assert float((frame.weight * frame.length).sum()) == pytest.approx(
        float((beams.log_weight.exp() * beams.lengths).sum())  # type: ignore[union-attr]
    )
    assert list(drawn("top-k")[:0].to_pandas().columns) == COLUMNS


def test_texts_that_do_not_fit_are_refused() -> None:
    beams = drawn("stratified")
    with pytest.raises(ValueError, match="texts has 2 entries"):
        beams.to_pandas([["a"], ["b"]])
    with pytest.raises(
        ValueError, match=r"texts\[0\] has 1 entries; .* the 3 sequences of source 0"
    ):
        beams.to_rows([["a"]])
