"""Put a sampling design of your own into the search.

    python examples/own_design.py

Systematic sampling (Madow, 1949): lay the candidates one after the other on a line, each on an
interval as long as its inclusion probability, and keep those on which the points s, s + 1, s + 2, …
fall, with one random s in [0, 1). The design needs one method, ``select``, and
``cpsbs.check_design`` checks it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import cpsbs
from cpsbs.designs import Candidates, Selection
from cpsbs.functions import Length
from cpsbs.randomness import Streams


@dataclass(frozen=True, repr=False, eq=False)
class Systematic(cpsbs.Design):
    """Systematic sampling of K candidates, in proportion to their weights in the estimate."""

    name = "systematic"
    summary = "systematic sampling, in the order of the vocabulary"

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        """Pick K candidates of every source, or all if there are fewer."""
        sources, _, tokens = candidates.shape
        assert candidates.log_inclusion is not None
        # The weight of a candidate is p over the probability that its parent was kept so far.
        weight = candidates.log_joint() - candidates.log_inclusion.repeat_interleave(tokens, dim=-1)
        inclusion = proportional(weight.softmax(-1), k)
        end = inclusion.cumsum(-1)
        uniform = streams.uniform(torch.arange(sources, device=end.device), (1,))
        point = uniform + torch.arange(k, device=end.device)
        present = point < end[:, -1:].round()  # there may be fewer than K candidates
        point = torch.where(present, point * (1 - 1e-12), 0.0)  # below the end despite rounding
        index = torch.searchsorted(end, point, right=True)
        return Selection(index, present, inclusion.gather(-1, index).log())


def proportional(weight: Tensor, k: int) -> Tensor:
    """Return the inclusion probabilities [B, N] with sum K that are min(1, c · weight)."""
    certain = torch.zeros_like(weight, dtype=torch.bool)
    for _ in range(k):
        light = weight.masked_fill(certain, 0.0)
        share = light / light.sum(-1, keepdim=True).clamp(min=1e-300)
        inclusion = torch.where(certain, 1.0, share * (k - certain.sum(-1, keepdim=True)))
        certain = inclusion >= 1
    return inclusion.clamp(max=1.0)


def main() -> None:
    """Check the design, and estimate with it."""
    cpsbs.check_design(Systematic())
    model = cpsbs.TableModel.random(vocab_size=6, length=5, seed=0)
    beams = [cpsbs.search(model, 10, Systematic(), max_length=5, generator=i) for i in range(20)]
    print(cpsbs.estimate(beams, Length()))
    print(f"exactly {sum(p * len(y) for y, p in model.sequences(5).items()):.3f}")


if __name__ == "__main__":
    main()
