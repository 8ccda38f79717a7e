"""Settings and scores at the edge of floating point."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import cpsbs
from cpsbs import ConditionalPoisson, FunctionModel, search
from cpsbs.designs import DESIGNS


def scores(prefix: Tensor) -> Tensor:
    return torch.arange(12.0).flip(0).expand(len(prefix), 12) / 4


@pytest.mark.parametrize("design", [name for name in DESIGNS if DESIGNS[name].distinct])
def test_a_tiny_nucleus_keeps_the_most_probable_token(design: str) -> None:
    for nucleus in (1e-300, 5e-324):
        beams = search(FunctionModel(scores, 12, 3), 4, design, max_length=3, nucleus=nucleus)
        assert beams.tokens(0) == [[0, 0, 0]]
        assert float(beams.log_prob[0, 0]) == 0


@pytest.mark.parametrize("temperature", [1e-300, 1e-21, 0.0, -1.0, math.inf, math.nan])
def test_a_temperature_that_overflows_is_named(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature is .*; .* finite number of at least 1e-20"):
        search(FunctionModel(scores, 12, 3), 4, max_length=3, temperature=temperature)


@pytest.mark.parametrize("design", DESIGNS)
def test_the_least_temperature_is_greedy(design: str) -> None:
    beams = search(FunctionModel(scores, 12, 3), 4, design, max_length=3, temperature=1e-20)
    assert beams.tokens(0)[0] == [0, 0, 0]
    assert float(beams.log_prob[0, 0]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("forbidden", [-1e9, -1e20, -3e38, -math.inf])
@pytest.mark.parametrize("design", [name for name in DESIGNS if DESIGNS[name].estimates])
def test_fewer_legal_tokens_than_k(design: str, forbidden: float, dtype: torch.dtype) -> None:
    """Three tokens are legal, the others forbidden by a large negative number; K is five.

    Estimates are those of the model in which the others are impossible, on average over 100
    sources; four standard errors, or 1e-6 where there is nothing left out.
    """

    def masked(prefix: Tensor) -> Tensor:
        x = torch.full((len(prefix), 12), forbidden, dtype=dtype)
        x[:, :3] = torch.tensor([1.0, 0.5, 0.2], dtype=dtype)
        return x

    model = FunctionModel(masked, 12, 0, sources=100)
    beams = search(model, 5, design, max_length=3, generator=0)
    assert int(beams.present.sum(-1).min()) >= 3
    found = cpsbs.estimate(beams, len).value
    p = torch.tensor([1.0, 0.5, 0.2], dtype=torch.float64).softmax(-1)[0]
    exact = float(p + 2 * (1 - p) * p + 3 * (1 - p) ** 2)
    error = float(found.std() / 10)
    assert abs(float(found.mean()) - exact) <= max(4 * error, 1e-6)


def test_log_z_where_partial_sums_overflow() -> None:
    def log_z(values: list[float], k: int) -> float:
        return float(
            ConditionalPoisson(torch.tensor(values, dtype=torch.float64), k).log_normalizer
        )

    assert log_z([1e300, -1.7e308, 1e300], 3) == pytest.approx(-1.7e308)
    assert log_z([1.7e308, -1.7e308, 0.0], 3) == 0
    assert log_z([1.7e308, -1.7e308, 1.7e308, -1.7e308], 4) == 0
    assert log_z([1.7e308, 1.7e308], 2) == math.inf
    assert log_z([-1.7e308, -1.7e308], 2) == -math.inf
    x = torch.tensor([1e300, -1.7e308, 1e300], dtype=torch.float64, requires_grad=True)
    design = ConditionalPoisson(x, 2)
    (gradient,) = torch.autograd.grad(design.log_normalizer, x)
    assert gradient.tolist() == [1, 0, 1]
    assert abs(design.log_prob(torch.tensor([0, 2])).detach().item()) < 1e-15
