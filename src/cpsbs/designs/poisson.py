"""Conditional Poisson sampling at every step: the paper's CPSBS."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from cpsbs.designs.base import Candidates, Design, Selection
from cpsbs.designs.conditional_poisson import ConditionalPoisson
from cpsbs.randomness import Streams


class ConditionalPoissonDesign(Design):
    """K candidates with probability proportional to the product of their weights (eq:q).

    Args:
        weights: "odds", the paper's w = p/(1 − p), or "probability", w = p, with which K = 1 is
            ancestral sampling.
        anneal: w ↦ w^{1/τ}; 0 is beam search.
    """

    name = "conditional-poisson"

    def __init__(
        self, weights: Literal["odds", "probability"] = "odds", anneal: float = 1.0
    ) -> None:
        self.weights = weights
        self.anneal = anneal

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        """Pick; a source with no more than K candidates keeps them all."""
        log_p = candidates.log_joint()
        few = (log_p > -math.inf).sum(-1) <= k
        if not bool(few.any()):
            return self._draw(log_p, k, streams, joint)
        kept = _everything(log_p, k, joint)
        rows = (~few).nonzero()[:, 0]
        if len(rows) == 0:
            return kept
        drawn = self._draw(log_p[rows], k, streams.select(rows), joint)
        pairs, drawn_pairs = kept.joint_log_inclusion, drawn.joint_log_inclusion
        if pairs is not None and drawn_pairs is not None:
            pairs = pairs.index_copy(0, rows, drawn_pairs)
        assert kept.log_inclusion is not None
        assert drawn.log_inclusion is not None
        return Selection(
            index=kept.index.index_copy(0, rows, drawn.index),
            present=kept.present.index_copy(0, rows, drawn.present),
            log_inclusion=kept.log_inclusion.index_copy(0, rows, drawn.log_inclusion),
            joint_log_inclusion=pairs,
        )

    def _draw(self, log_p: Tensor, k: int, streams: Streams, joint: bool) -> Selection:
        design = ConditionalPoisson.from_log_probs(log_p, k, self.weights, self.anneal)
        index = design.sample((), streams.generator)
        return Selection(
            index=index,
            present=torch.ones_like(index, dtype=torch.bool),
            log_inclusion=design.log_inclusion_of(index),
            joint_log_inclusion=design.joint_log_inclusion(index) if joint else None,
        )


def _everything(log_p: Tensor, k: int, joint: bool) -> Selection:
    """All candidates, where there are no more than K; each is certain to be picked."""
    k_here = min(k, log_p.shape[-1])
    values, index = log_p.topk(k_here, dim=-1)
    missing = (0, k - k_here)
    present = torch.nn.functional.pad(values > -math.inf, missing)
    certain = torch.zeros_like(present, dtype=torch.float64)
    return Selection(
        index=torch.nn.functional.pad(index, missing),
        present=present,
        log_inclusion=certain,
        joint_log_inclusion=certain[..., None].expand(-1, -1, k).clone() if joint else None,
    )
