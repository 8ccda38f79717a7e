"""A scene: what the runs of a page have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cpsbs.designs import Design
from cpsbs.search.settings import SearchSettings

MOST_K = 200
"""The largest K of a run: a tree of more branches cannot be read, and memory stays bounded."""
MOST_LENGTH = 1024
"""The largest number of new tokens."""
MOST_CHARACTERS = 20_000
"""The largest number of characters of a text or a reference."""

FUNCTIONS = {
    "entropy": "",
    "length": "",
    "bleu": "reference",
    "chrf": "reference",
    "contains": "phrase",
}
"""The functions f of a sequence that the page knows, and what they need besides the sequence."""


@dataclass(frozen=True)
class Scene:
    """What the runs of a page have in common: a text, how its outputs are drawn, and f."""

    text: str
    """The text to translate or to continue."""
    k: int = 10
    temperature: float = 1.0
    nucleus: float | None = None
    max_length: int = 128
    function: str = "entropy"
    """One of ``FUNCTIONS``."""
    argument: str = ""
    """The reference of BLEU and chrF, or the phrase that an output contains or not."""

    def __post_init__(self) -> None:
        if not 1 <= self.k <= MOST_K:
            raise ValueError(f"k is {self.k}; it must be from 1 to {MOST_K} on the page")
        if not 1 <= self.max_length <= MOST_LENGTH:
            raise ValueError(
                f"max_length is {self.max_length}; it must be from 1 to {MOST_LENGTH} on the page"
            )
        for name, value in (("text", self.text), ("argument", self.argument)):
            if len(value) > MOST_CHARACTERS:
                raise ValueError(
                    f"{name} has {len(value):,} characters; it must have at most "
                    f"{MOST_CHARACTERS:,}"
                )
        if self.function not in FUNCTIONS:
            raise ValueError(
                f"function is {self.function!r}; it must be one of {', '.join(FUNCTIONS)}"
            )
        needed = FUNCTIONS[self.function]
        if needed and not self.argument.strip():
            raise ValueError(f"function is {self.function!r}, which needs a {needed}; give one")

    @staticmethod
    def from_record(given: Mapping[str, Any]) -> Scene:
        """Return the scene that a page describes; what is missing has its default.

        Raises:
            ValueError: if a value is not of its type, or not allowed.
        """
        kinds: dict[str, tuple[type, ...]] = {
            "text": (str,),
            "k": (int,),
            "temperature": (int, float),
            "nucleus": (int, float, type(None)),
            "max_length": (int,),
            "function": (str,),
            "argument": (str,),
        }
        if not isinstance(given, Mapping) or "text" not in given:
            raise ValueError('the scene must be an object with a "text"')
        for name, value in given.items():
            if name not in kinds:
                raise ValueError(f"the scene has {name!r}; it may have {', '.join(kinds)}")
            if isinstance(value, bool) or not isinstance(value, kinds[name]):
                allowed = " or ".join(kind.__name__ for kind in kinds[name])
                raise ValueError(f"{name} is {value!r}; it must be {allowed}")
        return Scene(**given)

    def as_record(self) -> dict[str, Any]:
        """Return the scene as ``from_record`` takes it."""
        return asdict(self)

    def settings(self, design: Design) -> SearchSettings:
        """Return how to draw with a design; every step and what its error needs are kept."""
        joint = design.needs_joint and self.k > 1
        return SearchSettings(
            self.k, design, self.max_length, float(self.temperature), self.nucleus, joint, path=True
        )
