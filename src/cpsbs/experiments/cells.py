"""Defines cells: units of computation, named by everything that their results depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

T = TypeVar("T")

NOT_IN_THE_SEED = ("dtype", "version")
"""The settings that the seed does not depend on.

Results of two versions, or in two dtypes, use the same random numbers, so that they can be
compared; and results from before cells had these settings have the same seeds.
"""


@dataclass(frozen=True, eq=False)
class Cell:
    """One unit of computation."""

    kind: str
    """How to compute it; ``compute`` has a method for each kind."""
    settings: Mapping[str, Any]
    """Everything that the result depends on, as plain JSON."""
    effort: float
    """The number of hypotheses to decode, from which the time is estimated."""

    @cached_property
    def identity(self) -> str:
        """The kind and all settings as JSON, which are equal for equal cells only."""
        return _identity(self.kind, self.settings)

    @cached_property
    def name(self) -> str:
        """The kind with a digest of the identity, so that other settings give another name."""
        return f"{self.kind}-{_digest(self.identity)[:20]}"

    @cached_property
    def seed(self) -> int:
        """The seed of the random numbers, whichever worker computes the cell."""
        seeding = {name: v for name, v in self.settings.items() if name not in NOT_IN_THE_SEED}
        return int(_digest(_identity(self.kind, seeding))[20:35], 16)


def _identity(kind: str, settings: Mapping[str, Any]) -> str:
    return json.dumps([kind, dict(settings)], sort_keys=True)


def _digest(identity: str) -> str:
    return hashlib.sha256(identity.encode()).hexdigest()


def look_up(what: str, name: str, entries: Mapping[str, T]) -> T:
    """Return the entry of that name.

    Args:
        what: the kind of thing that is looked up, for the error message.
        name: the name to look up.
        entries: all entries, by name.

    Raises:
        ValueError: if there is no such entry; it lists those that there are.
    """
    if name not in entries:
        raise ValueError(f"{what} is {name!r}; allowed are {', '.join(entries)}")
    return entries[name]
