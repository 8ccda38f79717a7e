"""Gumbel top-k at every step: stochastic beam search (Kool, van Hoof and Welling, 2019).

Give every complete sequence y the score G_y = log p(y) + standard Gumbel noise. The K sequences
with the largest scores are then a sample from p without replacement: the same as drawing one after
the other, each in proportion to p among those that are left.

There are too many sequences to score them all, but the largest score below a prefix has a known
law, a Gumbel located at the log-probability of the prefix. So the scores are drawn from the root of
the tree downwards: the scores of the children of a prefix are drawn given that the largest of them
equals the prefix's own. All but the K best branches can be dropped at every step.

The dropped branches also tell the *threshold* κ, the (K+1)-th largest score of all sequences: it is
the largest score that was ever dropped. Given the threshold that a sequence y has to beat, y is in
the sample with probability

    q(y) = P(G_y > κ) = 1 − exp(−exp(log p(y) − κ)) ,

and Σ_{y ∈ Y} p(y)/q(y) f(y) is an unbiased estimate of E f (after priority sampling; Duffield, Lund
and Thorup, 2007).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cpsbs.designs.base import Design
from cpsbs.designs.top_k import largest
from cpsbs.designs.variance import DrawnSequences, effective_freedom, infinite_freedom
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Candidates, Selection


@dataclass(frozen=True, repr=False, eq=False)
class GumbelTopK(Design):
    """Stochastic beam search: a sample without replacement by perturbed log-probabilities."""

    name = "gumbel-top-k"
    summary = "stochastic beam search: sampling without replacement by perturbed log-probabilities"

    def begin(self, k: int, streams: Streams, sources: Tensor) -> Mapping[str, Tensor]:
        """Return the largest score of all sequences, a standard Gumbel, and no threshold yet."""
        score = _gumbel(streams.uniform(sources, (1,)))
        return {"score": score, "threshold": torch.full_like(score, -math.inf)}

    def recordable(self, k: int) -> bool:
        """Return True, because selecting never synchronises with the host."""
        return True

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        """Pick the K candidates with the largest scores."""
        fused = candidates.chunks.backend.select_gumbel_top_k(candidates, k, streams)
        return self._by_torch(candidates, k, streams) if fused is None else fused

    def _by_torch(self, candidates: Candidates, k: int, streams: Streams) -> Selection:
        """Pick them in torch, as the reference for faster backends."""
        chunks, (sources, parents, tokens) = candidates.chunks, candidates.shape
        row = torch.arange(sources, device=candidates.log_prob.device)
        each = chunks.log_masses.shape[-1]
        # Chunks of tokens are a level of the tree of their own: the largest score in a chunk is a
        # Gumbel located at the log of the chunk's mass. The K + 1 largest scores of tokens lie in
        # the K + 1 chunks whose scores are largest.
        noise = _gumbel(streams.uniform(row, (parents, each)))
        score = chunks.log_masses + candidates.offset[..., None] + noise
        score = _given_maximum(score, candidates.state["score"][..., None])
        values, chosen = largest(score.flatten(1), k + 1)
        start, below = chunks.members(row[:, None], chosen)
        top = (chunks.peaks + candidates.offset[..., None]).flatten(1).gather(-1, chosen)
        log_p = below + top[..., None]
        noise = _gumbel(streams.uniform(row, log_p.shape[1:]))
        if tokens % chunks.length:
            # The noise of a token must not depend on where its chunk begins.
            step = torch.arange(chunks.width, device=row.device)
            noise = noise.gather(-1, ((start % tokens)[..., None] + step) % chunks.length)
        score = log_p + noise
        score = _given_maximum(score, values[..., None])
        values, place = largest(score.flatten(1), k + 1)
        index = chunks.candidate_at(start, place)
        threshold = torch.maximum(candidates.state["threshold"][:, :1], values[:, k:])
        return Selection(
            index=index[:, :k],
            present=values[:, :k] > -math.inf,
            state={"score": values[:, :k], "threshold": threshold.expand(sources, k)},
        )

    def log_inclusion_at(
        self, candidates: Candidates, k: int, index: Tensor, selection: Selection
    ) -> Tensor | None:
        """Return [B, n] log q of prefixes: how likely each was to beat the threshold so far."""
        return _log_above(candidates.log_prob_of(index), selection.state["threshold"][:, :1])

    def log_weight(
        self, log_prob: Tensor, log_inclusion: Tensor | None, state: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return log q(y), given the threshold, and log p(y)/q(y)."""
        log_q = _log_above(log_prob, state["threshold"])
        return log_q, log_prob - log_q

    def variance(
        self, drawn: DrawnSequences, weight: Tensor, values: Tensor, log_norm: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Return Σ (w f)² (1 − q), because the terms w f are uncorrelated given the threshold.

        Few terms may make up most of the sum, so that it has the degrees of freedom of its terms
        (``effective_freedom``). With K = 1 the variance is infinite, and no beam tells it.
        """
        if drawn.log_inclusion is None or drawn.k == 1:
            return None, infinite_freedom(weight)
        excluded = torch.where(drawn.present, -torch.expm1(drawn.log_inclusion), 0.0)
        terms = excluded[..., None] * (weight[..., None] * values).square()
        # The residuals of a ratio are from the same K sequences that the ratio was fitted to.
        scale = 1.0 if log_norm is None else drawn.k / (drawn.k - 1)
        return scale * terms.sum(1), effective_freedom(terms)


def _log_above(log_prob: Tensor, threshold: Tensor) -> Tensor:
    """Return log q, the log-probability that a Gumbel located at log p is above the threshold."""
    excess = log_prob - threshold
    log_q = (-torch.expm1(-excess.exp())).log()
    return torch.where(excess < -36, excess, log_q)  # 1 − exp(−x) = x for small x


def _gumbel(uniform: Tensor) -> Tensor:
    """Return standard Gumbel variates made from uniform ones in [0, 1)."""
    return -(-torch.log1p(-uniform)).clamp_(min=2.0**-60).log_()


def _given_maximum(score: Tensor, maximum: Tensor) -> Tensor:
    """Return [..., V] the Gumbel scores given that the largest of them is ``maximum`` [..., 1].

    That is −log(e^{−T} − e^{−Z} + e^{−G}) for T = maximum and Z = max G, in the stable form of Kool
    et al.'s appendix: with v = T − G + log(1 − e^{G − Z}) it is T − max(0, v) − log(1 + e^{−|v|}).
    """
    largest_score = score.amax(-1, keepdim=True)
    gap = score - largest_score
    v = maximum - score + torch.where(gap < 0, (-torch.expm1(gap)).log(), -math.inf)
    moved = maximum - v.clamp(min=0) - torch.log1p((-v.abs()).exp())
    return torch.where(score == -math.inf, -math.inf, moved)
