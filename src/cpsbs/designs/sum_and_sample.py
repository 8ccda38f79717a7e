"""Sum and sample: sum over the K − 1 sequences of beam search, and sample one of all the others.

    G = Σ_{y ∈ Y} p(y) f(y) + (1 − Σ_{y ∈ Y} p(y)) f(y') ,      y' ~ p given y' ∉ Y

The first term is exact, and y' stands for all that beam search has missed, so that G is unbiased
(Kool et al., 2020, compare it with stochastic beam search).

A sequence outside Y has exactly one prefix that beam search drops, at some step. So y' is drawn
while the search goes on, by reservoir sampling: of everything dropped so far one prefix is held,
chosen in proportion to its probability. When more is dropped, with mass D beside the mass R before,
one of the new prefixes replaces it with probability D / (D + R); otherwise the held prefix goes on
as an ancestral sample. The weight of y' is the mass that was dropped, summed up as it is dropped:
no sum is subtracted from one, and nothing is rejected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cpsbs.conditional_poisson.population import finite_or_zero
from cpsbs.designs.base import Design
from cpsbs.designs.independent import invert
from cpsbs.designs.top_k import largest
from cpsbs.randomness import BELOW_ONE, Streams
from cpsbs.scores.candidates import Candidates, Selection


@dataclass(frozen=True, repr=False, eq=False)
class SumAndSample(Design):
    """K − 1 sequences by beam search, and one sample of all other sequences."""

    name = "sum-and-sample"
    summary = "beam search for K − 1 sequences, and one sample of all others"
    tells_error = False

    def begin(self, k: int, streams: Streams, sources: Tensor) -> Mapping[str, Tensor]:
        """Return -inf, the logarithm of the mass that was dropped so far."""
        never = torch.full((len(sources), 1), -math.inf, dtype=torch.float64, device=sources.device)
        return {"log_dropped": never}

    def recordable(self, k: int) -> bool:
        """Return True, because selecting never synchronises with the host."""
        return True

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        """Pick the K − 1 most probable candidates, and in the last place the sample."""
        sources, parents, tokens = candidates.shape
        row = torch.arange(sources, device=candidates.log_prob.device)
        uniform = streams.uniform(row, (3,))
        log_dropped = candidates.state["log_dropped"][:, -1]
        held = log_dropped > -math.inf  # the sample, if there is one, is the last parent
        log_p = candidates.log_joint().view(sources, parents, tokens)
        log_p[:, -1].masked_fill_(held[:, None], -math.inf)
        values, index = largest(log_p.flatten(1), k - 1)
        rest = log_p.flatten(1).scatter_(-1, index, -math.inf)
        log_new = rest.logsumexp(-1)
        log_all = torch.logaddexp(log_dropped, log_new)
        end = rest.sub_(finite_or_zero(log_new)[:, None]).exp_().cumsum(-1)
        # Even when it is rounded, the level must stay below the total.
        level = uniform[:, :1] * end[:, -1:] * BELOW_ONE
        sample = torch.searchsorted(end, level, right=True).clamp_(max=parents * tokens - 1)
        token, _, _ = invert(candidates.of(slice(None), slice(-1, None)), uniform[:, 1:2])
        goes_on = held & (uniform[:, 2] >= (log_new - finite_or_zero(log_all)).exp())
        sample = torch.where(goes_on[:, None], (parents - 1) * tokens + token, sample)
        return Selection(
            index=torch.cat([index, sample], dim=-1),
            present=torch.cat([values > -math.inf, (log_all > -math.inf)[:, None]], dim=-1),
            state={"log_dropped": log_all[:, None].expand(sources, k)},
        )

    def log_weight(
        self, log_prob: Tensor, log_inclusion: Tensor | None, state: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return no inclusion probability, and the weights: p(y), and the dropped mass for y'."""
        return None, torch.cat([log_prob[:, :-1], state["log_dropped"][:, -1:]], dim=-1)
