"""Arithmetic sampling (Vilnis et al., 2023): K samples from one randomly shifted lattice of codes.

Lay all sequences one after the other on [0, 1), each on an interval as long as it is probable; a
code in [0, 1) then stands for the sequence whose interval holds it. Row k decodes the code
(k + u)/K with a single uniform u for all rows, token by token, as an arithmetic decoder does. The
code of each row alone is uniform, so that each row is an ancestral sample and (1/K) Σ f is
unbiased; together the rows cover the distribution as evenly as a systematic sample. Sequences may
repeat.

A code has 53 bits, and decoding a token uses up −log₂ p of them. When fewer than ``FEWEST_BITS``
are left, the row goes on with a fresh code, because what is left is rounding noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cpsbs.designs.independent import Independent, invert, one_each
from cpsbs.designs.variance import DrawnSequences, infinite_freedom
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Candidates, Selection

FEWEST_BITS = 24
"""The number of bits that a code must have left to decode one more token."""


@dataclass(frozen=True, repr=False, eq=False)
class Arithmetic(Independent):
    """K samples by arithmetic sampling, each with the weight 1/K."""

    name = "arithmetic"
    summary = "arithmetic sampling: K samples spread evenly over the distribution"
    tells_error = False

    def begin(self, k: int, streams: Streams, sources: Tensor) -> Mapping[str, Tensor]:
        """Return the randomly shifted lattice of codes, each with all of its bits."""
        shift = streams.uniform(sources, (1,))
        code = (torch.arange(k, device=shift.device) + shift) / k
        return {"code": code, "bits": torch.full_like(code, 53.0)}

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        """Decode the next token from the code of every row."""
        code, bits = candidates.state["code"], candidates.state["bits"]
        spent = bits < FEWEST_BITS
        row = torch.arange(len(code), device=code.device)
        code = torch.where(spent, streams.uniform(row, (k,)), code)
        bits = torch.where(spent, 53.0, bits)
        token, start, length = invert(candidates, code)
        code = ((code - start) / length).clamp_(0, 1 - 2.0**-53)
        bits = bits + length.log2()
        return one_each(candidates, token, {"code": code, "bits": bits})

    def log_inclusion_at(
        self, candidates: Candidates, k: int, index: Tensor, selection: Selection
    ) -> Tensor | None:
        """Return None: given the rows so far, their codes are no longer uniform."""
        return None

    def variance(
        self, drawn: DrawnSequences, weight: Tensor, values: Tensor, log_norm: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Return None: all rows share one random number, so only repeated beams tell the error."""
        return None, infinite_freedom(weight)
