"""Target inclusion probabilities: in proportion to the weight of a candidate, and at most one.

A hypothesis with probability p that survived the steps so far with probability Π π has the weight
u = p / Π π in an estimate. A step must reduce N candidates of weights u_n to K. Of all ways to do
so without bias, the expected sum of the squared weights is smallest if

    π_n = min(1, c u_n) ,      Σ_n π_n = K                          (Fearnhead and Clifford, 2003)

*Heavy* candidates, u ≥ 1/c, are certainty units: they are kept and keep their weight. Every *light*
candidate that is picked gets the weight u/π = 1/c.

Replacing a hypothesis by its extensions never makes Σ min(1, c u) smaller. So, in a design that
meets the targets exactly, c never grows from step to step, and a sequence of T steps is in the beam
with probability min(1, c_T p).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cpsbs.conditional_poisson.population import finite_or_zero
from cpsbs.scores.candidates import Candidates

FORBIDDEN = 1e12
"""Candidates whose log-weight is this far below the largest count as impossible: float64 then has
fewer than four decimals for log c."""


@dataclass(frozen=True)
class Targets:
    """The target inclusion probabilities for R sources with P parents and V tokens each.

    Weights u and the factor c are relative to the K-th largest weight, e^reference, because u
    itself may be too small for a float.
    """

    offset: Tensor
    """[R, P] what is added to the score of a candidate to get log u."""
    reference: Tensor
    """[R] log u of the K-th largest candidate."""
    index: Tensor
    """[R, K] the K candidates of largest weight, in descending order."""
    largest: Tensor
    """[R, K] their weights u, relative to e^reference."""
    heavy: Tensor
    """[R] how many of them are heavy."""
    scale: Tensor
    """[R] c, relative to e^−reference: the target of a light candidate is scale times its relative
    weight."""
    chunk_sums: Tensor
    """[R, P, C] the sums of the relative weights of all other candidates, chunk by chunk."""
    chunk: int
    """The number of tokens in a chunk."""
    few: Tensor
    """[R] whether the source has no more than K candidates; its targets are then meaningless."""

    @property
    def log_scale(self) -> Tensor:
        """[R] log c."""
        return self.scale.log() - self.reference


def find_targets(candidates: Candidates, k: int) -> Targets:
    """Return the targets of sources with more than K candidates; ``few`` marks the others.

    All but the K largest candidates are light, because at most K have c u ≥ 1. How many of the K
    largest are heavy follows from the sums of the weights without them, each summed from the
    smallest to the largest, so that no digits are lost where a few candidates have nearly all the
    weight.
    """
    assert candidates.log_inclusion is not None
    sources, parents, _ = candidates.shape
    offset = candidates.offset - candidates.log_inclusion
    offset = torch.where(candidates.log_prob == -math.inf, -math.inf, offset)
    values, index = candidates.chunks.largest(offset, k)
    reference = finite_or_zero(values[:, -1])
    known = index.sort(dim=-1).values
    chunk_sums = candidates.chunks.masses(offset - reference[:, None], known, 1)[0]
    chunk_sums = chunk_sums.view(sources, parents, -1)
    chunk = candidates.chunks.length
    largest = (values - reference[:, None]).clamp_(max=700.0).exp_()
    rest = chunk_sums.sum((1, 2))
    # left[:, h] is the total weight without the h largest candidates.
    left = largest.flip(-1).cumsum(-1).flip(-1) + rest[:, None].clamp(min=2.0**-1000)
    count = torch.arange(k, 0, -1, dtype=largest.dtype, device=largest.device)
    light = largest * count < left
    heavy = light.long().cumsum(-1).eq(0).sum(-1)
    scale = (count / left).gather(-1, heavy.clamp(max=k - 1)[:, None])[:, 0]
    # Tokens that a model forbids by a large negative score do not count as candidates.
    few = (rest == 0) | (values[:, 0] - values[:, -1] > FORBIDDEN)
    return Targets(offset, reference, index, largest, heavy, scale, chunk_sums, chunk, few)
