"""Diverse beam search (Vijayakumar et al., 2018): groups of beams that avoid each other's tokens.

The beam is divided into groups. At every step the groups choose one after the other, each as a beam
search of its own, except that a group subtracts ``strength`` from the score of a token for every
time that an earlier group has chosen it in this step. The penalties stay in the score of a
hypothesis. Nothing is random, so the beams cannot estimate expectations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cpsbs.designs.base import Design
from cpsbs.designs.top_k import largest, log_picked
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Candidates, Selection


@dataclass(frozen=True, repr=False, eq=False)
class Diverse(Design):
    """Diverse beam search.

    Args:
        strength: λ, the penalty of a token for each time that an earlier group has chosen it.
        groups: the number of groups, of which K must be a multiple; K by default.
    """

    name = "diverse"
    summary = "diverse beam search: groups that avoid each other's tokens"
    estimates = False
    distinct = False  # two groups may hold the same sequence

    strength: float = 0.5
    groups: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.strength < math.inf:
            raise ValueError(f"strength is {self.strength}; it must be a finite number ≥ 0")
        if self.groups is not None and self.groups < 1:
            raise ValueError(f"groups is {self.groups}; it must be at least 1")

    def roots(self, k: int) -> int:
        """Return the number of groups, because each group starts from its own empty sequence."""
        groups = k if self.groups is None else self.groups
        if k % groups:
            raise ValueError(f"groups is {groups}; k = {k} must be a multiple of it")
        return groups

    def begin(self, k: int, streams: Streams, sources: Tensor) -> Mapping[str, Tensor]:
        """Return the scores of the empty sequences, without any penalty."""
        shape = (len(sources), self.roots(k))
        return {"score": torch.zeros(shape, dtype=torch.float64, device=sources.device)}

    def recordable(self, k: int) -> bool:
        """Return True, because selecting never synchronises with the host."""
        return True

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        """Pick the K/groups best candidates of one group after the other."""
        sources, parents, tokens = candidates.shape
        groups = self.roots(k)
        each, size = parents // groups, k // groups
        penalty = candidates.log_prob.new_zeros((sources, tokens))
        picked: list[Tensor] = []
        scores: list[Tensor] = []
        for g in range(groups):
            part = slice(g * each, (g + 1) * each)
            finished = candidates.finished[:, part]
            total = candidates.of(slice(None), part).log_conditional()
            total = total + candidates.state["score"][:, part, None]
            total = total - torch.where(finished[..., None], 0.0, penalty[:, None, :])
            values, index = largest(total.flatten(1), size)
            token = index % tokens
            chosen = (values > -math.inf) & ~finished.gather(-1, index // tokens)
            penalty.scatter_add_(-1, token, self.strength * chosen.double())
            picked.append(index + g * each * tokens)
            scores.append(values)
        score = torch.cat(scores, dim=-1)
        return Selection(torch.cat(picked, dim=-1), score > -math.inf, state={"score": score})

    def log_inclusion_at(
        self, candidates: Candidates, k: int, index: Tensor, selection: Selection
    ) -> Tensor | None:
        """Return [B, n] 0 for the candidates that were picked, and -inf for all others."""
        return log_picked(index, selection)
