"""What a design is to the search: it picks K candidates and says what it knows of them.

A step of the recursion offers, for each of B sources, the extensions of P parents by V tokens. A
finished parent offers one candidate, itself, in the place of token 0. A design returns K of the
P·V candidates. It knows nothing of sequences; the search knows nothing of weights.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from cpsbs.conditional_poisson.bernoulli_sum import block_size
from cpsbs.randomness import Streams
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
    """[B, K] false for places that stay empty because there are fewer than K candidates."""
    log_inclusion: Tensor | None = None
    """[B, K] log probability that the candidate was picked, given the parents; if it is known."""
    joint_log_inclusion: Tensor | None = None
    """[B, K, K] the same of pairs; only if it was asked for."""
    state: Mapping[str, Tensor] = field(default_factory=dict)
    """[B, K] what the design wants to find with these candidates in the next step."""


class Design(ABC):
    """A rule that picks K candidates.

    ``name`` is what people call it, ``summary`` what it is in a line. ``distinct`` says that no
    candidate is picked twice, ``estimates`` that its beams have weights for estimates, and
    ``power_sums`` how many the first reading of the scores is to collect.
    """

    name: str
    summary: str = ""
    power_sums: int = 1
    distinct: bool = True
    estimates: bool = True

    def __repr__(self) -> str:
        """The name, and the settings that are not the usual ones."""
        usual = inspect.signature(type(self)).parameters
        settings = ", ".join(
            f"{name}={value!r}"
            for name, value in vars(self).items()
            if name in usual and value != usual[name].default
        )
        return f"{self.name}({settings})" if settings else self.name

    def roots(self, k: int) -> int:
        """How many copies of the empty sequence the search starts from."""
        return 1

    def begin(self, k: int, streams: Streams, sources: Tensor) -> Mapping[str, Tensor]:
        """The state [B, roots] of the first parents, for the sources [B]."""
        return {}

    def recordable(self, k: int) -> bool:
        """Whether ``select`` never looks at what it computes, so that a GPU's part of it can be
        recorded once and replayed.
        """
        return False

    @abstractmethod
    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        """Pick K candidates of every source; ``joint`` asks for the joint inclusion as well."""

    def log_weight(
        self, log_prob: Tensor, log_inclusion: Tensor | None, state: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """[B, K] log inclusion and log weight of finished sequences, each if the design has one.

        ``log_inclusion`` [B, K] is the sum of what ``select`` returned along the path. The weighted
        sum of f over the beam is to be an unbiased estimate of its expectation.
        """
        if log_inclusion is None:
            return None, None
        return log_inclusion, log_prob - log_inclusion
