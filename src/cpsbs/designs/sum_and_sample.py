"""Sum and sample: beam search for K − 1 sequences and one sample of all the others.

    G = Σ_{y ∈ Y} p(y) f(y) + (1 − Σ_{y ∈ Y} p(y)) f(y') ,      y' ~ p outside Y

A sequence outside Y has a prefix that beam search drops at some step, and only one. So y' is drawn
while the search goes on: of everything dropped so far, one prefix is held, in proportion to its
probability; when more is dropped, with mass D beside the mass R before, one of the new ones takes
its place with probability D / (D + R), and otherwise it goes on as an ancestral sample. No sum is
subtracted from one, and nothing is rejected.
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
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Candidates, Selection


@dataclass(frozen=True, repr=False, eq=False)
class SumAndSample(Design):
    """K − 1 sequences by beam search, and one sample of the rest of the distribution."""

    name = "sum-and-sample"
    summary = "beam search for K − 1 sequences, and one sample of all others"

    def begin(self, k: int, streams: Streams, sources: Tensor) -> Mapping[str, Tensor]:
        """Nothing is dropped yet."""
        never = torch.full((len(sources), 1), -math.inf, dtype=torch.float64, device=sources.device)
        return {"log_dropped": never}

    def recordable(self, k: int) -> bool:
        """Return True: a selection never synchronises with the host."""
        return True

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        """The last place is for the sample."""
        sources, parents, tokens = candidates.shape
        row = torch.arange(sources, device=candidates.log_prob.device)
        uniform = streams.uniform(row, (3,))
        log_dropped = candidates.state["log_dropped"][:, -1]
        held = log_dropped > -math.inf  # where there is a sample, it is the last parent
        log_p = candidates.log_joint().view(sources, parents, tokens)
        log_p[:, -1].masked_fill_(held[:, None], -math.inf)
        values, index = largest(log_p.flatten(1), k - 1)
        rest = log_p.flatten(1).scatter_(-1, index, -math.inf)
        log_new = rest.logsumexp(-1)
        log_all = torch.logaddexp(log_dropped, log_new)
        end = rest.sub_(finite_or_zero(log_new)[:, None]).exp_().cumsum(-1)
        # Rounded, the level must stay below the total.
        level = uniform[:, :1] * end[:, -1:] * (1 - 2.0**-52)
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
        """No inclusion probability that is known; p(y), and what is left for the sample."""
        return None, torch.cat([log_prob[:, :-1], state["log_dropped"][:, -1:]], dim=-1)
