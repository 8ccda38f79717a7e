"""The settings of a search: one frozen value, checked once and carried through every layer.

``SearchSettings`` is what the recursion reads, what the command line fills in, and what a result is
labelled with. ``SearchOptions`` names the same optional settings as keyword arguments, for the
functions that pass them on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypedDict

from cpsbs.designs import Design

LEAST_TEMPERATURE = 1e-20
"""The smallest temperature; scores divided by less overflow in float32."""


class SearchOptions(TypedDict, total=False):
    """The optional settings of a search, as keyword arguments; see ``SearchSettings``."""

    temperature: float
    nucleus: float | None
    joint: bool
    entropy: bool
    path: bool


@dataclass(frozen=True)
class SearchSettings:
    """All that determines how sequences are drawn, except for the model and the random numbers."""

    k: int
    """K ≥ 1, the number of sequences to draw for each source."""
    design: Design
    """The design that selects K candidates at every step."""
    max_length: int
    """T ≥ 1, the largest number of tokens in a sequence, the end token included."""
    temperature: float = 1.0
    """τ > 0: the model that is sampled from is p_τ(y_t | ·) ∝ p(y_t | ·)^{1/τ}."""
    nucleus: float | None = None
    """After each prefix keep only the most probable tokens that make up this much probability, and
    treat the others as impossible (the paper uses 0.99); None keeps all."""
    joint: bool = False
    """Whether to keep joint inclusion probabilities along the path, from which some designs
    estimate their error."""
    entropy: bool = False
    """Whether to keep Σ_t H(p(· | y_<t)) along the path, for Rao–Blackwellised entropy."""
    path: bool = False
    """Whether to keep what was selected at every step."""

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"k is {self.k!r}; it must be an integer of at least 1")
        if self.max_length < 1:
            raise ValueError(f"max_length is {self.max_length}; it must be at least 1")
        if not LEAST_TEMPERATURE <= self.temperature < math.inf:
            raise ValueError(
                f"temperature is {self.temperature}; it must be a finite number of at least "
                f"{LEAST_TEMPERATURE} (for the most probable sequences, use the design 'top-k')"
            )
        if self.nucleus is not None and not 0 < self.nucleus <= 1:
            raise ValueError(
                f"nucleus is {self.nucleus}; it must be above 0 and at most 1, or None"
            )

    def as_record(self) -> dict[str, Any]:
        """Return what a result is labelled with: plain values that can be written as JSON."""
        return {
            "design": repr(self.design),
            "k": self.k,
            "temperature": self.temperature,
            "nucleus": self.nucleus,
            "max_length": self.max_length,
        }
