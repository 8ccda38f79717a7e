"""What a step of the search offers to a design, and what the design picks from it.

A step offers, for each of B sources, the extensions of P parents by V tokens: Y_{t−1} ∘ V. A
finished parent offers a single candidate, itself, in the place of token 0. A design picks K of the
P·V candidates, which are numbered parent·V + token. The log-probability of a candidate is its score
(divided by the temperature) plus an offset for its parent,

    log p(y v) = log p(y) + x_v − log Σ_u e^{x_u} ,

so that normalising the scores allocates nothing of their size.
"""

from __future__ import annotations

import math
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
    """[B, P] float64 log p of the parents; -inf in places without a parent."""
    chunks: Chunks
    """The model's scores [B, P, V] of the next token, not normalised and -inf where there is no
    candidate, together with the maxima and the sums of their chunks."""
    finished: Tensor
    """[B, P] whether a parent offers itself and nothing else."""
    state: Mapping[str, Tensor] = field(default_factory=dict)
    """[B, P] the state that the design returned when it picked these parents."""
    log_inclusion: Tensor | None = None
    """[B, P] float64, the sum of the log inclusion probabilities along the path of each parent, if
    the design returns them."""

    @property
    def shape(self) -> torch.Size:
        """The shape (B, P, V)."""
        return self.chunks.shape

    @property
    def log_total(self) -> Tensor:
        """[B, P] float64 log Σ exp(score)."""
        return self._normalized[0]

    @property
    def offset(self) -> Tensor:
        """[B, P] float64; log p of a candidate is its score plus this."""
        return self._normalized[1]

    @cached_property
    def _normalized(self) -> tuple[Tensor, Tensor]:
        return self.chunks.normalize(self.log_prob)

    def log_conditional(self) -> Tensor:
        """Return [B, P, V] float64 log p(token | parent)."""
        return self.chunks.scaled_scores().sub_(self.log_total[..., None])

    def log_joint(self) -> Tensor:
        """Return [B, P·V] float64 log p of all candidates."""
        return self.chunks.scaled_scores().add_(self.offset[..., None]).flatten(1)

    def of(self, rows: Tensor | slice, parents: slice = slice(None)) -> Candidates:
        """Return the extensions of some parents of some sources."""
        past = self.log_inclusion
        return Candidates(
            self.log_prob[rows][:, parents],
            self.chunks.of(rows, parents),
            self.finished[rows][:, parents],
            {name: value[rows][:, parents] for name, value in self.state.items()},
            None if past is None else past[rows][:, parents],
        )

    def entropy(self) -> Tensor:
        """Return [B, P] float64 the entropy of the next token; 0 after a finished parent."""
        rows = self.chunks.rows
        # Block by block, so that nothing of the size of the scores is kept.
        parts = torch.split(rows, max(1, block_size(rows.device) // rows.shape[-1]))
        dtype = torch.promote_types(rows.dtype, torch.float32)
        scaled = (part.to(dtype) / self.chunks.temperature for part in parts)
        sums = [torch.special.entr(x.softmax(-1)).sum(-1, dtype=torch.float64) for x in scaled]
        entropy, row = torch.cat(sums), self.chunks.row
        if row is None:
            entropy = entropy.view(self.log_prob.shape)
        else:
            entropy = entropy[row.clamp(max=len(rows) - 1)]
        return torch.where(self.log_prob.isneginf() | self.finished, 0.0, entropy)

    def likeliest(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the likeliest extensions of every parent, by decreasing probability.

        Returns:
            [B, P, R] the tokens, with R at most ``count``; [B, P, R] float64 log p of the
            candidates, -inf where there are fewer; and [B, P] float64 log p of all other extensions
            of the parent together.
        """
        rows, count = self.chunks.rows, min(count, self.shape[-1])
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for part in torch.split(rows, max(1, block_size(rows.device) // rows.shape[-1])):
            scaled = part.to(torch.float64) / self.chunks.temperature
            top = scaled.topk(count, dim=-1)
            rest = scaled.scatter_(-1, top.indices, -math.inf).logsumexp(-1)
            parts.append((top.indices, top.values, rest))
        token, score, rest = (torch.cat(part) for part in zip(*parts, strict=True))
        row = self.chunks.row
        if row is None:
            shape = self.log_prob.shape
            token, score, rest = token.view(*shape, -1), score.view(*shape, -1), rest.view(shape)
        else:
            place = row.clamp(max=len(rows) - 1)
            alone = row == len(rows)  # its one candidate is token 0, with the score 0
            token = token[place].masked_fill(alone[..., None], 0)
            score = score[place].masked_fill(alone[..., None], -math.inf)
            score[..., 0].masked_fill_(alone, 0.0)
            rest = rest[place].masked_fill(alone, -math.inf)
        return token, score + self.offset[..., None], rest + self.offset

    def parent_of(self, index: Tensor) -> Tensor:
        """Return the parents [B, K] of the candidates [B, K]."""
        return index // self.shape[-1]

    def log_prob_of(self, index: Tensor) -> Tensor:
        """Return [B, K] float64 log p of the candidates [B, K]."""
        return self.chunks.take_along(index) + self.offset.gather(-1, self.parent_of(index))


@dataclass(frozen=True)
class Selection:
    """The candidates that a design picked, at most K for each source."""

    index: Tensor
    """[B, K] the numbers of the candidates, parent·V + token."""
    present: Tensor
    """[B, K] false for places that stay empty: because there are fewer than K candidates, or
    because the design picks a random number of them, at most K. The index there has no meaning,
    but it must be a candidate's."""
    log_inclusion: Tensor | None = None
    """[B, K] log probability that the candidate was picked, given the parents; None if the design
    does not know it."""
    joint_log_inclusion: Tensor | None = None
    """[B, K, K] log probability that both of two candidates were picked; None unless the search
    asked for it."""
    state: Mapping[str, Tensor] = field(default_factory=dict)
    """[B, K] what the design will find in ``Candidates.state`` in the next step."""
