"""Computes rotary embeddings: queries and keys are rotated by angles that grow with position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FIRST = 256
"""For how many positions angles are computed at first; then it is twice as many each time."""


class Rotation:
    """Rotates heads by their positions, with the angles of a model.

    Args:
        module: maps a tensor of the right dtype and positions [1, n] to cosines and sines
            [1, n, dim], which depend on nothing else.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._angles = self._computed(FIRST)

    def angles(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines [m, dim] of m ≥ ``count`` positions, from 0 on.

        What was returned is never changed, so that threads that share a model may go on reading it.
        """
        found = self._angles
        while len(found[0]) < count:
            found = self._angles = self._computed(2 * len(found[0]))
        return found

    def _computed(self, count: int) -> tuple[Tensor, Tensor]:
        position = torch.arange(count, device="cpu")[None]
        like = torch.empty(0, dtype=torch.float32, device="cpu")
        cosines, sines = (x[0].contiguous() for x in self._module(like, position))
        return cosines, sines

    def __call__(self, x: Tensor, position: Tensor) -> Tensor:
        """Return the heads x [n, heads·dim] after the rotation to positions [n]."""
        angles = self.angles(int(position.max()) + 1)
        cosines, sines = (a.index_select(0, position)[:, None] for a in angles)
        heads = x.reshape(len(x), -1, cosines.shape[-1])
        half = heads.shape[-1] // 2
        turned = torch.cat([-heads[..., half:], heads[..., :half]], dim=-1)
        return (heads * cosines + turned * sines).flatten(1)
