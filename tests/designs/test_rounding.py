"""The variance of events by the roundings of a stratified search.

Statistical tests have fixed seeds and state their false-alarm rates.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cpsbs import Beams, TableModel, estimate, search
from cpsbs.designs.rounding import two_valued
from tests.exact import targets


def claimed(beams: Beams, values: torch.Tensor) -> torch.Tensor:
    """The variance [B, d] of Σ w f by the design of the beams."""
    assert beams.log_weight is not None
    assert beams.made_by is not None
    weight = beams.log_weight.exp() * beams.present
    variance, _ = beams.made_by.variance(beams, weight, values * beams.present[..., None], None)
    assert variance is not None
    return variance


def test_for_an_event_of_certain_first_tokens_the_variance_is_that_of_the_places() -> None:
    """All four first tokens are kept; eight of thirteen sequences are drawn.

    The exact variance is that of the number of places left of the boundary, by enumeration of the
    offset, which is all that matters for an event that the first token decides.
    """
    model = TableModel.random(vocab_size=4, length=2, eos=0, seed=4)
    beams = search(TableModel(model.tables * 50, 0), 8, "stratified", max_length=2, generator=1)
    table = model.sequences(2)
    target = targets(table, 8)
    heavy = {y for y, t in target.items() if t > 1 - 1e-9}
    scale = max(t / table[y] for y, t in target.items() if y not in heavy)
    places = 8 - len(heavy)
    assert beams.log_inclusion is not None
    light = beams.log_inclusion < 0
    for first in (1, 2, 3):
        end = scale * sum(p for y, p in table.items() if y[0] < first and y not in heavy)
        points = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
        counts = sum((points + i < end).double() for i in range(places))
        assert isinstance(counts, torch.Tensor)
        exact = float(counts.var(correction=0)) / scale**2
        values = (beams.sequences[..., :1] < first).double()
        floor = claimed(replace(beams, trace=None), values)
        found = claimed(beams, values)[:, 0]
        left = (values[:, :, 0] * light).sum(1)
        told = (left > 0) & (left < places)  # some light picks on either side
        assert bool(told.any())
        expected = torch.maximum(torch.full_like(found, exact), floor[:, 0] / 3)
        assert found[told].tolist() == pytest.approx(expected[told].tolist(), rel=1e-3)


def test_other_functions_have_the_variance_of_successive_differences() -> None:
    model = TableModel.random(vocab_size=5, length=4, eos=0, seed=2)
    beams = search(model, 7, "stratified", max_length=4, generator=3)
    values = torch.stack([beams.log_prob, (beams.sequences[..., 0] == 1).double()], -1)
    plain = replace(beams, trace=None)
    assert claimed(beams, values)[0, 0] == claimed(plain, values)[0, 0]
    assert claimed(beams, values)[0, 1] != claimed(plain, values)[0, 1]


def test_an_event_is_a_function_with_at_most_two_values() -> None:
    beams = search(TableModel.random(5, 3, eos=0, seed=1), 4, "stratified", max_length=3)
    values = torch.tensor([[[3.0, 1.0, 1.0], [3.0, 0.0, 2.0], [3.0, 1.0, 3.0], [3.0, 0.0, 1.0]]])
    assert two_valued(beams, values.double()).tolist() == [[True, True, False]]
    absent = replace(beams, present=torch.tensor([[True, True, False, True]]))
    assert two_valued(absent, values.double()).tolist() == [[True, True, True]]


@pytest.mark.parametrize(("k", "seed"), [(10, 0), (10, 1), (20, 0), (20, 3)])
def test_events_decided_early_have_bars_of_the_right_size(k: int, seed: int) -> None:
    """Successive differences claim 1.2 to 2 times the real standard deviation here."""
    model, draws = TableModel.random(vocab_size=4, length=3, eos=0, seed=seed), 400
    beams = search(TableModel(model.tables * draws, 0), k, "stratified", max_length=3, generator=5)
    result = estimate(beams, lambda y: y[0] <= 2)
    truth = sum(p for y, p in model.sequences(3).items() if y[0] <= 2)
    assert result.standard_error is not None
    # The standard deviation of 400 estimates is within 14% with probability 0.9999.
    ratio = float(result.standard_error.nanmedian()) / float(result.value.std())
    assert 0.6 < ratio < 1.3
    low, high = result.interval()
    # At least 92% of 400 independent beams cover, where 97% or more do: below 1e-6 by chance.
    assert float(((low <= truth + 1e-9) & (truth <= high + 1e-9)).double().mean()) >= 0.92


def test_the_variance_of_an_event_that_is_noise_is_not_too_small() -> None:
    """An event that no prefix decides: the sum of the tokens is odd."""
    model, draws = TableModel.random(vocab_size=8, length=4, eos=0, seed=1), 400
    beams = search(TableModel(model.tables * draws, 0), 10, "stratified", max_length=4, generator=5)
    result = estimate(beams, lambda y: sum(y) % 2 == 1)
    assert result.standard_error is not None
    mean_square = float(result.standard_error.square().nanmean())
    # A ratio of two variances of 400 beams is within 30% with probability 0.999.
    assert mean_square > 0.7 * float(result.value.var())
    assert math.isfinite(mean_square)
