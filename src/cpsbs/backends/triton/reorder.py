"""Moves the keys and values of all layers between rows, without host–device synchronisation.

This is for models that cannot read their KV cache by the table (see ``layers``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpsbs.backends.triton import kernels


def reorder(states: Tensor, parent: Tensor, position: Tensor, window: int) -> None:
    """Replace the past of every row by its parent's.

    Args:
        states: [n, b·K, heads, capacity, dim], overwritten.
        parent: [b, K] numbers 0 … K − 1 of rows of the same source.
        position: [b] how many positions are filled; those behind them need not move.
        window: an upper bound of the positions that the host knows.
    """
    if states.is_cuda and kernels.usable(states.device):
        from cpsbs.backends.triton.kernels.cache import MOST_ROWS, move

        if parent.shape[1] <= MOST_ROWS:
            move(states, parent, position, window)
            return
    reorder_by_copy(states, parent, window)


def reorder_by_copy(states: Tensor, parent: Tensor, window: int) -> None:
    """Do the same with torch, by a copy of one layer's keys or values at a time."""
    sources, k = parent.shape
    first = torch.arange(0, sources * k, k, device=parent.device)
    rows = (first[:, None] + parent).flatten()
    for state in states[:, :, :, :window]:
        state.copy_(state.index_select(0, rows))
