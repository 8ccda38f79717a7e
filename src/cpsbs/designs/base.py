"""The contract between the search and a sampling design.

The search is one recursion with one hole in it: at every step it offers a design the extensions of
P parents by V tokens, for each of B sources, and the design picks at most K of these P·V candidates
and says with what probability it would have picked each. ``cpsbs.scores.candidates`` defines what
the design is given (``Candidates``) and what it returns (``Selection``). A design knows nothing of
sequences; the search knows nothing of weights.

``Design`` is the contract. ``DrawingDesign`` is for designs that draw K of more than K candidates:
where a source has no more, as in the first steps of a search, there is nothing to draw, and all are
kept with an inclusion probability of one.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from cpsbs.backends.base import Rule
from cpsbs.conditional_poisson.population import TooFewError
from cpsbs.designs.variance import DrawnSequences, infinite_freedom, joint_variance
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Candidates, Selection


class Design(ABC):
    """A rule that picks at most K candidates of every source, at every step of a search.

    To write a design of your own, define ``name`` and ``select``; ``examples/own_design.py`` is a
    complete one. ``select`` reads the probabilities of the candidates (``candidates.log_joint()``,
    say), draws random numbers from ``streams`` and from nothing else, and returns a ``Selection``.
    If that has ``log_inclusion``, the log of the probability π_t with which each candidate was
    picked given its parents, nothing more is needed: the search sums it along the path, and
    w = p / Π_t π_t are unbiased weights. Beyond that,

    - ``begin`` and ``Selection.state`` carry numbers of your own from step to step;
    - ``log_weight`` makes other weights of them, for designs that know no π_t;
    - ``variance`` estimates the error from a single beam, for designs that know it without joint
      inclusion probabilities;
    - the class attributes below say what the design can do.

    ``cpsbs.check_design`` tests all of that and reports what is wrong.

    A design is a value: make it a frozen dataclass whose fields are its settings, with
    ``repr=False`` and ``eq=False`` to keep the methods defined here. Two designs are equal if they
    are of the same class and have equal settings. A design with attributes that are not dataclass
    fields is equal only to itself, because such attributes may be settings too. A recordable design
    must be hashable, because its recorded steps are looked up by it.
    """

    name: ClassVar[str]
    """The name by which the design is chosen and printed."""
    summary: ClassVar[str] = ""
    """A line that says what the design does."""
    power_sums: ClassVar[int] = 1
    """How many power sums of the scores the first pass over them computes for the design; see
    ``cpsbs.scores``."""
    distinct: ClassVar[bool] = True
    """Whether the design never picks a candidate twice."""
    estimates: ClassVar[bool] = True
    """Whether its beams have weights, so that expectations can be estimated from them."""
    needs_joint: ClassVar[bool] = False
    """Whether the error of an estimate from a single beam is known only with ``joint=True``."""
    tells_error: ClassVar[bool] = True
    """Whether a single beam can tell the error of an estimate; false for designs that rest on one
    random draw for the whole beam."""
    trace: ClassVar[tuple[str, ...]] = ()
    """Names in ``Selection.state`` of the numbers that are kept for every step of every sequence,
    as ``Beams.trace``; they must be zero for picks that are certain."""

    def __eq__(self, other: object) -> bool:
        if self is other or type(self) is not type(other):
            return self is other
        mine, theirs = self._settings(), other._settings()
        return mine == theirs and vars(self).keys() | vars(other).keys() <= mine.keys()

    def __hash__(self) -> int:
        return hash((type(self), *self._settings().values()))

    def _settings(self) -> dict[str, Any]:
        """Return the dataclass fields by name; none for a class that is not a dataclass."""
        return {f.name: getattr(self, f.name) for f in fields(self)} if is_dataclass(self) else {}

    def __repr__(self) -> str:
        """Return the name, followed by the settings that are not the default ones."""
        parameters = inspect.signature(type(self)).parameters
        settings = ", ".join(
            f"{name}={value!r}"
            for name, value in vars(self).items()
            if name in parameters and value != parameters[name].default
        )
        return f"{self.name}({settings})" if settings else self.name

    def roots(self, k: int) -> int:
        """Return how many copies of the empty sequence the search starts from."""
        return 1

    def begin(self, k: int, streams: Streams, sources: Tensor) -> Mapping[str, Tensor]:
        """Return the state [B, roots] of the empty sequences, for the sources [B]."""
        return {}

    def recordable(self, k: int) -> bool:
        """Return whether ``select`` never synchronises with the host.

        A GPU can then record a step as a CUDA graph and replay it.
        """
        return False

    def rule(self) -> Rule | None:
        """Return how ``select`` selects, for a backend that does it by itself; None if it cannot.

        The search asks only the class that defines ``rule``: a subclass may select in another way.
        """
        return None

    @abstractmethod
    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        """Pick at most K candidates of every source.

        Args:
            candidates: the P·V extensions of every source.
            k: K.
            streams: the random streams; draw every random number by ``streams.uniform(row, size)``.
            joint: whether the joint inclusion probabilities of pairs are wanted too; a design that
                does not know them returns none.
        """

    def log_inclusion_at(
        self, candidates: Candidates, k: int, index: Tensor, selection: Selection
    ) -> Tensor | None:
        """Return [B, n] the log-probability with which any candidates are picked; None if unknown.

        It is given the parents, as ``Selection.log_inclusion`` is, and for the candidates that were
        picked it is the same number. The search asks for it only where it keeps its path, for
        people who want to see why a candidate was dropped.

        Args:
            candidates: what ``select`` was given.
            k: K.
            index: [B, n] the numbers of the candidates, parent·V + token.
            selection: what ``select`` returned.
        """
        return None

    def log_weight(
        self, log_prob: Tensor, log_inclusion: Tensor | None, state: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return [B, K] log inclusion and log weight of the final sequences, None where unknown.

        The weights must make Σ_{y ∈ Y} w(y) f(y) an unbiased estimate of E f. By default they are
        p / Π_t π_t.

        Args:
            log_prob: [B, K] log p(y).
            log_inclusion: [B, K] Σ_t log π_t, the sum along the path of what ``select`` returned;
                None if it returned none.
            state: what ``select`` returned as state of the final sequences.
        """
        if log_inclusion is None:
            return None, None
        return log_inclusion, log_prob - log_inclusion

    def variance(
        self, drawn: DrawnSequences, weight: Tensor, values: Tensor, log_norm: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Return an estimate of the variance of Σ weight · values from one beam of each source.

        By default it comes from joint inclusion probabilities, if the beams have them and K > 1.
        The caller takes a variance of zero for "not known", unless the beam holds all sequences
        that there are: terms that agree do not tell how much others would differ.

        Args:
            drawn: the beams that this design has drawn.
            weight: [B, K] the weights w; divided by Σ w for a normalised estimate G. Zero in empty
                places.
            values: [B, K, d] f of the sequences; f − G for a normalised estimate. Zero in empty
                places.
            log_norm: [B] log Σ w, by which the weights of a normalised estimate were divided; None
                for an estimate that is not normalised.

        Returns:
            [B, d] the variance, NaN for sources whose beam does not tell it, or None if no beam
            does; and [B] its degrees of freedom on the CPU, inf if it is not a sample variance.
        """
        freedom = infinite_freedom(weight)
        if drawn.joint_log_inclusion is None or drawn.k == 1:
            return None, freedom
        pairs = drawn.joint_log_inclusion
        return joint_variance(drawn, pairs, weight, values, log_norm), freedom


class DrawingDesign(Design):
    """A design that defines ``draw``, and keeps all candidates where there are at most K."""

    @abstractmethod
    def draw(self, candidates: Candidates, k: int, streams: Streams, joint: bool) -> Selection:
        """Draw K of the candidates of every source.

        Raises:
            TooFewError: if some sources have no more than K candidates.
        """

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        """Draw K candidates of every source, or keep all of a source that has at most K."""
        _, parents, tokens = candidates.shape
        few: Tensor | None = None
        if parents * tokens > k:
            try:
                return self.draw(candidates, k, streams, joint)
            except TooFewError as error:
                few = error.rows  # this happens mostly in the first steps of a search
        here = min(k, parents * tokens)
        values, index = candidates.chunks.largest(candidates.offset, here)
        kept = _everything(values, index, k, joint)
        if few is None or bool(few.all()):
            return kept
        rows = (~few).nonzero()[:, 0]
        own = streams.select(rows)
        drawn = self.draw(candidates.of(rows), k, own, joint)
        streams.put(rows, own)
        return _with_rows(kept, rows, drawn)

    def drawn_log_inclusion(self, candidates: Candidates, k: int, index: Tensor) -> Tensor | None:
        """Return [B, n] log π of candidates of sources with more than K; None if unknown.

        Raises:
            TooFewError: if some sources have no more than K candidates.
        """
        return None

    def log_inclusion_at(
        self, candidates: Candidates, k: int, index: Tensor, selection: Selection
    ) -> Tensor | None:
        """Return [B, n] log π: 0 where a source has at most K candidates, which are all kept."""
        certain = torch.zeros(index.shape, dtype=torch.float64, device=index.device)
        _, parents, tokens = candidates.shape
        if parents * tokens <= k:
            return certain
        try:
            return self.drawn_log_inclusion(candidates, k, index)
        except TooFewError as error:
            rows = (~error.rows).nonzero()[:, 0]
        if len(rows) == 0:
            return certain
        own = self.drawn_log_inclusion(candidates.of(rows), k, index[rows])
        return None if own is None else certain.index_copy(0, rows, own)


def _everything(values: Tensor, index: Tensor, k: int, joint: bool) -> Selection:
    """Return a selection of all candidates [B, ≤ K], each picked with certainty."""
    missing = (0, k - values.shape[1])
    present = pad(values > -math.inf, missing)
    certain = torch.zeros(present.shape, dtype=torch.float64, device=present.device)
    pairs = certain[..., None] + certain[:, None, :] if joint else None
    return Selection(pad(index, missing), present, certain, pairs)


def _with_rows(kept: Selection, rows: Tensor, drawn: Selection) -> Selection:
    """Return ``kept`` with its rows [b] replaced by those of ``drawn``."""

    def put(old: Tensor | None, new: Tensor | None) -> Tensor | None:
        return None if old is None or new is None else old.index_copy(0, rows, new)

    return Selection(
        index=kept.index.index_copy(0, rows, drawn.index),
        present=kept.present.index_copy(0, rows, drawn.present),
        log_inclusion=put(kept.log_inclusion, drawn.log_inclusion),
        joint_log_inclusion=put(kept.joint_log_inclusion, drawn.joint_log_inclusion),
    )
