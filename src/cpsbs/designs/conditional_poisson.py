"""Conditional Poisson sampling at every step: the paper's CPSBS."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cpsbs.backends.base import MOST_DRAWN, Backend
from cpsbs.conditional_poisson.distribution import ConditionalPoisson
from cpsbs.conditional_poisson.draws import draw
from cpsbs.conditional_poisson.inclusion import joint_log_inclusion_at, log_inclusion_at
from cpsbs.conditional_poisson.population import split
from cpsbs.conditional_poisson.weights import CandidateWeights, PlainWeights, Weights
from cpsbs.designs.drawing import DrawingDesign
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Candidates, Selection


@dataclass(frozen=True, repr=False, eq=False)
class ConditionalPoissonDesign(DrawingDesign):
    """K candidates with probability proportional to the product of their weights (eq:q).

    Args:
        weights: "odds", the paper's w = p/(1 − p), or "probability", w = p, with which K = 1 is
            ancestral sampling.
        anneal: w ↦ w^{1/τ}; 0 is beam search.
    """

    name = "conditional-poisson"
    summary = "the paper's CPSBS: conditional Poisson sampling at every step"
    power_sums = 4
    needs_joint = True

    weights: Literal["odds", "probability"] = "odds"
    anneal: float = 1.0

    def __post_init__(self) -> None:
        if self.weights not in ("odds", "probability"):
            raise ValueError(f'weights is {self.weights!r}; allowed are "odds" and "probability"')
        if not isinstance(self.anneal, int | float) or not 0 <= self.anneal < math.inf:
            raise ValueError(f"anneal is {self.anneal!r}; allowed are finite numbers from 0 on")

    def recordable(self, k: int) -> bool:
        """Return whether a backend can draw without a look at what it draws."""
        return self.anneal == 1.0 and k <= MOST_DRAWN

    def draw(self, candidates: Candidates, k: int, streams: Streams, joint: bool) -> Selection:
        """A conditional Poisson sample."""
        weights = self.candidate_weights(candidates, k)
        return draw_poisson(weights, k, streams, joint, candidates.chunks.backend)

    def log_weight(
        self, log_prob: Tensor, log_inclusion: Tensor | None, state: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """None without randomness: then most sequences have no chance, and no weight makes up."""
        if self.anneal == 0:
            return None, None
        return super().log_weight(log_prob, log_inclusion, state)

    def candidate_weights(self, candidates: Candidates, k: int) -> Weights:
        """The weights of the candidates."""
        if self.anneal == 1.0:
            odds = self.weights == "odds"
            return CandidateWeights(candidates.chunks, candidates.offset, odds)
        log_p = candidates.log_joint()
        design = ConditionalPoisson.from_log_probs(log_p, k, self.weights, self.anneal)
        return PlainWeights(design.log_weights)


def draw_poisson(
    weights: Weights, k: int, streams: Streams, joint: bool, backend: Backend
) -> Selection:
    """Return a conditional Poisson sample, with its inclusion probabilities."""
    fused = None if joint else backend.draw_conditional_poisson(weights, k, streams)
    if fused is not None:
        return fused
    with torch.inference_mode():
        population = split(weights, k, "the model's scores")
        index = draw(population, 1, streams)[0]
        row = torch.arange(len(index), device=index.device)[:, None]
        y = population.relative(weights.take(row, index))
        log_inclusion = log_inclusion_at(population, y)
        pairs = joint_log_inclusion_at(population, y) if joint else None
    return Selection(
        index=index.clone(),
        present=torch.ones(index.shape, dtype=torch.bool, device=index.device),
        log_inclusion=log_inclusion.clone(),
        joint_log_inclusion=None if pairs is None else pairs.clone(),
    )
