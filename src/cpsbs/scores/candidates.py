"""What a step offers to a design, and what the design picks of it.

A step of the recursion offers, for each of B sources, the extensions of P parents by V tokens. A
finished parent offers one candidate, itself, in the place of token 0. A design returns K of the P·V
candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from cpsbs.scores.memory import block_size
from cpsbs.scores.reading import Chunks


@dataclass(frozen=True)
class Candidates:
    """The extensions of P parents by V tokens, for each of B sources."""

    log_prob: Tensor
    """[B, P] float64, log p of the parents; -inf where there is none."""
    chunks: Chunks
    """The model's scores of the next token [B, P, V], not normalised, -inf for no candidate; and
    what a first reading of them tells."""
    finished: Tensor
    """[B, P] parents that offer themselves and nothing else."""
    state: Mapping[str, Tensor] = field(default_factory=dict)
    """[B, P] what the design returned with these parents."""
    log_inclusion: Tensor | None = None
    """[B, P] float64, the sum of what the design returned as such along the path of the parents."""

    @property
    def shape(self) -> torch.Size:
        """B, P, V."""
        return self.chunks.shape

    @property
    def log_total(self) -> Tensor:
        """[B, P] float64, log Σ exp(score)."""
        return self._normalized[0]

    @property
    def offset(self) -> Tensor:
        """[B, P] float64; log p of a candidate is its score plus this."""
        return self._normalized[1]

    @cached_property
    def _normalized(self) -> tuple[Tensor, Tensor]:
        return self.chunks.normalize(self.log_prob)

    def log_conditional(self) -> Tensor:
        """[B, P, V] float64 log p(token | parent)."""
        scores = self.chunks.scores.to(torch.float64) / self.chunks.temperature
        return scores.sub_(self.log_total[..., None])

    def log_joint(self) -> Tensor:
        """[B, P·V] float64 log p of the candidates."""
        scores = self.chunks.scores.to(torch.float64) / self.chunks.temperature
        return scores.add_(self.offset[..., None]).flatten(1)

    def of(self, rows: Tensor | slice, parents: slice = slice(None)) -> Candidates:
        """The extensions of some parents of some sources."""
        past = self.log_inclusion
        return Candidates(
            self.log_prob[rows][:, parents],
            self.chunks.of(rows, parents),
            self.finished[rows][:, parents],
            {name: value[rows][:, parents] for name, value in self.state.items()},
            None if past is None else past[rows][:, parents],
        )

    def entropy(self) -> Tensor:
        """[B, P] float64 entropy of the next token after each parent; 0 for a finished one."""
        rows = self.chunks.rows
        # Block by block, so that nothing of the size of the scores is kept.
        parts = torch.split(rows, max(1, block_size(rows.device) // rows.shape[-1]))
        kind = torch.promote_types(rows.dtype, torch.float32)
        scaled = (part.to(kind) / self.chunks.temperature for part in parts)
        sums = [torch.special.entr(x.softmax(-1)).sum(-1, dtype=torch.float64) for x in scaled]
        entropy, row = torch.cat(sums), self.chunks.row
        if row is None:
            entropy = entropy.view(self.log_prob.shape)
        else:
            entropy = entropy[row.clamp(max=len(rows) - 1)]
        return torch.where(self.log_prob.isneginf() | self.finished, 0.0, entropy)

    def parent_of(self, index: Tensor) -> Tensor:
        """[B, K] the parents of the candidates [B, K]."""
        return index // self.shape[-1]

    def log_prob_of(self, index: Tensor) -> Tensor:
        """[B, K] float64 log p of the candidates [B, K]."""
        return self.chunks.take_along(index) + self.offset.gather(-1, self.parent_of(index))


@dataclass(frozen=True)
class Selection:
    """K of the candidates of each source."""

    index: Tensor
    """[B, K] candidate numbers, parent·V + token."""
    present: Tensor
    """[B, K] false for places that stay empty: because there are fewer than K candidates, or
    because the design picks a random number of them, at most K. The index there means nothing, but
    it must be a candidate's."""
    log_inclusion: Tensor | None = None
    """[B, K] log probability that the candidate was picked, given the parents; if it is known."""
    joint_log_inclusion: Tensor | None = None
    """[B, K, K] the same of pairs; only if it was asked for."""
    state: Mapping[str, Tensor] = field(default_factory=dict)
    """[B, K] what the design wants to find with these candidates in the next step."""
