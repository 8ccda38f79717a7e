"""Beam search: the K most probable candidates at every step (greedy search for K = 1).

Nothing is random, so most sequences have no chance of being picked, and the beams have no weights
for estimates. They show the most probable sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from cpsbs.backends.base import Rule
from cpsbs.designs.base import Design
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Candidates, Selection


@dataclass(frozen=True, repr=False, eq=False)
class TopK(Design):
    """Beam search: the K most probable candidates at every step (eq:beam_subset)."""

    name = "top-k"
    summary = "beam search; nothing is random"
    estimates = False

    def recordable(self, k: int) -> bool:
        """Return True, because selecting never synchronises with the host."""
        return True

    def rule(self) -> Rule:
        """Return the rule of the largest candidates."""
        return Rule("largest")

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        """Pick the K most probable candidates."""
        here = min(k, candidates.shape[1] * candidates.shape[2])
        values, index = candidates.chunks.largest(candidates.offset, here)
        missing = (0, k - here)
        return Selection(pad(index, missing), pad(values > -math.inf, missing))

    def log_inclusion_at(
        self, candidates: Candidates, k: int, index: Tensor, selection: Selection
    ) -> Tensor | None:
        """Return [B, n] 0 for the candidates that were picked, and -inf for all others."""
        return log_picked(index, selection)


def log_picked(index: Tensor, selection: Selection) -> Tensor:
    """Return [B, n] log π of a design in which nothing is random: π is 0 or 1."""
    same = index[..., None] == selection.index[:, None, :]
    picked = (same & selection.present[:, None, :]).any(-1)
    return torch.where(picked, 0.0, -math.inf).to(torch.float64)


def largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return [B, K] the largest of the values [B, N] and their indices; -inf where N < K."""
    here = min(k, values.shape[-1])
    top = torch.topk(values, here, dim=-1)
    return pad(top.values, (0, k - here), value=-math.inf), pad(top.indices, (0, k - here))
