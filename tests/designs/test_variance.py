"""Variances by successive differences, and degrees of freedom.

Statistical tests have fixed seeds and state their false-alarm rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpsbs import TableModel, estimate, search
from cpsbs.designs.variance import difference_variance, effective_freedom, tree_order


@dataclass
class Drawn:
    """The part of beams that error estimates read."""

    sequences: Tensor
    present: Tensor
    log_prob: Tensor
    log_inclusion: Tensor | None = None
    joint_log_inclusion: Tensor | None = None
    trace: Tensor | None = None

    @property
    def k(self) -> int:
        return self.sequences.shape[1]


def drawn(sequences: list[list[int]], present: list[bool] | None = None) -> Drawn:
    rows = torch.tensor([sequences])
    here = torch.tensor([present or [True] * len(sequences)])
    return Drawn(rows, here, torch.zeros(here.shape, dtype=torch.float64))


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=8),
    st.integers(0, 255),
)
@settings(max_examples=60, deadline=None)
def test_the_order_of_the_tree_is_that_of_sorted_lists(rows: list[list[int]], mask: int) -> None:
    present = [bool(mask >> i & 1) for i in range(len(rows))]
    order = tree_order(torch.tensor([rows]), torch.tensor([present]))[0].tolist()
    assert sorted(order) == list(range(len(rows)))
    found = [rows[i] for i in order if present[i]]
    assert found == sorted(found)
    assert [present[i] for i in order] == sorted(present, reverse=True)


def test_differences_are_between_neighbours_in_the_tree() -> None:
    # In the order of the tree the values are 1, 2, 4, 8, whatever order they come in.
    beams = drawn([[2, 0], [0, 1], [1, 0], [0, 0]])
    chance = torch.ones(1, 4, dtype=torch.bool)
    weight = torch.full((1, 4), 0.5, dtype=torch.float64)
    values = torch.tensor([[[8.0], [2.0], [4.0], [1.0]]], dtype=torch.float64)
    variance, freedom = difference_variance(beams, chance, weight, values)
    assert variance.tolist() == [[pytest.approx(4 / 6 * 0.25 * (1 + 4 + 16))]]
    assert freedom.tolist() == [pytest.approx(2 * 9 / 8)]


def test_certain_and_empty_places_do_not_count() -> None:
    beams = drawn([[0, 0], [1, 0], [2, 0], [3, 0]], [True, True, True, False])
    chance = torch.tensor([[True, False, True, False]])
    weight = torch.tensor([[0.5, 9.0, 0.5, 0.0]], dtype=torch.float64)
    values = torch.tensor([[[1.0], [77.0], [3.0], [0.0]]], dtype=torch.float64)
    variance, freedom = difference_variance(beams, chance, weight, values)
    assert variance.tolist() == [[pytest.approx(1.0)]]
    assert freedom.tolist() == [1.0]


def test_a_single_pick_is_compared_with_its_certain_neighbours() -> None:
    beams = drawn([[0, 0], [1, 0], [2, 0], [3, 0]])
    chance = torch.tensor([[False, True, False, False]])
    weight = torch.tensor([[0.3, 0.1, 0.3, 0.3]], dtype=torch.float64)
    values = torch.tensor([[[1.0], [3.0], [6.0], [100.0]]], dtype=torch.float64)
    variance, freedom = difference_variance(beams, chance, weight, values)
    assert variance.tolist() == [[pytest.approx(0.01 * (4 + 9) / 2)]]
    assert freedom.tolist() == [1.0]


def test_picks_that_agree_tell_nothing() -> None:
    beams = drawn([[0, 0], [1, 0], [2, 0]])
    chance = torch.tensor([[True, True, False]])
    values = torch.tensor([[[1.0], [1.0], [5.0]]], dtype=torch.float64)
    variance, _ = difference_variance(beams, chance, torch.full((1, 3), 1 / 3.0).double(), values)
    assert variance.tolist() == [[0.0]]


@given(st.integers(0, 1000), st.integers(0, 31))
@settings(max_examples=50, deadline=None)
def test_the_variance_is_a_quadratic_form(seed: int, mask: int) -> None:
    """Var(f + g) + Var(f − g) = 2 Var(f) + 2 Var(g), from which covariances follow."""
    generator = torch.Generator().manual_seed(seed)
    beams = drawn([[i, 0] for i in torch.randperm(5, generator=generator).tolist()])
    chance = torch.tensor([[bool(mask >> i & 1) for i in range(5)]])
    weight = torch.rand(1, 5, generator=generator, dtype=torch.float64)
    f, g = torch.randint(0, 2, (2, 1, 5, 1), generator=generator).double()
    values = torch.cat([f + g, f - g, f, g], -1)
    total, difference, one, other = difference_variance(beams, chance, weight, values)[0][
        0
    ].tolist()
    assert total + difference == pytest.approx(2 * one + 2 * other, abs=1e-12)


def test_without_chance_there_is_no_variance() -> None:
    beams = drawn([[0, 0], [1, 0]])
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    values = torch.tensor([[[1.0], [5.0]]], dtype=torch.float64)
    variance, freedom = difference_variance(beams, nothing, torch.ones(1, 2).double(), values)
    assert variance.tolist() == [[0.0]]
    assert freedom.tolist() == [math.inf]


def test_for_independent_picks_the_variance_is_unbiased() -> None:
    # The mean of 20,000 estimates is within 3.9 standard errors: a false alarm in 10,000.
    draws, m = 20_000, 6
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(draws, m, 1, generator=generator, dtype=torch.float64)
    rows = torch.arange(m)[None, :, None].expand(draws, -1, -1)
    here = torch.ones(draws, m, dtype=torch.bool)
    beams = Drawn(rows, here, torch.zeros(draws, m, dtype=torch.float64))
    weight = torch.full((draws, m), 1 / m, dtype=torch.float64)
    variance, freedom = difference_variance(beams, here, weight, values)
    error = float(variance.std()) / math.sqrt(draws)
    assert abs(float(variance.mean()) - 1 / m) < 3.9 * error
    # Var v = 2 (E v)² / ν, and the sample variance of v is itself within 10%.
    implied = 2 * float(variance.mean()) ** 2 / float(variance.var())
    assert implied == pytest.approx(float(freedom[0]), rel=0.1)


def test_degrees_of_freedom_count_equal_terms() -> None:
    terms = torch.zeros(3, 5, 2, dtype=torch.float64)
    terms[0, :4] = 2.0
    terms[1, 0, 0], terms[1, :5, 1] = 7.0, 1.0
    assert effective_freedom(terms).tolist() == [4.0, 1.0, math.inf]


def test_an_event_decided_by_the_first_token_has_a_bar_that_shows_the_gain() -> None:
    """Independent light picks would claim more than twice the real standard deviation here."""
    model, draws = TableModel.random(vocab_size=8, length=4, eos=0, seed=3), 400
    copies = TableModel(model.tables * draws, 0)
    beams = search(copies, 20, "stratified", max_length=4, generator=5)
    result = estimate(beams, lambda y: y[0] <= 3)
    truth = sum(p for y, p in model.sequences(4).items() if y[0] <= 3)
    assert result.standard_error is not None
    real = float(result.value.std())
    claimed = result.standard_error.nanmedian()
    assert float(claimed) < 1.6 * real
    low, high = result.interval()
    # At least 92% of 400 independent beams cover, where 95% or more do: below 1e-3 by chance.
    assert float(((low <= truth) & (truth <= high)).double().mean()) >= 0.92
