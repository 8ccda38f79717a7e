"""Conditional Poisson sampling at every step: the paper's CPSBS.

Give each of the N candidates a weight w_n, toss an independent coin for each with the odds w_n, and
start again until exactly K coins show heads. The set of these K candidates is a conditional Poisson
sample: a set Y has a probability proportional to the product of its weights,

    Q(Y) = Π_{n ∈ Y} w_n / Z ,      Z = Σ_{|Y| = K} Π_{n ∈ Y} w_n                           (eq:q)

``cpsbs.conditional_poisson`` scales the weights so that about √K attempts are enough, and computes
the inclusion probabilities π_n = P(n ∈ Y) to rounding error. Of all designs with exactly K picks
and the same inclusion probabilities it has the largest entropy (Chen, Dempster and Liu, 1994). The
paper takes the odds of the candidate's probability, w = p/(1 − p).

With π_t the inclusion probability of the prefix of y at step t, the weight w(y) = p(y) / Π_t π_t is
unbiased: P(path) / Π_t π_t is the law of the search that is forced to keep y, which sums to one
over the paths. These weights vary widely where the model has much entropy, because a step ignores
how lucky a prefix was to survive the steps before; ``calibrated`` and ``stratified`` take that into
account.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cpsbs.backends.base import MOST_DRAWN, Backend, Rule
from cpsbs.conditional_poisson.distribution import ConditionalPoisson
from cpsbs.conditional_poisson.population import Population, split
from cpsbs.conditional_poisson.sampling import draw, joint_log_inclusion_at, log_inclusion_at
from cpsbs.conditional_poisson.weights import CandidateWeights, PlainWeights, Weights
from cpsbs.designs.base import DrawingDesign
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Candidates, Selection


@dataclass(frozen=True, repr=False, eq=False)
class ConditionalPoissonDesign(DrawingDesign):
    """Conditional Poisson sampling: K candidates, in proportion to the product of weights (eq:q).

    Args:
        weights: "odds" for the paper's w = p/(1 − p), or "probability" for w = p, with which K = 1
            is ancestral sampling.
        anneal: the temperature of the design, not of the model: weights are raised to the power
            1/anneal. The limit 0 is beam search, whose beams have no weights for estimates.
    """

    name = "conditional-poisson"
    summary = "the paper's CPSBS: conditional Poisson sampling at every step"
    power_sums = 4
    needs_joint = True

    weights: Literal["odds", "probability"] = "odds"
    anneal: float = 1.0

    def __post_init__(self) -> None:
        if self.weights not in ("odds", "probability"):
            raise ValueError(f'weights is {self.weights!r}; it must be "odds" or "probability"')
        if not isinstance(self.anneal, int | float) or not 0 <= self.anneal < math.inf:
            raise ValueError(f"anneal is {self.anneal!r}; it must be a finite number of at least 0")

    def recordable(self, k: int) -> bool:
        """Return whether a backend can draw without synchronising with the host."""
        return self.anneal == 1.0 and k <= MOST_DRAWN

    def rule(self) -> Rule | None:
        """Return the rule of conditional Poisson sampling, or None with annealing."""
        if self.anneal != 1.0:
            return None
        return Rule("conditional-poisson", odds=self.weights == "odds")

    def draw(self, candidates: Candidates, k: int, streams: Streams, joint: bool) -> Selection:
        """Draw a conditional Poisson sample."""
        weights = self.candidate_weights(candidates, k)
        return draw_poisson(weights, k, streams, joint, candidates.chunks.backend)

    def drawn_log_inclusion(self, candidates: Candidates, k: int, index: Tensor) -> Tensor:
        """Return [B, n] log π, exactly."""
        return poisson_log_inclusion(self.candidate_weights(candidates, k), k, index)

    def log_weight(
        self, log_prob: Tensor, log_inclusion: Tensor | None, state: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the weights p / Π_t π_t, or None for anneal=0, where most sequences have π = 0."""
        if self.anneal == 0:
            return None, None
        return super().log_weight(log_prob, log_inclusion, state)

    def candidate_weights(self, candidates: Candidates, k: int) -> Weights:
        """Return the design weights of the candidates."""
        if self.anneal == 1.0:
            odds = self.weights == "odds"
            return CandidateWeights(candidates.chunks, candidates.offset, odds)
        log_p = candidates.log_joint()
        design = ConditionalPoisson.from_log_probs(log_p, k, self.weights, self.anneal)
        return PlainWeights(design.log_weights)


def draw_poisson(
    weights: Weights, k: int, streams: Streams, joint: bool, backend: Backend
) -> Selection:
    """Return a conditional Poisson sample with its inclusion probabilities."""
    fused = None if joint else backend.draw_conditional_poisson(weights, k, streams)
    if fused is not None:
        return fused
    with torch.inference_mode():
        population = split(weights, k, "the model's scores")
        index = draw(population, 1, streams)[0]
        y = _relative(population, weights, index)
        log_inclusion = log_inclusion_at(population, y)
        pairs = joint_log_inclusion_at(population, y) if joint else None
    return Selection(
        index=index.clone(),
        present=torch.ones(index.shape, dtype=torch.bool, device=index.device),
        log_inclusion=log_inclusion.clone(),
        joint_log_inclusion=None if pairs is None else pairs.clone(),
    )


def poisson_log_inclusion(weights: Weights, k: int, index: Tensor) -> Tensor:
    """Return [B, n] the log inclusion probabilities of candidates in a conditional Poisson sample.

    Raises:
        TooFewError: if some sources have no more than K candidates.
    """
    with torch.inference_mode():
        population = split(weights, k, "the model's scores")
        return log_inclusion_at(population, _relative(population, weights, index)).clone()


def _relative(population: Population, weights: Weights, index: Tensor) -> Tensor:
    """Return [B, n] the log-weights of candidates, relative to their reference."""
    row = torch.arange(len(index), device=index.device)[:, None]
    return population.relative(weights.take(row, index))
