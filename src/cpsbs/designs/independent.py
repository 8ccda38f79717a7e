"""Independent draws, each row by itself: ancestral sampling.

Sequences may repeat. Nothing is dropped, so K rows start from K copies of the empty sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from cpsbs.designs.base import Candidates, Design, Selection
from cpsbs.randomness import Streams


class Independent(Design):
    """K independent samples; each counts 1/K."""

    name = "independent"
    summary = "ancestral sampling: K independent samples, which may repeat"
    distinct = False

    def roots(self, k: int) -> int:
        """Every row starts by itself."""
        return k

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        """One token for each row, by its conditional distribution."""
        row = torch.arange(len(candidates.scores), device=candidates.scores.device)
        token, _, _ = invert(candidates, streams.uniform(row, (k,)))
        return one_each(candidates, token)

    def log_weight(
        self, log_prob: Tensor, log_inclusion: Tensor | None, state: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """No inclusion probability; 1/K."""
        return None, torch.full_like(log_prob, -math.log(log_prob.shape[-1]))


def one_each(
    candidates: Candidates, token: Tensor, state: Mapping[str, Tensor] | None = None
) -> Selection:
    """Each row extended by its token [B, K]."""
    row = torch.arange(token.shape[-1], device=token.device)
    index = row * candidates.scores.shape[-1] + token
    return Selection(index, torch.ones_like(index, dtype=torch.bool), state=state or {})


def invert(candidates: Candidates, code: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, P] the token whose stretch of [0, 1) holds the code [B, P], where it begins, its length.

    Stretches are as long as the tokens are probable, in the order of the vocabulary.
    """
    p = candidates.log_conditional().exp_()
    end = p.cumsum(-1)
    # Rounded, the level must stay below the total.
    level = code[..., None] * end[..., -1:] * (1 - 2.0**-52)
    token = torch.searchsorted(end, level, right=True)
    length = p.gather(-1, token)
    start = end.gather(-1, token) - length
    return token[..., 0], start[..., 0], length[..., 0]
