"""A model's cache on buffers of fixed shape, in two ways.

*By rows*: the keys and values of a hypothesis are in its row, as transformers has them; they move
when it changes rows. Any attention can read them.

*By table*: they stay where they were written, and a table says in which row of the source each
position of a hypothesis lies; the cross-attention has one row for a source. Only our kernels can
read this. The model is given tensors of the right shape that hold NaN, and hands them on to the
attention, where they are recognised. Whether every layer was read in this way is counted, so that
a model that does something else with its keys is noticed, and does not compute with wrong ones.
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
    """Where in the rows we are, for all layers of a workspace."""

    position: Tensor
    """[sources] of the tokens that came last"""
    window: int
    """How many positions are attended to."""
    each: int
    """Rows of a source, if the model is told the position of each; 0 if it is told one for all."""


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
        """Nothing is left to do."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The keys and values of the window, with the new ones."""
        position, window = self._clock.position[:, None], self._clock.window
        at = position.expand(-1, len(self.keys) // len(position)).reshape(-1, 1, 1, 1)
        at = at.expand_as(key_states)
        self.keys.scatter_(2, at, key_states)
        self.values.scatter_(2, at, value_states)
        return self.keys[:, :, :window], self.values[:, :, :window]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and start of what is attended to."""
        return self._clock.window, 0

    def get_seq_length(self) -> Any:
        """[] how many tokens came before; a tensor, as the static cache of transformers has it.

        Or [rows, 1], from which a model may compute the position of each row.
        """
        position, each = self._clock.position, self._clock.each
        return (
            position.repeat_interleave(each, output_size=each * len(position))[:, None]
            if each
            else position[0]
        )

    def get_max_length(self) -> int:
        """The capacity."""
        return int(self.keys.shape[2])

    get_max_cache_shape = get_max_length


class FixedRowLayer(RowLayer):  # type: ignore[no-untyped-call, unused-ignore]
    """Of the cross-attention: nothing is added."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Is not asked for, as the cache says that it has been filled."""
        raise ValueError("the keys and values of the cross-attention are computed anew")

    def get_seq_length(self) -> int:
        """The length of the source."""
        return self.get_max_length()


class TableLayer(RowLayer):  # type: ignore[no-untyped-call, unused-ignore]
    """Keys and values [rows, heads, capacity, dim], found by the table [sources, K, capacity]."""

    def __init__(self, keys: Tensor, values: Tensor, clock: Clock, place: Tensor) -> None:
        nothing, same = _nothing(keys.shape, keys), _nothing(keys.shape, keys)
        super().__init__(nothing, same, clock)
        self._cache, self._place = (keys, values), place
        self.begin()

    def begin(self) -> None:
        """A step."""
        self._given, self._read = 0, 0
        self._new: tuple[Tensor, Tensor] | None = None
        self._shown: tuple[Tensor | None, Tensor | None] = (None, None)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """What stands for the keys and values of the window."""
        self._given += 1
        self._new = (key_states, value_states)
        window = self._clock.window
        shown = self.keys[:, :, :window], self.values[:, :, :window]
        self._shown = shown
        return shown

    def is_meant(self, key: Tensor, value: Tensor) -> bool:
        """Whether these are what the model was given in this step."""
        return key is self._shown[0] and value is self._shown[1]

    def attend(
        self, query: Tensor, mask: Tensor | None, bias: Tensor | None, scaling: float | None
    ) -> Tensor | None:
        """Of queries to what the table says. The new keys and values are written."""
        from cpsbs.backends.triton.kernels.attention import attend_by_table

        cache, clock, new = self._cache, self._clock, self._new
        expected = (*cache[0].shape[:2], 1, cache[0].shape[3])
        if new is None or any(x.shape != expected or x.dtype != cache[0].dtype for x in new):
            return None
        self._read, self._new, self._shown = self._read + 1, None, (None, None)
        return attend_by_table(
            query, new, cache, self._place, clock.position, mask, bias, scaling, clock.window
        )

    def was_read(self) -> bool:
        """Whether all that the model was given in this step was read by the table, once."""
        return self._given == self._read <= 1


class SharedLayer(FixedRowLayer):  # type: ignore[no-untyped-call, unused-ignore]
    """Of the cross-attention: [sources, heads, length, dim], the same for K rows."""

    def __init__(self, keys: Tensor, values: Tensor, clock: Clock, k: int) -> None:
        size = (len(keys) * k, *keys.shape[1:])
        super().__init__(_nothing(size, keys), _nothing(size, keys), clock)
        self._cache, self._read = (keys, values), 0

    def begin(self) -> None:
        """A step."""
        self._read = 0

    def is_meant(self, key: Tensor, value: Tensor) -> bool:
        """Whether these are the layer's."""
        return key is self.keys and value is self.values

    def attend(
        self, query: Tensor, mask: Tensor | None, bias: Tensor | None, scaling: float | None
    ) -> Tensor | None:
        """Of the queries of all rows to their source."""
        from cpsbs.backends.triton.kernels.attention import attend_shared

        self._read += 1
        return attend_shared(query, *self._cache, mask, bias, scaling)

    def was_read(self) -> bool:
        """Whether the model attended to it in this step, once."""
        return self._read == 1


def _nothing(size: tuple[int, ...], like: Tensor) -> Tensor:
    """A shape. Who reads it nevertheless computes nothing that could be taken for a result."""
    return torch.full((1,) * len(size), math.nan, dtype=like.dtype, device=like.device).expand(size)


def table_is_possible(device: torch.device, dtype: torch.dtype, k: int) -> bool:
    """Whether our kernels can be what reads the keys and values."""
    if dtype not in DTYPES or not kernels.usable(device):
        return False
    from cpsbs.backends.triton.kernels.cache import MOST_ROWS

    return k <= MOST_ROWS
