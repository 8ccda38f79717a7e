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

import torch
from torch import Tensor

from cpsbs.randomness import Streams


@dataclass(frozen=True)
class Candidates:
    """The extensions of P parents by V tokens, for each of B sources."""

    log_prob: Tensor
    """[B, P] float64, log p of the parents; -inf where there is none."""
    scores: Tensor
    """[B, P, V] the model's scores of the next token, not normalised; -inf for no candidate."""
    log_total: Tensor
    """[B, P] float64, log Σ exp(scores)."""
    finished: Tensor
    """[B, P] parents that offer themselves and nothing else."""
    state: Mapping[str, Tensor] = field(default_factory=dict)
    """[B, P] what the design returned with these parents."""
    log_inclusion: Tensor | None = None
    """[B, P] float64, the sum of what the design returned as such along the path of the parents."""

    def log_conditional(self) -> Tensor:
        """[B, P, V] float64 log p(token | parent)."""
        return self.scores - self.log_total[..., None]

    def log_joint(self) -> Tensor:
        """[B, P·V] float64 log p of the candidates."""
        return (self.scores + (self.log_prob - self.log_total)[..., None]).flatten(1)

    def of(self, rows: Tensor | slice, parents: slice = slice(None)) -> Candidates:
        """The extensions of some parents of some sources."""
        past = self.log_inclusion
        return Candidates(
            self.log_prob[rows][:, parents],
            self.scores[rows][:, parents],
            self.log_total[rows][:, parents],
            self.finished[rows][:, parents],
            {name: value[rows][:, parents] for name, value in self.state.items()},
            None if past is None else past[rows][:, parents],
        )

    def entropy(self) -> Tensor:
        """[B, P] float64 entropy of the next token after each parent; 0 for a finished one."""
        rows = self.scores.flatten(0, 1)
        # Block by block, so that nothing of the size of the scores is kept.
        parts = torch.split(rows, max(1, 2**19 // rows.shape[-1]))
        sums = [torch.special.entr(p.softmax(-1)).sum(-1, dtype=torch.float64) for p in parts]
        entropy = torch.cat(sums).view(self.log_total.shape)
        return torch.where(self.log_prob.isneginf() | self.finished, 0.0, entropy)

    def parent_of(self, index: Tensor) -> Tensor:
        """[B, K] the parents of the candidates [B, K]."""
        return index // self.scores.shape[-1]

    def log_prob_of(self, index: Tensor) -> Tensor:
        """[B, K] float64 log p of the candidates [B, K]."""
        parent = self.parent_of(index)
        score = self.scores.flatten(1).gather(-1, index).to(torch.float64)
        return score + (self.log_prob - self.log_total).gather(-1, parent)


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
    candidate is picked twice, ``estimates`` that its beams have weights for estimates.
    """

    name: str
    summary: str = ""
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
