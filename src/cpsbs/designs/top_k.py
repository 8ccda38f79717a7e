"""The K most probable candidates: beam search, and greedy search for K = 1."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from cpsbs.designs.base import Design
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Candidates, Selection


@dataclass(frozen=True, repr=False, eq=False)
class TopK(Design):
    """Beam search (eq:beam_subset). Nothing is random, and nothing is known of inclusion."""

    name = "top-k"
    summary = "beam search; nothing is random"
    estimates = False

    def recordable(self, k: int) -> bool:
        """Return True: a selection never synchronises with the host."""
        return True

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        """The K candidates with the largest probability."""
        here = min(k, candidates.shape[1] * candidates.shape[2])
        values, index = candidates.chunks.largest(candidates.offset, here)
        missing = (0, k - here)
        return Selection(pad(index, missing), pad(values > -math.inf, missing))


def largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """[B, K] the largest of the values [B, N] and their places; -inf where N is less than K."""
    here = min(k, values.shape[-1])
    top = torch.topk(values, here, dim=-1)
    return pad(top.values, (0, k - here), value=-math.inf), pad(top.indices, (0, k - here))
