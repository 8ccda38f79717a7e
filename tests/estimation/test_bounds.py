"""Bounds that are certain: they contain the truth in every beam, of every design."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsbs import DESIGNS, Estimate, TableModel, estimate, search
from cpsbs.estimation.result import rounded_bound
from cpsbs.functions import Bleu, Entropy, Length, Probability

pytestmark = pytest.mark.filterwarnings("ignore::cpsbs.estimation.WeightWarning")

LENGTH = 3
MODEL = TableModel.random(vocab_size=4, length=LENGTH, eos=0, seed=2)
ALL = MODEL.sequences(LENGTH)


def long(y: Sequence[int]) -> bool:
    return len(y) > 1


def score(y: Sequence[int]) -> float:
    return math.sin(sum(y))


def drawn(design: str, k: int, draws: int = 200, **options: Any) -> Any:
    copies = TableModel(MODEL.tables * draws, 0)
    return search(copies, k, design, max_length=LENGTH, generator=1, **options)


@pytest.mark.parametrize("k", [1, 3, 12])
@pytest.mark.parametrize("name", DESIGNS)
def test_bounds_contain_the_truth_in_every_beam(name: str, k: int) -> None:
    beams = drawn(name, k)
    cases: list[tuple[Any, tuple[float, float]]] = [(long, (0, 1)), (score, (-1, 1))]
    for f, limits in cases:
        truth = sum(p * float(f(y)) for y, p in ALL.items())
        result = estimate(beams, f, bounds=limits)
        assert result.bounds is not None
        low, high = result.bounds
        assert bool(((low <= truth + 1e-6) & (truth - 1e-6 <= high)).all())
        rest = 1 - result.captured
        expected = torch.where(result.exact, 0.0, (limits[1] - limits[0]) * rest.clamp(min=0))
        assert torch.allclose(high - low, expected.double(), atol=1e-6)


@given(st.integers(0, 10_000), st.integers(1, 9), st.sampled_from(list(DESIGNS)))
@settings(max_examples=30, deadline=None)
def test_bounds_contain_the_truth_for_any_model(seed: int, k: int, name: str) -> None:
    model = TableModel.random(vocab_size=3, length=3, eos=0, seed=seed)
    every = model.sequences(3)
    truth = sum(p for y, p in every.items() if 1 in y)
    result = estimate(search(model, k, name, max_length=3, generator=seed), lambda y: 1 in y)
    assert result.bounds is not None
    assert float(result.bounds[0][0]) <= truth + 1e-6
    assert float(result.bounds[1][0]) >= truth - 1e-6


def test_beam_search_has_bounds_without_an_estimate() -> None:
    result = estimate(drawn("top-k", 3, 2), long)
    assert bool(result.value.isnan().all())
    assert "not estimated, certainly in [" in str(result)
    assert result.to_dicts()[0]["value"] is None
    low, high = result.interval()
    assert result.bounds is not None
    assert torch.equal(low, result.bounds[0])
    assert torch.equal(high, result.bounds[1])
    vector = estimate(drawn("top-k", 3, 2), lambda y: [len(y), 1], bounds=([0, 0], [9, 9]))
    assert Estimate.from_dicts(vector.to_dicts()).value.shape == vector.value.shape
    again = Estimate.from_dicts(result.to_dicts())
    assert again.bounds is not None
    assert torch.equal(again.bounds[1], result.bounds[1])
    with pytest.raises(ValueError, match="no inclusion probabilities"):
        estimate(drawn("top-k", 3, 2), score)


def test_intervals_are_cut_to_the_bounds() -> None:
    result = estimate(drawn("stratified", 12), lambda y: sum(y) % 2 == 0)
    plain = estimate(drawn("stratified", 12), lambda y: float(sum(y) % 2 == 0))
    assert plain.bounds is None
    (low, high), bounds = result.interval(), result.bounds
    assert bounds is not None
    assert bool((low >= bounds[0]).all())
    assert bool((high <= bounds[1]).all())
    free = plain.interval()
    inside = (free[0] >= bounds[0]) & (free[1] <= bounds[1])
    assert bool((low[inside] == free[0][inside]).all())
    assert bool((high - low < free[1] - free[0]).any())


def test_several_beams_count_each_sequence_once() -> None:
    several = [
        search(MODEL, 3, "independent", max_length=LENGTH, generator=seed) for seed in range(5)
    ]
    result = estimate(several, long)
    seen = {tuple(y) for beams in several for y in beams.tokens(0)}
    assert result.bounds is not None
    assert float(result.bounds[0][0]) == pytest.approx(sum(ALL[y] for y in seen if long(list(y))))
    assert float(result.bounds[1][0]) == pytest.approx(
        1 - sum(ALL[y] for y in seen if not long(list(y)))
    )


def test_functions_state_their_bounds() -> None:
    beams = drawn("stratified", 4, 1)
    probability, length, entropy = (
        estimate(beams, f) for f in (Probability(long), Length(), Entropy())
    )
    assert probability.bounds is not None
    assert length.bounds is not None
    assert entropy.bounds is not None
    rest = 1 - float(length.captured[0])
    assert float(length.bounds[1][0] - length.bounds[0][0]) == pytest.approx((LENGTH - 1) * rest)
    assert float(entropy.bounds[1][0]) == math.inf
    assert "certainly at least" in str(entropy)
    assert Bleu.bounds == (0.0, 1.0)


def test_all_that_there_is_leaves_no_room() -> None:
    result = estimate(search(MODEL, 100, max_length=LENGTH), score, bounds=(-1, 1))
    assert bool(result.exact[0])
    assert result.bounds is not None
    assert float(result.bounds[0][0]) == float(result.bounds[1][0]) == float(result.value[0])
    assert "certainly" not in str(result)


def test_vectors_and_lists_of_functions() -> None:
    beams = drawn("stratified", 4, 2)
    both = estimate(beams, lambda y: [len(y), len(y) ** 2], bounds=([1, 1], [3, 9]))
    assert both.bounds is not None
    assert both.bounds[0].shape == (2, 2)
    mean = both.mean()
    assert mean.bounds is not None
    assert torch.allclose(mean.bounds[0][0], both.bounds[0].mean(0))
    assert estimate(beams, [Length(), Probability(long)]).bounds is not None
    assert estimate(beams, [Length(), lambda y: 0.5]).bounds is None


def test_bounds_are_rounded_outwards() -> None:
    for value in (0.66426, 0.3, 1.23456e-7, -2.00001, 5e-324, 0.0, 1e-308):
        assert float(rounded_bound(value, math.floor)) <= value
        assert float(rounded_bound(value, math.ceil)) >= value


def test_a_value_outside_its_bounds_names_the_sequence() -> None:
    beams = drawn("stratified", 4, 2)
    first = beams.tokens(0)[0]
    with pytest.raises(ValueError, match=r"f is 5\.0 on the sequence .* of source 0.*\[0, 1\]"):
        estimate(beams, lambda y: 5.0 if y == first else 0.0, bounds=(0, 1))
    for bad in ((1, 0), (0,), ("a", "b"), ([0, 0], [1, 1]), (math.nan, 1)):
        with pytest.raises(ValueError, match="bounds is"):
            estimate(beams, score, bounds=bad)  # type: ignore[arg-type]
