"""The law of the number of heads, compared with direct convolution."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from cpsbs.conditional_poisson.bernoulli_sum import (
    BernoulliSum,
    PowerSums,
    circle_points,
    variance_bound,
)


def convolved(p: Tensor) -> Tensor:
    """Return [M + 1] P(S = j), computed coin by coin."""
    law = torch.ones(1, dtype=torch.float64)
    for chance in p:
        law = torch.nn.functional.pad(law, (0, 1)) * (
            1 - chance
        ) + chance * torch.nn.functional.pad(law, (1, 0))
    return law


@pytest.mark.parametrize(("n", "k"), [(1, 1), (6, 2), (40, 39), (300, 20)])
def test_the_law_is_that_of_the_coins(n: int, k: int) -> None:
    y = 2 * torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    y = y - y.topk(k).values[-1]
    wanted = torch.tensor(k - 0.5, dtype=torch.float64)
    law = BernoulliSum(y, None, k, n, wanted, torch.zeros((), dtype=torch.float64))
    p, _ = law.coins(y)
    exact = convolved(p)
    torch.testing.assert_close(law.log_probability.exp(), exact[k], rtol=1e-13, atol=0)
    few = range(min(k, 4) + 1)
    torch.testing.assert_close(
        law.probabilities(few), exact[[k - j for j in few]], rtol=0, atol=1e-15
    )
    for fewer in (0, 1):
        without = law.probability_without(y, fewer)
        for item in range(0, n, 7):
            rest = convolved(torch.cat([p[:item], p[item + 1 :]]))
            expected = rest[k - fewer] if k - fewer < len(rest) else torch.zeros(())
            torch.testing.assert_close(without[item], expected.double(), rtol=0, atol=1e-15)


def test_power_sums_stand_for_small_coins() -> None:
    y = torch.randn(500, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 6
    largest = y.max()
    powers = (y - largest).exp()[:, None] ** torch.arange(1, 20, dtype=torch.float64)
    tail = PowerSums(largest, powers.sum(0))
    tilt = torch.tensor(0.3, dtype=torch.float64)
    torch.testing.assert_close(tail.expected(tilt), torch.sigmoid(y + tilt).sum())
    torch.testing.assert_close(tail.log_terms(tilt).sum(), (y + tilt).exp().log1p().sum())
    theta = torch.arange(1, 24, 2, dtype=torch.float64) * (torch.pi / 24)
    p = torch.sigmoid(y + tilt)[:, None]
    exact = torch.complex(1 - p + p * theta.cos(), p * theta.sin()).log().sum(0)
    real, imaginary = tail.log_characteristic(tilt, 24)
    torch.testing.assert_close(torch.complex(real, imaginary), exact)


@pytest.mark.parametrize(
    ("k", "n"), [(1, 2), (1, 10**6), (3, 4), (20, 10**6), (400, 1000), (2000, 5000), (50, 100)]
)
def test_values_a_circle_apart_do_not_both_occur(k: int, n: int) -> None:
    """Equal coins have the largest variance; at every tilt that is used."""
    points = circle_points(k, n)
    assert points % 2 == 0
    for wanted in (k - 0.5, k + 0.5):
        law = stats.binom(n, min(wanted / n, 1.0))
        assert law.var() <= variance_bound(k, n)
        assert law.sf(k + points - 2) + law.cdf(k - points + 1) < 1e-18
