"""Independent draws, each row by itself: ancestral sampling.

Sequences may repeat. Nothing is dropped, so K rows start from K copies of the empty sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cpsbs.designs.base import Design
from cpsbs.designs.variance import ROUNDING, Drawn, no_freedom, weighted
from cpsbs.randomness import BELOW_ONE, Streams
from cpsbs.scores.candidates import Candidates, Selection


@dataclass(frozen=True, repr=False, eq=False)
class Independent(Design):
    """K independent samples; each counts 1/K."""

    name = "independent"
    summary = "ancestral sampling: K independent samples, which may repeat"
    distinct = False

    def roots(self, k: int) -> int:
        """Every row starts by itself."""
        return k

    def recordable(self, k: int) -> bool:
        """Return True: a selection never synchronises with the host."""
        return True

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        """One token for each row, by its conditional distribution."""
        row = torch.arange(len(candidates.log_prob), device=candidates.log_prob.device)
        token, _, _ = invert(candidates, streams.uniform(row, (k,)))
        return one_each(candidates, token)

    def log_weight(
        self, log_prob: Tensor, log_inclusion: Tensor | None, state: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """No inclusion probability; 1/K."""
        return None, torch.full_like(log_prob, -math.log(log_prob.shape[-1]))

    def variance(
        self, beams: Drawn, weight: Tensor, values: Tensor, unit: Tensor, scale: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Return the variance of the K samples over K, with K − 1 degrees of freedom."""
        freedom = no_freedom(weight)
        if beams.k == 1:
            return None, freedom
        terms = weighted(weight, values, scale)
        # Independent samples that all agree do not tell how often they would not.
        spread = terms.var(1) * beams.k
        spread = torch.where(spread > ROUNDING * terms.sum(1).square(), spread, math.nan)
        return spread, torch.full_like(freedom, float(beams.k - 1))


def one_each(
    candidates: Candidates, token: Tensor, state: Mapping[str, Tensor] | None = None
) -> Selection:
    """Each row extended by its token [B, K]."""
    row = torch.arange(token.shape[-1], device=token.device)
    index = row * candidates.shape[-1] + token
    return Selection(index, torch.ones_like(index, dtype=torch.bool), state=state or {})


def invert(candidates: Candidates, code: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, P] the token whose stretch of [0, 1) holds the code [B, P], where it begins, its length.

    Stretches are as long as the tokens are probable, in the order of the vocabulary: first the
    stretch of a chunk is found, then that of the token in it.
    """
    chunks, (_, parents, tokens) = candidates.chunks, candidates.shape
    share = (chunks.log_masses - candidates.log_total[..., None]).exp_()
    end = share.cumsum(-1)
    # Rounded, a level must stay below the total.
    level = code[..., None] * end[..., -1:] * BELOW_ONE
    chunk = torch.searchsorted(end, level, right=True)
    mass = share.gather(-1, chunk)
    begin = end.gather(-1, chunk) - mass
    parent = torch.arange(parents, device=code.device)
    number = parent * share.shape[-1] + chunk[..., 0]
    row = torch.arange(len(code), device=code.device)[:, None]
    first, below = chunks.members(row, number)
    inside = below.softmax(-1)
    until = inside.cumsum(-1)
    level = ((level - begin) / mass).clamp_(0.0, 1.0) * until[..., -1:] * BELOW_ONE
    place = torch.searchsorted(until, level, right=True)
    length = inside.gather(-1, place) * mass
    start = begin + (until.gather(-1, place) - inside.gather(-1, place)) * mass
    token = first - parent * tokens + place[..., 0]
    return token, start[..., 0], length[..., 0]
