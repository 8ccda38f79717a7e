"""A cell: one piece of computing, named by everything that its result depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any


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
    def name(self) -> str:
        """Another setting makes another name, so that results never mix."""
        return f"{self.kind}-{self._digest[:20]}"

    @cached_property
    def seed(self) -> int:
        """Of the random numbers; it depends on the name alone, not on who computes the cell."""
        return int(self._digest[20:35], 16)

    @cached_property
    def _digest(self) -> str:
        said = json.dumps([self.kind, dict(self.settings)], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()
