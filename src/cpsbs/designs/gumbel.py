"""Gumbel top-k at every step: stochastic beam search (Kool, van Hoof and Welling, 2019).

Give every complete sequence y the score G_y = log p(y) + Gumbel noise; the K largest are a sample
without replacement from p. The largest score below a prefix has a known law, a Gumbel located at
the log-probability of the prefix, so the scores can be drawn from the top of the tree downwards,
each child's given that the largest of its siblings' equals the parent's, and all but K branches can
be dropped at every step.

What is dropped also tells the *threshold* κ, the (K+1)-th largest score of all sequences: it is the
largest score that was ever dropped. Given κ, sequences are in the sample independently of each
other, with probability

    q(y) = P(G_y > κ) = 1 − exp(−exp(log p(y) − κ)) ,

and Σ_y p(y)/q(y) f(y) over the sample is an unbiased estimate of E f.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cpsbs.designs.base import Design
from cpsbs.designs.top_k import largest
from cpsbs.designs.variance import Drawn, no_freedom, weighted
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Candidates, Selection


@dataclass(frozen=True, repr=False, eq=False)
class GumbelTopK(Design):
    """Stochastic beam search."""

    name = "gumbel-top-k"
    summary = "stochastic beam search: sampling without replacement by perturbed log-probabilities"

    def begin(self, k: int, streams: Streams, sources: Tensor) -> Mapping[str, Tensor]:
        """The score of the empty sequence is the largest of all: a standard Gumbel."""
        score = _gumbel(streams.uniform(sources, (1,)))
        return {"score": score, "threshold": torch.full_like(score, -math.inf)}

    def recordable(self, k: int) -> bool:
        """Return True: a selection never synchronises with the host."""
        return True

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        """The K candidates with the largest scores."""
        fused = candidates.chunks.backend.select_gumbel_top_k(candidates, k, streams)
        return self._by_torch(candidates, k, streams) if fused is None else fused

    def _by_torch(self, candidates: Candidates, k: int, streams: Streams) -> Selection:
        """The reference."""
        chunks, (sources, parents, tokens) = candidates.chunks, candidates.shape
        row = torch.arange(sources, device=candidates.log_prob.device)
        each = chunks.log_masses.shape[-1]
        # A chunk of tokens is a step of its own: its largest score is a Gumbel located at the
        # logarithm of its mass. The K + 1 largest scores lie in the chunks with the K + 1 largest.
        noise = _gumbel(streams.uniform(row, (parents, each)))
        score = chunks.log_masses + candidates.offset[..., None] + noise
        score = _given_maximum(score, candidates.state["score"][..., None])
        values, chosen = largest(score.flatten(1), k + 1)
        start, below = chunks.members(row[:, None], chosen)
        top = (chunks.peaks + candidates.offset[..., None]).flatten(1).gather(-1, chosen)
        log_p = below + top[..., None]
        noise = _gumbel(streams.uniform(row, log_p.shape[1:]))
        if tokens % chunks.length:
            # Each token has its place there, wherever its chunk begins.
            step = torch.arange(chunks.width, device=row.device)
            noise = noise.gather(-1, ((start % tokens)[..., None] + step) % chunks.length)
        score = log_p + noise
        score = _given_maximum(score, values[..., None])
        values, place = largest(score.flatten(1), k + 1)
        index = chunks.at(start, place)
        threshold = torch.maximum(candidates.state["threshold"][:, :1], values[:, k:])
        return Selection(
            index=index[:, :k],
            present=values[:, :k] > -math.inf,
            state={"score": values[:, :k], "threshold": threshold.expand(sources, k)},
        )

    def log_weight(
        self, log_prob: Tensor, log_inclusion: Tensor | None, state: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Log q(y), given the threshold, and log p(y)/q(y)."""
        excess = log_prob - state["threshold"]
        log_q = (-torch.expm1(-excess.exp())).log()
        log_q = torch.where(excess < -36, excess, log_q)  # 1 − exp(−x) = x for small x
        return log_q, log_prob - log_q

    def variance(
        self, beams: Drawn, weight: Tensor, values: Tensor, unit: Tensor, scale: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Return Σ (w f)² (1 − q): given the threshold, the terms are uncorrelated.

        With K = 1 the variance is infinite, and there is no estimate of it.
        """
        freedom = no_freedom(weight)
        if beams.log_inclusion is None or beams.k == 1:
            return None, freedom
        left = torch.where(beams.present, -torch.expm1(beams.log_inclusion), 0.0)
        spread = (left[..., None] * weighted(weight, values, scale).square()).sum(1)
        # A ratio is fitted to the same K sequences that its error is taken from.
        return spread if scale is None else spread * beams.k / (beams.k - 1), freedom


def _gumbel(uniform: Tensor) -> Tensor:
    """Standard Gumbel variates from uniform ones in [0, 1)."""
    return -(-torch.log1p(-uniform)).clamp_(min=2.0**-60).log_()


def _given_maximum(score: Tensor, maximum: Tensor) -> Tensor:
    """[..., V] Gumbel scores, shifted so that the largest of them is ``maximum`` [..., 1].

    −log(e^{−T} − e^{−Z} + e^{−G}) for T = maximum and Z = max G, in the stable form of the paper's
    appendix: with v = T − G + log(1 − e^{G − Z}) it is T − max(0, v) − log(1 + e^{−|v|}).
    """
    largest_score = score.amax(-1, keepdim=True)
    gap = score - largest_score
    v = maximum - score + torch.where(gap < 0, (-torch.expm1(gap)).log(), -math.inf)
    moved = maximum - v.clamp(min=0) - torch.log1p((-v.abs()).exp())
    return torch.where(score == -math.inf, -math.inf, moved)
