"""The variance of an estimate, estimated from a single beam by joint inclusion probabilities.

The estimate is G = Σ_{y ∈ Y} w(y) f(y), and its error is random only through the beam Y. With the
joint inclusion probabilities π(y, y') along the path,

    G² − Σ_{y, y' ∈ Y} p(y) p(y') / π(y, y') · f(y) f(y')

is an unbiased estimate of Var G if every two sequences can be in a beam together, because the
double sum is then unbiased for (E f)² (Horvitz and Thompson, 1952). It can come out negative; there
is then no standard error. A calibrated step that has a single place left for light candidates never
picks two of them; for f ≥ 0 the estimate is then too large.

Normalised estimates use the same formula with f − G in the place of f and w / Σ w in the place of w
(linearisation). That relies on Σ p p' / π(y, y'), whose expectation is one and which estimates the
square of Σ w: where it is less than half of (Σ w)², the pairs in the beam say too little, and no
variance is given.

A design that knows its error in another way overrides ``Design.variance``.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

ROUNDING = 1e-14
"""A variance of at most this, relative to the square of the estimate, is rounding error of terms
that agree: their log-probabilities are sums of float32 numbers."""


class DrawnSequences(Protocol):
    """K drawn sequences for each of B sources: the part of ``Beams`` that error estimates read.

    It is a protocol because designs know nothing of the search that makes the beams.
    """

    @property
    def k(self) -> int:
        """K, the number of places in a beam."""
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
        """[B, K] log of the inclusion probability, if the design knows it."""
        ...

    @property
    def joint_log_inclusion(self) -> Tensor | None:
        """[B, K, K] log of the joint inclusion probability, if the search was asked for it."""
        ...


def infinite_freedom(weight: Tensor) -> Tensor:
    """Return [B] infinite degrees of freedom, for a variance that is not a sample variance."""
    return torch.full((len(weight),), math.inf, device="cpu")


def joint_variance(
    drawn: DrawnSequences,
    joint_log_inclusion: Tensor,
    weight: Tensor,
    values: Tensor,
    log_norm: Tensor | None,
) -> Tensor:
    """Return [B, d] the variance by joint inclusion; NaN where the beam does not tell it.

    The other arguments are those of ``Design.variance``.
    """
    log_pair = drawn.log_prob[:, :, None] + drawn.log_prob[:, None, :]
    if log_norm is not None:
        log_pair = log_pair - 2 * log_norm[:, None, None]
    both = drawn.present[:, :, None] & drawn.present[:, None, :]
    ratio = torch.where(both, log_pair - joint_log_inclusion, -math.inf).exp()
    square = torch.einsum("bij,bid,bjd->bd", ratio, values, values)
    variance = (weight[..., None] * values).sum(1).square() - square
    # Where every pick was certain, the difference of the two is rounding error.
    magnitude = torch.einsum("bij,bid,bjd->bd", ratio, values.abs(), values.abs())
    variance = torch.where(variance.abs() < 1e-12 * magnitude, 0.0, variance)
    if log_norm is None:
        return variance
    return torch.where((ratio.sum((1, 2)) >= 0.5)[:, None], variance, math.nan)
