"""A model's KV cache on buffers of fixed shape, in two layouts.

*By rows*: the keys and values of a hypothesis are in its row, as transformers has them, and are
moved when it changes rows. Any attention can read them.

*By table*: keys and values stay where they were written, and a table says in which row of the
source each position of a hypothesis lies; the cross-attention has one row for each source. Only our
kernels can read this. The model is given tensors of the right shape that hold NaN, and passes them
on to the attention, which recognises them. Every layer counts how often it was read in this way, so
that a model that does something else with its keys is noticed and never computes with wrong ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from cpsbs.backends.triton import kernels
from cpsbs.backends.triton.attention import DTYPES


@dataclass
class Clock:
    """The positions at which all layers of a workspace write and read."""

    position: Tensor
    """[sources] the position of the latest token of each source"""
    window: int
    """How many positions are attended to"""
    own_positions: bool
    """Whether the model is told a position for each row, or one for all of them"""


class RowLayer(CacheLayerMixin):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """Keys and values [rows, heads, capacity, dim], written where the clock says."""

    keys: Tensor
    values: Tensor
    is_compileable = True
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, clock: Clock) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.keys, self.values, self._clock = keys, values, clock
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the buffers are there already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values, and return those of the window."""
        position, window = self._clock.position[:, None], self._clock.window
        at = position.expand(-1, len(self.keys) // len(position)).reshape(-1, 1, 1, 1)
        at = at.expand_as(key_states)
        self.keys.scatter_(2, at, key_states)
        self.values.scatter_(2, at, value_states)
        return self.keys[:, :, :window], self.values[:, :, :window]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of positions that are attended to, and the first of them."""
        return self._clock.window, 0

    def get_seq_length(self) -> Any:
        """Return how many tokens came before: a scalar tensor, as transformers' static cache does.

        If the model is told a position for each row, it is [rows, 1] instead.
        """
        position, rows = self._clock.position, len(self.keys)
        if not self._clock.own_positions:
            return position[0]
        return position.repeat_interleave(rows // len(position), output_size=rows)[:, None]

    def get_max_length(self) -> int:
        """Return how many tokens of a row there is room for."""
        return int(self.keys.shape[2])

    get_max_cache_shape = get_max_length


class FixedRowLayer(RowLayer):  # type: ignore[no-untyped-call, unused-ignore]
    """Keys and values [rows, heads, length, dim] of the cross-attention, which stay as they are."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raise, because the cache has told the model that it is filled."""
        raise ValueError("the model computes the keys and values of its cross-attention anew")

    def get_seq_length(self) -> int:
        """Return the length of the source."""
        return self.get_max_length()


class TableLayer(RowLayer):  # type: ignore[no-untyped-call, unused-ignore]
    """Keys and values [rows, heads, capacity, dim], found by the table [sources, K, capacity]."""

    def __init__(
        self, keys: Tensor, values: Tensor, clock: Clock, place: Tensor, together: bool
    ) -> None:
        keys_shown, values_shown = _placeholder(keys.shape, keys), _placeholder(keys.shape, keys)
        super().__init__(keys_shown, values_shown, clock)
        self._cache, self._place, self._together = (keys, values), place, together
        self.begin()

    def begin(self) -> None:
        """Prepare for a step."""
        self._given, self._read = 0, 0
        self._new: tuple[Tensor, Tensor] | None = None
        self._shown: tuple[Tensor | None, Tensor | None] = (None, None)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep the new keys and values, and return NaN in place of those of the window."""
        self._given += 1
        self._new = (key_states, value_states)
        window = self._clock.window
        shown = self.keys[:, :, :window], self.values[:, :, :window]
        self._shown = shown
        return shown

    def is_shown_as(self, key: Tensor, value: Tensor) -> bool:
        """Return whether these tensors are what ``update`` returned in this step."""
        return key is self._shown[0] and value is self._shown[1]

    def attend(
        self, query: Tensor, mask: Tensor | None, bias: Tensor | None, scaling: float | None
    ) -> Tensor | None:
        """Attend to the positions in the table, and write the new keys and values."""
        from cpsbs.backends.triton.kernels.attention import attend_by_table

        cache, clock, new = self._cache, self._clock, self._new
        expected = (*cache[0].shape[:2], 1, cache[0].shape[3])
        if new is None or any(x.shape != expected or x.dtype != cache[0].dtype for x in new):
            return None
        self._read, self._new, self._shown = self._read + 1, None, (None, None)
        return attend_by_table(
            *(query, new, cache, self._place, clock.position),
            *(mask, bias, scaling, clock.window, self._together),
        )

    def attend_to_parts(
        self, parts: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None, scaling: float
    ) -> Tensor | None:
        """Do what ``update`` and ``attend`` do, for queries, keys and values in one tensor.

        Args:
            parts: [n, rows, (heads + 2 kv heads) · dim] numbers that are sums over n parts.
            angles: cosines and sines [rows or 1, dim] of a rotation of queries and new keys.
            mask: what is added to the scores.
            scaling: the factor of the products.

        Returns:
            The output [rows, 1, heads, dim], or None if there is no kernel for it.
        """
        from cpsbs.backends.triton.kernels.attention import attend_in_tree, suits_tree

        cache, clock = self._cache, self._clock
        rows, shared, _, dim = cache[0].shape
        heads = parts.shape[-1] // dim - 2 * shared
        window = (1, clock.window)
        fits = mask is None or (mask.shape[0] in (1, rows) and mask.shape[2:] == window)
        if not fits or not suits_tree(heads // shared, dim, cache[0].dtype):
            return None
        every = parts[0].view(rows, -1, 1, dim)
        query, key, value = torch.split(every, [heads, shared, shared], dim=1)
        found = attend_in_tree(
            *(query, (key, value), cache, self._place, clock.position),
            *(mask, None, scaling, self._together),
            parts=parts,
            angles=angles,
        )
        if found is not None:
            self._given, self._read = self._given + 1, self._read + 1
        return found

    def was_read(self) -> bool:
        """Return whether all that the model was given in this step was read by the table, once."""
        return self._given == self._read <= 1


class SharedLayer(FixedRowLayer):  # type: ignore[no-untyped-call, unused-ignore]
    """Keys and values [sources, heads, length, dim] of the cross-attention, shared by K rows."""

    def __init__(self, keys: Tensor, values: Tensor, clock: Clock, k: int) -> None:
        size = (len(keys) * k, *keys.shape[1:])
        super().__init__(_placeholder(size, keys), _placeholder(size, keys), clock)
        self._cache, self._read = (keys, values), 0

    def begin(self) -> None:
        """Prepare for a step."""
        self._read = 0

    def is_shown_as(self, key: Tensor, value: Tensor) -> bool:
        """Return whether these tensors are what the model finds in this layer."""
        return key is self.keys and value is self.values

    def attend(
        self, query: Tensor, mask: Tensor | None, bias: Tensor | None, scaling: float | None
    ) -> Tensor | None:
        """Attend from all rows to their sources."""
        from cpsbs.backends.triton.kernels.attention import attend_shared

        self._read += 1
        return attend_shared(query, *self._cache, mask, bias, scaling)

    def was_read(self) -> bool:
        """Return whether the model attended to this layer in this step, once."""
        return self._read == 1


def _placeholder(size: tuple[int, ...], like: Tensor) -> Tensor:
    """Return NaN in this shape: whoever computes with it gets nothing that looks like a result."""
    return torch.full((1,) * len(size), math.nan, dtype=like.dtype, device=like.device).expand(size)


def table_is_possible(device: torch.device, dtype: torch.dtype, k: int) -> bool:
    """Return whether our kernels can read keys and values of this dtype with K rows a source."""
    if dtype not in DTYPES or not kernels.usable(device):
        return False
    from cpsbs.backends.triton.kernels.cache import MOST_ROWS

    return k <= MOST_ROWS
