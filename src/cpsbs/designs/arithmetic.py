"""Arithmetic sampling (Vilnis et al., 2023): one shifted lattice of codes for all rows.

A sequence is a stretch of [0, 1) as long as it is probable, and row k decodes the code
(k + u)/K mod 1 with a single uniform u. Each row alone is an ancestral sample; together they are
spread over the distribution as evenly as a systematic sample.

A code has 53 bits, and decoding a token uses up as many as it is surprising. When fewer than
``FRESH`` are left they are replaced by fresh ones, instead of decoding rounding noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cpsbs.designs.independent import Independent, invert, one_each
from cpsbs.designs.variance import Drawn, no_freedom
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Candidates, Selection

FRESH = 24
"""Bits that a code must have left to decode one more token."""


@dataclass(frozen=True, repr=False, eq=False)
class Arithmetic(Independent):
    """K samples by arithmetic sampling; each counts 1/K."""

    name = "arithmetic"
    summary = "arithmetic sampling: K samples spread evenly over the distribution"

    def begin(self, k: int, streams: Streams, sources: Tensor) -> Mapping[str, Tensor]:
        """The lattice."""
        shift = streams.uniform(sources, (1,))
        code = (torch.arange(k, device=shift.device) + shift) / k
        return {"code": code, "bits": torch.full_like(code, 53.0)}

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        """Decode one token of every row's code."""
        code, bits = candidates.state["code"], candidates.state["bits"]
        spent = bits < FRESH
        row = torch.arange(len(code), device=code.device)
        code = torch.where(spent, streams.uniform(row, (k,)), code)
        bits = torch.where(spent, 53.0, bits)
        token, start, length = invert(candidates, code)
        code = ((code - start) / length).clamp_(0, 1 - 2.0**-53)
        bits = bits + length.log2()
        return one_each(candidates, token, {"code": code, "bits": bits})

    def variance(
        self, beams: Drawn, weight: Tensor, values: Tensor, unit: Tensor, scale: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Return None: all rows rest on one random draw, and only repeated beams tell the error."""
        return None, no_freedom(weight)
