"""A cell: one piece of computing, named by everything that its result depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

T = TypeVar("T")

NOT_IN_THE_SEED = ("dtype", "version")
"""Settings that the seed does not depend on.

Results of two versions, or in two dtypes, are then computed with the same random numbers, so that
they can be compared; and seeds are still those of results from before cells had these settings.
"""


@dataclass(frozen=True, eq=False)
class Cell:
    """What to compute."""

    kind: str
    """How; see ``compute``."""
    settings: Mapping[str, Any]
    """With what; plain JSON."""
    effort: float
    """Hypotheses to decode, to share out time by."""

    @cached_property
    def identity(self) -> str:
        """The kind and all settings as JSON; two cells with the same identity are the same."""
        return _identity(self.kind, self.settings)

    @cached_property
    def name(self) -> str:
        """The kind, with a digest of the identity: other settings make another name."""
        return f"{self.kind}-{_digest(self.identity)[:20]}"

    @cached_property
    def seed(self) -> int:
        """The seed of the random numbers, which does not depend on who computes the cell."""
        rest = {name: v for name, v in self.settings.items() if name not in NOT_IN_THE_SEED}
        return int(_digest(_identity(self.kind, rest))[20:35], 16)


def _identity(kind: str, settings: Mapping[str, Any]) -> str:
    return json.dumps([kind, dict(settings)], sort_keys=True)


def _digest(said: str) -> str:
    return hashlib.sha256(said.encode()).hexdigest()


def entry_of(what: str, name: str, entries: Mapping[str, T]) -> T:
    """Return the entry of that name.

    Args:
        what: what the name is a name of, for the error.
        name: the name to look up.
        entries: what there is, by name.

    Raises:
        ValueError: if there is no such entry.
    """
    if name not in entries:
        raise ValueError(f"{what} is {name!r}; allowed are {', '.join(entries)}")
    return entries[name]
