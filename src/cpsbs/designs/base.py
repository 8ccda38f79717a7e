"""What a design is to the search: it picks K candidates and says what it knows of them.

``cpsbs.scores.candidates`` has what it picks from, and what it returns. A design knows nothing of
sequences; the search knows nothing of weights.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

from torch import Tensor

from cpsbs.designs.variance import Drawn, joint_variance, no_freedom
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Candidates, Selection


class Design(ABC):
    """A rule that picks K candidates.

    A design is a value: make it a frozen dataclass whose fields are its settings, with
    ``repr=False`` and ``eq=False`` to keep what is here. Two designs are equal if they are of the
    same class with equal settings. One that has attributes other than dataclass fields is equal to
    itself only, because nobody can tell whether these are settings.

    A recordable design must be hashable: recordings of its steps are found again by it.
    """

    name: ClassVar[str]
    """What people call it."""
    summary: ClassVar[str] = ""
    """What it does, in a line."""
    power_sums: ClassVar[int] = 1
    """How many power sums the first reading of the scores collects for it."""
    distinct: ClassVar[bool] = True
    """Whether it never picks a candidate twice."""
    estimates: ClassVar[bool] = True
    """Whether its beams have weights for estimates."""
    needs_joint: ClassVar[bool] = False
    """Whether one beam tells its error only if it was searched with ``joint=True``."""

    def __eq__(self, other: object) -> bool:
        if self is other or type(self) is not type(other):
            return self is other
        mine, its = self._settings(), other._settings()
        return mine == its and vars(self).keys() | vars(other).keys() <= mine.keys()

    def __hash__(self) -> int:
        return hash((type(self), *self._settings().values()))

    def _settings(self) -> dict[str, Any]:
        """Return the dataclass fields, none for another class."""
        return {f.name: getattr(self, f.name) for f in fields(self)} if is_dataclass(self) else {}

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

    def variance(
        self, beams: Drawn, weight: Tensor, values: Tensor, unit: Tensor, scale: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Return [B, d] an estimate of the variance of Σ w f / scale from one beam, or None.

        NaN stands for a source whose beam does not know its error. By default the variance comes
        from joint inclusion, if the beams have it and K > 1.

        Args:
            beams: what the design has drawn, with ``log_weight`` as its weights.
            weight: [B, K] the weights, relative to e^unit; zero in empty places.
            values: [B, K, d] f of the sequences; zero in empty places.
            unit: [B] or [1].
            scale: [B, 1] for normalised estimates, where values are f − G; else None.

        Returns:
            The variance, and [B] its degrees of freedom, on the CPU: inf where it is no sample
            variance.
        """
        pairs, freedom = beams.joint_log_inclusion, no_freedom(weight)
        if pairs is None or beams.k == 1:
            return None, freedom
        return joint_variance(beams, pairs, weight, values, unit, scale), freedom
