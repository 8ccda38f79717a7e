"""A model with parameters, small enough that all of its sequences and beams can be listed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cpsbs import FunctionModel, TableModel, log_prob, search
from tests import laws
from tests.exact import Prefix, paths, poisson_rule

SIZE = 2
"""The maximal length."""


def model(theta: Tensor, sources: int = 1) -> FunctionModel:
    """Return a model whose scores depend on the length of the prefix and on its last token."""

    def scores(prefix: Tensor) -> Tensor:
        last = prefix[:, -1] if prefix.shape[-1] else torch.zeros(len(prefix), dtype=torch.int64)
        return theta[prefix.shape[-1], last]

    return FunctionModel(scores, theta.shape[-1], eos=0, sources=sources)


def parameters(seed: int) -> Tensor:
    """Return the parameters of a model."""
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(SIZE, 3, 3, dtype=torch.float64, generator=generator)
    return theta.requires_grad_()


def f(y: Sequence[int]) -> float:
    """Return something that depends on all tokens."""
    return 1.0 + sum((i + 1) * token**2 for i, token in enumerate(y)) / 3


def expectation(theta: Tensor) -> Tensor:
    """Return E f, which autograd differentiates exactly."""
    beams = search(model(theta), 100, "top-k", max_length=SIZE)
    forced = log_prob(model(theta), beams)[0][beams.present[0]]
    values = torch.tensor([f(y) for y in beams.tokens(0)], dtype=torch.float64)
    return (forced.exp() * values).sum()


def listed(theta: Tensor) -> tuple[laws.Outcomes, Tensor, Tensor]:
    """Return all sequences, f of each [N], and ∇log p of each [N, d]."""
    beams = search(model(theta), 100, "top-k", max_length=SIZE)
    forced = log_prob(model(theta), beams)[0][beams.present[0]]
    score = [torch.autograd.grad(x, theta, retain_graph=True)[0].flatten() for x in forced]
    sequences: list[Prefix] = [tuple(y) for y in beams.tokens(0)]
    values = torch.tensor([f(y) for y in sequences], dtype=torch.float64)
    return laws.Outcomes(tuple(sequences), forced.detach()), values, torch.stack(score)


THETA = parameters(3)
ALL, F, SCORE = listed(THETA)


def table(theta: Tensor) -> TableModel:
    """Return the same model as a table."""
    p = theta.detach().softmax(-1)
    rows: dict[Prefix, list[float]] = {(): p[0, 0].tolist()}
    rows |= {(v,): p[1, v].tolist() for v in range(1, 3)}
    return TableModel(rows, 0)


def poisson(k: int) -> laws.Law:
    """Return the law of conditional Poisson beams of the model."""
    every = paths(table(THETA), k, SIZE, poisson_rule(lambda p: p / (1 - p)))
    return laws.from_paths(ALL, every, k, "conditional-poisson")
