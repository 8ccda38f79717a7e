"""The variance of an estimate, estimated from a single beam.

The estimate is G = Σ_{y ∈ Y} w(y) f(y), and its error is random only through the beam Y.

**By joint inclusion.** With the joint inclusion probabilities π(y, y') along the path,

    G² − Σ_{y, y' ∈ Y} p(y) p(y') / π(y, y') · f(y) f(y')

is an unbiased estimate of Var G if every two sequences can be in a beam together, because the
double sum is then unbiased for (E f)² (Horvitz and Thompson, 1952). It can come out negative; there
is then no standard error. A calibrated step that has a single place left for light candidates never
picks two of them; for f ≥ 0 the estimate is then too large.

Normalised estimates use the same formula with f − G in the place of f and w / Σ w in the place of w
(linearisation). That relies on Σ p p' / π(y, y'), whose expectation is one and which estimates the
square of Σ w: where it is less than half of (Σ w)², the pairs in the beam say too little, and no
variance is given.

**By successive differences.** A systematic sample has no joint inclusion probabilities to go by:
most pairs can never be drawn together. But its picks are spread along an order, here that of the
tree of prefixes, so that neighbours come from neighbouring strata. With t_1, …, t_m the terms w f
of the picks that were left to chance, in that order,

    v = m / (2 (m − 1)) · Σ_i (t_i − t_{i+1})²                         (Wolter, 2007, chapter 8)

is the variance of m independent picks if neighbours differ as much as any two, and smaller where
neighbours resemble each other, as the real variance is. A step of f between two branches counts
½, more than the rounding of one systematic step can add (at most ¼), but rounding adds up over
steps: for an event decided by a prefix v can be too large or too small. So events are treated in
another way where the search has kept what is needed (``cpsbs.designs.rounding``). As a quadratic
form in independent normal picks v has 2 (m − 1)² / (3 m − 4) degrees of freedom.

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
    def sequences(self) -> Tensor:
        """[B, K, T] the tokens, padded after the end."""
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

    @property
    def trace(self) -> Tensor | None:
        """[B, K, T, n] the state that ``Design.trace`` names, for every step, if it was kept."""
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


def difference_variance(
    drawn: DrawnSequences, chance: Tensor, weight: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Return [B, d] the variance by successive differences, and [B] its degrees of freedom.

    A single pick that was left to chance has no neighbour among its like, and is compared with the
    certain sequences before and after it instead. Those are no sample, so that this is no more than
    a scale of how much f varies there. The variance is zero where all that is compared agrees. It
    is a quadratic form in f, so that covariances follow from it.

    Args:
        drawn: the beams.
        chance: [B, K] which of the sequences were left to chance; the others were certain.
        weight: as for ``Design.variance``.
        values: as for ``Design.variance``.
    """
    order = tree_order(drawn.sequences, drawn.present)
    present, chance = drawn.present.gather(1, order), chance.gather(1, order)
    weight = weight.gather(1, order)[..., None]
    values = values.gather(1, order[..., None].expand_as(values))
    count = chance.sum(1)
    # The picks that were left to chance first, in the order of the tree.
    first = (~chance).long().argsort(dim=1, stable=True)
    terms = (weight * values).gather(1, first[..., None].expand_as(values))
    place = torch.arange(1, terms.shape[1], device=terms.device)
    pair = (place < count[:, None])[..., None]
    total = (pair * terms.diff(dim=1).square()).sum(1)
    size = count.to(total.dtype)[:, None]
    spread = size / (2 * (size - 1).clamp(min=1)) * total
    spread = torch.where(size == 1, _from_certain(present, chance, weight, values), spread)
    freedom = 2 * (size - 1).square() / (3 * size - 4).clamp(min=1)
    freedom = torch.where(size == 0, math.inf, freedom.clamp(min=1))
    return spread, freedom[:, 0].cpu()


def _from_certain(present: Tensor, chance: Tensor, weight: Tensor, values: Tensor) -> Tensor:
    """Return [B, d] Σ w² (f − f')² over picks left to chance, averaged over neighbours f'.

    The neighbours of a pick are the certain sequences before and after it in the order of the tree.
    """
    certain = present & ~chance
    gap = values.diff(dim=1).square()
    before = torch.nn.functional.pad(gap, (0, 0, 1, 0))
    after = torch.nn.functional.pad(gap, (0, 0, 0, 1))
    has_before = torch.nn.functional.pad(certain[:, :-1], (1, 0))[..., None]
    has_after = torch.nn.functional.pad(certain[:, 1:], (0, 1))[..., None]
    mean = (has_before * before + has_after * after) / (has_before.int() + has_after).clamp(min=1)
    return (chance[..., None] * weight.square() * mean).sum(1)


def tree_order(sequences: Tensor, present: Tensor) -> Tensor:
    """Return [B, K] the places of the sequences in lexicographic order, empty places last.

    In that order the sequences with a common prefix stand together, as in the tree of prefixes.
    """
    order = torch.arange(sequences.shape[1], device=sequences.device).expand(present.shape)
    for token in sequences.unbind(-1)[::-1]:
        order = order.gather(1, token.gather(1, order).argsort(dim=1, stable=True))
    return order.gather(1, (~present).long().gather(1, order).argsort(dim=1, stable=True))


def effective_freedom(terms: Tensor) -> Tensor:
    """Return [B] the degrees of freedom of sums of terms [B, K, d] ≥ 0, after Satterthwaite.

    Those are (Σ a)² / Σ a², the number of equal terms that would be as good; of several sums the
    smallest counts. They are infinite where all terms are zero.
    """
    total, square = terms.sum(1).square(), terms.square().sum(1)
    found = torch.where(square > 0, total / square, math.inf)
    return found.amin(-1).clamp(min=1).cpu()
