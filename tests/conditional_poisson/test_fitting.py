"""Weights for given inclusion probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpsbs import ConditionalPoisson


def test_tiny_probabilities_are_met_relatively() -> None:
    """float64 has four digits for the distance of 1 − 1e-12 from 1, and the sum must be K."""
    target = torch.tensor([1e-12, 1e-12, 1 - 1e-12, 1 - 1e-12], dtype=torch.float64)
    fitted = ConditionalPoisson.fit(target, 2).log_inclusion.exp()
    torch.testing.assert_close(fitted, target, rtol=3e-4, atol=0)


def worst(target: Tensor, k: int) -> float:
    design = ConditionalPoisson.fit(target, k)
    return float((design.log_inclusion.exp() - target).abs().max())


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_inclusion_probabilities_come_back(data: st.DataObject) -> None:
    """Those of any design are met to 1e-10, also where items are nearly certain."""
    n = data.draw(st.integers(2, 12))
    k = data.draw(st.integers(1, n - 1))
    spread = data.draw(st.sampled_from([0.1, 1.0, 5.0, 30.0]))
    seed = data.draw(st.integers(0, 2**31))
    x = spread * torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert worst(ConditionalPoisson(x, k).log_inclusion.exp(), k) <= 1e-10


@pytest.mark.parametrize("n", [20, 100, 1000])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.75])
@pytest.mark.parametrize("doubt", [1e-1, 1e-3, 1e-4, 1e-6, 1e-8])
def test_two_groups_nearly_certain(n: int, share: float, doubt: float) -> None:
    """There is little variance, all of it between the groups: Hájek's approximation is far off."""
    k = round(n * share)
    target = torch.full((n,), doubt * k / (n - k), dtype=torch.float64)
    target[:k] = 1 - doubt
    assert worst(target, k) <= 1e-10


def test_what_certain_items_leave_over_is_rounding() -> None:
    target = torch.tensor([1.0, 1e-20, 1.0], dtype=torch.float64)
    assert ConditionalPoisson.fit(target, 2).log_inclusion.exp().tolist() == [1, 0, 1]
    half = torch.full((30,), 1 / 3, dtype=torch.float16)
    assert worst(half, 10) < 1e-3
    with pytest.raises(ValueError, match="inclusion sums to"):
        ConditionalPoisson.fit(torch.tensor([1, 1, 1e-5, 1e-5]), 2)


def test_weights_come_back_up_to_scale() -> None:
    x = torch.randn((3, 9), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    design = ConditionalPoisson.fit(ConditionalPoisson(x, 4).log_inclusion.exp(), 4)
    difference = design.log_weights - x
    torch.testing.assert_close(difference, difference[:, :1].expand(3, 9), rtol=0, atol=1e-9)


def test_certain_items_are_allowed() -> None:
    target = torch.tensor([1, 0.5, 0.5, 0, 1, 0.25, 0.75], dtype=torch.float64)
    design = ConditionalPoisson.fit(target, 4)
    assert worst(target, 4) <= 1e-11
    assert float(design.log_weights[0]) == math.inf
    assert float(design.log_weights[3]) == -math.inf
    certain = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    assert worst(certain, 2) == 0


@pytest.mark.parametrize(("n", "k"), [(100_000, 20), (100_000, 1000), (20_000, 10_000)])
def test_many_items(n: int, k: int) -> None:
    """Sizes go from 1 to 100, as in a survey, for N = 10⁵."""
    size = 1.0 + torch.arange(n, dtype=torch.float64) % 100
    target = size * (k / size.sum())
    assert float(target.max()) < 1
    assert worst(target, k) <= 1e-10


def test_float32_targets_are_met_within_their_precision() -> None:
    size = torch.rand(500, generator=torch.Generator().manual_seed(0)) + 0.1
    target = size * (30 / size.sum())
    assert worst(target, 30) < 1e-6


@pytest.mark.parametrize(
    ("target", "k", "message"),
    [
        ([0.5, 0.6], 1, "inclusion sums to 1.1.*k = 1"),
        ([1.5, -0.5], 1, "inclusion has 1.5"),
        ([math.nan, 0.5], 1, "inclusion has nan"),
        ([0.5, 0.5], 3, "k is 3"),
    ],
)
def test_bad_targets_are_refused(target: list[float], k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConditionalPoisson.fit(torch.tensor(target, dtype=torch.float64), k)
