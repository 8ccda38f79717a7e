"""Ancestral sampling: K independent samples, token by token.

Each of K rows starts from its own copy of the empty sequence and draws its next token from the
model's conditional distribution, whatever the other rows do, so that each is a sample from p. The
mean of f over the rows is the Monte Carlo estimate of E f, with weights of 1/K. Sequences may
repeat, and often do where the distribution is peaked: that is what the other designs avoid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cpsbs.designs.base import Design
from cpsbs.designs.variance import DrawnSequences, infinite_freedom
from cpsbs.randomness import BELOW_ONE, Streams
from cpsbs.scores.candidates import Candidates, Selection


@dataclass(frozen=True, repr=False, eq=False)
class Independent(Design):
    """K independent samples, each with the weight 1/K."""

    name = "independent"
    summary = "ancestral sampling: K independent samples, which may repeat"
    distinct = False

    def roots(self, k: int) -> int:
        """Return K, because each row starts from its own empty sequence."""
        return k

    def recordable(self, k: int) -> bool:
        """Return True, because selecting never synchronises with the host."""
        return True

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        """Draw one token for each row from its conditional distribution."""
        row = torch.arange(len(candidates.log_prob), device=candidates.log_prob.device)
        token, _, _ = invert(candidates, streams.uniform(row, (k,)))
        return one_each(candidates, token)

    def log_inclusion_at(
        self, candidates: Candidates, k: int, index: Tensor, selection: Selection
    ) -> Tensor | None:
        """Return [B, n] log p(token | parent), with which the row of the parent draws the token."""
        parent = candidates.parent_of(index)
        return candidates.chunks.take_along(index) - candidates.log_total.gather(-1, parent)

    def log_weight(
        self, log_prob: Tensor, log_inclusion: Tensor | None, state: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return no inclusion probability, and the weight 1/K."""
        return None, torch.full_like(log_prob, -math.log(log_prob.shape[-1]))

    def variance(
        self, drawn: DrawnSequences, weight: Tensor, values: Tensor, log_norm: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Return the sample variance over K, with K − 1 degrees of freedom."""
        freedom = infinite_freedom(weight)
        if drawn.k == 1:
            return None, freedom
        spread = (weight[..., None] * values).var(1) * drawn.k
        return spread, torch.full_like(freedom, float(drawn.k - 1))


def one_each(
    candidates: Candidates, token: Tensor, state: Mapping[str, Tensor] | None = None
) -> Selection:
    """Return the selection that extends each row by its token [B, K]."""
    row = torch.arange(token.shape[-1], device=token.device)
    index = row * candidates.shape[-1] + token
    return Selection(index, torch.ones_like(index, dtype=torch.bool), state=state or {})


def invert(candidates: Candidates, code: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Invert the cumulative distribution of the next token after each parent.

    The tokens lie one after the other on [0, 1), in the order of the vocabulary, each on an
    interval as long as it is probable. The search is for the chunk first, then for the token in it.

    Returns:
        [B, P] the token whose interval holds the code [B, P], where that begins, and its length.
    """
    chunks, (_, parents, tokens) = candidates.chunks, candidates.shape
    share = (chunks.log_masses - candidates.log_total[..., None]).exp_()
    end = share.cumsum(-1)
    # Even when it is rounded, the level must stay below the total.
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
