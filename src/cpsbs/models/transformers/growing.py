"""A KV cache for CPUs that keeps its memory from step to step.

A step reorders the rows and adds a token to each. transformers does one after the other, each time
into a new tensor; and the system maps the memory of a large tensor page by page when it is first
written to, which takes ten times as long as the copy itself. Here both are one copy, into the
memory that the previous tensor has left.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

EXTRA_TOKENS = 16
"""The number of further tokens that newly allocated memory has room for."""

Spare = list[Tensor]
"""Free memory, at most one tensor, which all tensors of a cache share."""


class Growing:
    """A tensor [rows, heads, tokens, dim] that grows by tokens."""

    def __init__(self, given: Tensor, spare: Spare) -> None:
        self._spare, self.now = spare, given
        self._memory: Tensor | None = None
        """The memory of ``now``, once it is ours; the tensor given at first may be shared."""

    def grow(self, index: Tensor | None, new: Tensor) -> Tensor:
        """Return the rows ``index`` [n], or all, with new tokens [n, heads, t, dim] at the end."""
        before, memory = self.now, self._memory
        rows, heads, more, dim = new.shape
        length = before.shape[2]
        shape = (rows, heads, length + more, dim)
        self._memory = self._room_for(math.prod(shape), rows * heads * EXTRA_TOKENS * dim)
        self.now = self._memory[: math.prod(shape)].view(shape)
        if index is None:
            self.now[:, :, :length].copy_(before)
        else:
            torch.index_select(before, 0, index, out=self.now[:, :, :length])
        self.now[:, :, length:].copy_(new)
        if memory is not None:
            self._spare[:] = [memory]
        return self.now

    def _room_for(self, size: int, more: int) -> Tensor:
        """Return free memory for ``size`` elements; new memory has room for ``more`` besides."""
        memory = self._spare.pop() if self._spare else None
        if memory is None or memory.numel() < size or memory.dtype != self.now.dtype:
            memory = torch.empty(size + more, dtype=self.now.dtype, device=self.now.device)
        return memory


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A cache layer of transformers that reorders its rows together with the next update."""

    def __init__(self, layer: Any, spare: Spare) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype, self.device, self.is_initialized = layer.dtype, layer.device, True
        self.keys, self.values = layer.keys, layer.values
        self._both = Growing(layer.keys, spare), Growing(layer.values, spare)
        self._order: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Apply the pending order of rows, add the new tokens, and return keys and values."""
        new = (key_states, value_states)
        keys, values = (x.grow(self._order, y) for x, y in zip(self._both, new, strict=True))
        self.keys, self.values, self._order = keys, values, None
        return keys, values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select these rows at the next update."""
        self._order = beam_idx if self._order is None else self._order[beam_idx]


def let_grow(cache: Any) -> None:
    """Replace the layers of a cache that are plain dynamic layers by growing ones."""
    spare: Spare = []
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            cache.layers[i] = GrowingLayer(layer, spare)
