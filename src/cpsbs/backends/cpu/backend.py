"""The backend for CPUs: torch does everything but the reading of the scores, which is compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from cpsbs.backends.base import Backend
from cpsbs.backends.cpu.compiled import MOST_TERMS, address, library


class CompiledBackend(Backend):
    """The reference, with the one pass over all scores compiled."""

    name = "cpu"

    def read_into(
        self, rows: Tensor, temperature: float, length: int, maxima: Tensor, sums: Tensor
    ) -> bool:
        """Fill the maxima [n, C] and power sums [J, n, C] of the chunks of scores [n, V]."""
        compiled = library()
        fits = rows.dtype == torch.float32 and len(sums) <= MOST_TERMS
        if compiled is None or not fits:
            return False
        sizes = (*rows.shape, length, len(sums))
        compiled.read_scores(address(rows), *sizes, 1 / temperature, address(maxima), address(sums))
        return True


COMPILED = CompiledBackend()
"""The backend for CPUs."""
