"""Conditional Poisson sampling at every step: the paper's CPSBS."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from cpsbs.designs.base import Candidates, Design, Selection
from cpsbs.designs.conditional_poisson import ConditionalPoisson
from cpsbs.polynomials.draws import draw
from cpsbs.polynomials.inclusion import joint_log_inclusion_at, log_inclusion_at
from cpsbs.polynomials.population import TooFewError, split
from cpsbs.polynomials.weights import CandidateWeights, PlainWeights, Weights
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
        if weights not in ("odds", "probability"):
            raise ValueError(f'weights is {weights!r}; allowed are "odds" and "probability"')
        if not isinstance(anneal, int | float) or not 0 <= anneal < math.inf:
            raise ValueError(f"anneal is {anneal!r}; allowed are finite numbers from 0 on")
        self.weights: Literal["odds", "probability"] = weights
        self.anneal = anneal

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        """Pick; a source with no more than K candidates keeps them all."""
        return keep_few(candidates, k, streams, joint, self._draw)

    def log_weight(
        self, log_prob: Tensor, log_inclusion: Tensor | None, state: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """None without randomness: then most sequences have no chance, and no weight makes up."""
        if self.anneal == 0:
            return None, None
        return super().log_weight(log_prob, log_inclusion, state)

    def candidate_weights(self, candidates: Candidates, k: int) -> Weights:
        """The weights of the candidates."""
        offset = candidates.log_prob - candidates.log_total
        if self.anneal == 1.0:
            return CandidateWeights(candidates.scores, offset, odds=self.weights == "odds")
        log_p = (candidates.scores + offset[..., None]).flatten(1)
        design = ConditionalPoisson.from_log_probs(log_p, k, self.weights, self.anneal)
        return PlainWeights(design.log_weights)

    def _draw(self, candidates: Candidates, k: int, streams: Streams, joint: bool) -> Selection:
        return draw_poisson(self.candidate_weights(candidates, k), k, streams, joint)


def draw_poisson(weights: Weights, k: int, streams: Streams, joint: bool) -> Selection:
    """A conditional Poisson sample, with its inclusion probabilities."""
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


def keep_few(
    candidates: Candidates,
    k: int,
    streams: Streams,
    joint: bool,
    draw_many: Callable[[Candidates, int, Streams, bool], Selection],
) -> Selection:
    """``draw_many`` where there are more than K candidates; elsewhere, all of them."""
    log_p = CandidateWeights(
        candidates.scores, candidates.log_prob - candidates.log_total, odds=False
    )
    few = torch.ones(len(candidates.scores), dtype=torch.bool, device=log_p.device)
    if log_p.shape[1] > k:
        try:
            return draw_many(candidates, k, streams, joint)
        except TooFewError as error:
            few = error.rows  # only the first steps of a search come here
    values, index = log_p.largest(min(k, log_p.shape[1]))
    kept = _everything(values, index, k, joint)
    rows = (~few).nonzero()[:, 0]
    if len(rows) == 0:
        return kept
    return _with_rows(kept, rows, draw_many(candidates.of(rows), k, streams.select(rows), joint))


def _everything(values: Tensor, index: Tensor, k: int, joint: bool) -> Selection:
    """The largest candidates [B, ≤ K], each certain to be picked."""
    missing = (0, k - values.shape[1])
    present = pad(values > -math.inf, missing)
    certain = torch.zeros(present.shape, dtype=torch.float64, device=present.device)
    pairs = certain[..., None] + certain[:, None, :] if joint else None
    return Selection(pad(index, missing), present, certain, pairs)


def _with_rows(kept: Selection, rows: Tensor, drawn: Selection) -> Selection:
    """The first selection with these sources [b] replaced by the second one's."""

    def put(old: Tensor | None, new: Tensor | None) -> Tensor | None:
        return None if old is None or new is None else old.index_copy(0, rows, new)

    return Selection(
        index=kept.index.index_copy(0, rows, drawn.index),
        present=kept.present.index_copy(0, rows, drawn.present),
        log_inclusion=put(kept.log_inclusion, drawn.log_inclusion),
        joint_log_inclusion=put(kept.joint_log_inclusion, drawn.joint_log_inclusion),
    )
