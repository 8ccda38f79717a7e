"""The error of an estimate from one beam, where joint inclusion probabilities tell it.

With the joint probabilities along the path, Σ_{y,y'} p(y) p(y') / π(y, y') · f(y) f(y') is unbiased
for (E f)² if every two sequences can come together, so that G² minus that is unbiased for Var G,
G = Σ w f. It can come out negative; there is then no standard error. A calibrated step that has a
single place for light candidates never takes two of them; for f ≥ 0 its variance is then
overestimated.

Normalised estimates take the same with f − G for f, over Σ w (linearisation). That rests on
Σ_{y,y'} p p'/π(y, y'), which is the square of Σ w in expectation: where it is less than half of it,
the beam does not know its error, and none is given.

A design that knows its error in another way overrides ``Design.variance``.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

ROUNDING = 1e-20
"""Variances below this, relative to the square of the value, are the rounding of numbers that
agree."""


class Drawn(Protocol):
    """K sequences for each of B sources, as far as an error estimate looks at them.

    ``cpsbs.Beams`` is one; designs know nothing of the search that made it.
    """

    @property
    def k(self) -> int:
        """K."""
        ...

    @property
    def present(self) -> Tensor:
        """[B, K] false for places that stayed empty."""
        ...

    @property
    def log_prob(self) -> Tensor:
        """[B, K] log p(y)."""
        ...

    @property
    def log_inclusion(self) -> Tensor | None:
        """[B, K] log of the inclusion probability, if the design has one."""
        ...

    @property
    def joint_log_inclusion(self) -> Tensor | None:
        """[B, K, K] the same of pairs, if it was asked for."""
        ...


def weighted(weight: Tensor, values: Tensor, scale: Tensor | None) -> Tensor:
    """Return the terms w f / scale [B, K, d] of an estimate."""
    terms = weight[..., None] * values
    return terms if scale is None else terms / scale[:, None]


def no_freedom(weight: Tensor) -> Tensor:
    """Return [B] infinitely many degrees of freedom: the variance is not a sample variance."""
    return torch.full((len(weight),), math.inf, device="cpu")


def joint_variance(
    beams: Drawn,
    joint_log_inclusion: Tensor,
    weight: Tensor,
    values: Tensor,
    unit: Tensor,
    scale: Tensor | None,
) -> Tensor:
    """Return [B, d] the estimate of Var G by joint inclusion; NaN where the beam does not know it.

    The other arguments are those of ``Design.variance``.
    """
    terms = weighted(weight, values, scale)
    log_pair = beams.log_prob[:, :, None] + beams.log_prob[:, None, :] - 2 * unit[:, None, None]
    both = beams.present[:, :, None] & beams.present[:, None, :]
    ratio = torch.where(both, log_pair - joint_log_inclusion, -math.inf).exp()
    if scale is not None:
        ratio = ratio / scale[:, None].square()
    square = torch.einsum("bij,bid,bjd->bd", ratio, values, values)
    variance = terms.sum(1).square() - square
    # Where nothing was left out nothing is random, and the difference is rounding.
    magnitude = torch.einsum("bij,bid,bjd->bd", ratio, values.abs(), values.abs())
    variance = torch.where(variance.abs() < 1e-12 * magnitude, 0.0, variance)
    if scale is None:
        # All taken for certain, and yet not all that there is: it does not know what is left.
        total = (weight * unit.exp()[:, None]).sum(-1, keepdim=True)
        known = (variance != 0) | ((total - 1).abs() < 1e-6)
    else:
        known = (ratio.sum((1, 2)) >= 0.5)[:, None]
    return torch.where(known, variance, math.nan)
