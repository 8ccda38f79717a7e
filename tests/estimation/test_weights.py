"""``estimate`` warns where the weights are not to be trusted, and hardly ever elsewhere."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from cpsbs import FunctionModel, TableModel, estimate, search
from cpsbs.estimation import WeightWarning


def flat_model(sources: int) -> FunctionModel:
    """Return a model of much entropy, with sequences of 40 tokens."""
    scores = torch.randn(50, generator=torch.Generator().manual_seed(0)).double()
    scores[0] = -99.0
    return FunctionModel(lambda x: scores.expand(len(x), -1), 50, eos=0, sources=sources)


def length(y: list[int]) -> float:
    return float(len(y))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("sources", [1, 20])
def test_degenerate_weights_are_told_of_once(sources: int, normalize: bool) -> None:
    """Every sequence has 40 tokens; the paper's design finds next to nothing of that."""
    beams = search(flat_model(sources), 10, "conditional-poisson", max_length=40, generator=0)
    with pytest.warns(WeightWarning, match="'stratified'") as caught:
        result = estimate(beams, length, normalize=normalize)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert ("normalize=True" in str(caught[0].message)) == (not normalize)
    assert normalize or float(result.value.mean()) < 13


@pytest.mark.parametrize("design", ["stratified", "independent", "arithmetic", "sum-and-sample"])
def test_weights_that_sum_to_one_are_never_warned_of(design: str) -> None:
    estimate(search(flat_model(20), 10, design, max_length=40, generator=0), length)


def sums_warned_of(sums: Tensor) -> bool:
    """Return whether beams with these sums of weights [B] make ``estimate`` warn."""
    from dataclasses import replace

    beams = search(TableModel([{(): [0.5, 0.5]}] * len(sums), 0), 2, max_length=1)
    assert beams.log_weight is not None
    scaled = replace(beams, log_weight=beams.log_weight + sums.log()[:, None])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        estimate(scaled, length)
    return bool(caught)


@pytest.mark.parametrize(
    ("sums", "warned"),
    [
        ([1.0], False),
        ([0.4], False),
        ([2.9], False),
        ([0.3], True),
        ([3.1], True),
        ([0.1] * 10 + [1.0] * 90, False),
        ([0.1] * 11 + [1.0] * 89, True),
        ([400.0] + [1.0] * 99, True),  # the mean of all sources is 5 times too large
    ],
)
def test_far_from_one_is_a_factor_of_three_in_a_tenth_of_the_sources(
    sums: list[float], warned: bool
) -> None:
    assert sums_warned_of(torch.tensor(sums, dtype=torch.float64)) == warned


@pytest.mark.parametrize("design", ["calibrated", "gumbel-top-k", "conditional-poisson"])
def test_false_alarms_are_rare(design: str) -> None:
    """Random tables, τ = 0.5: single sources warn in less than 1 of 50 cases, 50 sources never.

    With 1,000 sources and a rate of 0.5% (measured: 0.0, 0.0 and 0.5%), 20 or more have a chance
    of less than 1e-4.
    """
    tables = TableModel.random(8, 4, sources=40, seed=3).tables
    generator = torch.Generator().manual_seed(10)
    beams = search(
        TableModel(tables * 25, 0), 10, design, max_length=4, temperature=0.5, generator=generator
    )
    sums = estimate(beams, length).sum_of_weights  # a warning would be an error here
    assert int(((sums > 3) | (sums < 1 / 3)).sum()) < 20
    for first in range(0, 1000, 50):
        estimate(beams[first : first + 50], length)
