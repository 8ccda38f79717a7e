"""Inclusion probabilities to aim at: in proportion to what a candidate is worth now, at most one.

A hypothesis that survived with probability Π π counts u = p / Π π in the estimate. A step is to
keep K candidates. Of all ways to do so without bias the expected sum of the squared weights is
smallest if

    π_n = min(1, c u_n) ,      Σ_n π_n = K                          (Fearnhead and Clifford, 2003)

*heavy* candidates, u ≥ 1/c, are certain and keep their weight, and every *light* one that is picked
weighs 1/c. Splitting a hypothesis into its extensions never makes Σ min(1, c u) smaller. So, in a
design that meets the targets exactly, c never grows from step to step, and a sequence of T steps is
in the beam with probability min(1, c_T p).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cpsbs.conditional_poisson.population import finite_or_zero
from cpsbs.scores.candidates import Candidates

FORBIDDEN = 1e12
"""Difference of log-probabilities beyond which float64 no longer holds four digits of log c."""


@dataclass(frozen=True)
class Targets:
    """The inclusion probabilities to aim at, for R sources with P parents and V tokens each.

    What a candidate is worth is given relative to the K-th largest: e^{log u − reference}.
    """

    offset: Tensor
    """[R, P] log u of a candidate is its score plus this."""
    reference: Tensor
    """[R] the K-th largest log u."""
    index: Tensor
    """[R, K] the K largest candidates, descending."""
    worth: Tensor
    """[R, K] what they are worth, relative."""
    heavy: Tensor
    """[R] how many of them are certain."""
    scale: Tensor
    """[R] c, relative."""
    chunk_sums: Tensor
    """[R, P, C] what chunks of the other candidates are worth, relative."""
    chunk: int
    """How many tokens a chunk has."""
    few: Tensor
    """[R] sources with no more than K candidates, whose targets mean nothing."""

    @property
    def log_scale(self) -> Tensor:
        """[R] log c."""
        return self.scale.log() - self.reference


def find_targets(candidates: Candidates, k: int) -> Targets:
    """For sources with more than K candidates; ``few`` says which have not.

    Everything but the K largest is light, because c u < 1 for all but K of them; how many of those
    K are heavy is seen from the sums of what is left without them, each from smallest to largest,
    so that no digits are lost where a few candidates have nearly all the weight.
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
    worth = (values - reference[:, None]).clamp_(max=700.0).exp_()
    rest = chunk_sums.sum((1, 2))
    # left[:, h] is worth all but the h largest.
    left = worth.flip(-1).cumsum(-1).flip(-1) + rest[:, None].clamp(min=2.0**-1000)
    count = torch.arange(k, 0, -1, dtype=worth.dtype, device=worth.device)
    light = worth * count < left
    heavy = light.long().cumsum(-1).eq(0).sum(-1)
    scale = (count / left).gather(-1, heavy.clamp(max=k - 1)[:, None])[:, 0]
    # Tokens that a model forbids by a large negative number count as none.
    few = (rest == 0) | (values[:, 0] - values[:, -1] > FORBIDDEN)
    return Targets(offset, reference, index, worth, heavy, scale, chunk_sums, chunk, few)
