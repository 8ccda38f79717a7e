"""Reordering the keys and values of all layers in place, without asking the device anything."""

from __future__ import annotations

import functools
import importlib
import logging
import math
from typing import Any

import torch
from torch import Tensor

TILE = 8192
"""The most elements that one program of the kernel holds in registers."""

log = logging.getLogger("cpsbs")


def reorder(states: Tensor, parent: Tensor, since: Tensor, length: Tensor, window: int) -> None:
    """Let every row go on from what its parent holds.

    Args:
        states: [n, b·K, heads, capacity, dim], overwritten.
        parent: [b, K] numbers 0 … K − 1 of rows of the same source.
        since: [b, K] from which position on a row and its parent may differ.
        length: [1] how many positions are filled. What is behind them need not move.
        window: a number not below the length, known to the host.
    """
    if states.is_cuda and parent.shape[1] <= TILE // 8 and kernel_works(states.device):
        reorder_by_kernel(states, parent, since, length, window)
    else:
        reorder_by_copy(states, parent, window)


def reorder_by_copy(states: Tensor, parent: Tensor, window: int) -> None:
    """With a copy of one layer's keys or values at a time."""
    sources, k = parent.shape
    first = torch.arange(0, sources * k, k, device=parent.device)
    rows = (first[:, None] + parent).flatten()
    for state in states[:, :, :, :window]:
        state.copy_(state.index_select(0, rows))


def reorder_by_kernel(
    states: Tensor, parent: Tensor, since: Tensor, length: Tensor, window: int
) -> None:
    """In place: a program reads its part of all rows of a source before it writes any."""
    n, _, heads, capacity, dim = states.shape
    sources, k = parent.shape
    padded = 1 << (k - 1).bit_length()
    block = min(1024, TILE // padded)
    blocks = math.ceil(window * dim / block)
    programs = (n * sources * heads * blocks,)
    sizes = (sources, k, heads, blocks, capacity * dim, dim)
    _kernel()[programs](
        states, parent, since, length, *sizes, PADDED=padded, BLOCK=block, num_warps=8
    )


tl: Any = None
"""triton.language, once there is use for it."""


# The arguments have no types because Triton would have to know them.
def _move(  # type: ignore[no-untyped-def]
    states,
    parents,
    since,
    length,
    sources,
    k,
    heads,
    blocks,
    inner,
    dim,
    PADDED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """A block of the elements [inner] that a head has in each of the K rows of a source."""
    program = tl.program_id(0).to(tl.int64)
    block = program % blocks
    head = program // blocks % heads
    source = program // blocks // heads % sources
    state = program // blocks // heads // sources
    end = tl.load(length) * dim
    if block * BLOCK < end:
        row = tl.arange(0, PADDED).to(tl.int64)
        parent = tl.load(parents + source * k + row, mask=row < k, other=0)
        place = block * BLOCK + tl.arange(0, BLOCK)
        start = tl.load(since + source * k + row, mask=row < k, other=0) * dim
        moves = ((row < k) & (parent != row))[:, None] & (place < end)[None, :]
        moves = moves & (place[None, :] >= start[:, None])
        here = states + ((state * sources + source) * k * heads + head) * inner + place[None, :]
        held = tl.load(here + parent[:, None] * heads * inner, mask=moves)
        # The threads of a program read what others of them write.
        tl.debug_barrier()
        tl.store(here + row[:, None] * heads * inner, held, mask=moves)


@functools.cache
def _kernel() -> Any:
    global tl
    triton: Any = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
    return triton.jit(_move)


@functools.cache
def kernel_works(device: torch.device) -> bool:
    """Whether there is a Triton, and a compiler for it."""
    states = torch.arange(6.0, device=device).view(1, 3, 1, 2, 1)
    try:
        parent = torch.tensor([[2, 0, 0]], device=device)
        since, length = torch.zeros_like(parent), torch.ones_like(parent[0, :1])
        reorder_by_kernel(states, parent, since, length, 2)
        return states.flatten().tolist() == [4, 1, 0, 3, 0, 5]
    except Exception as error:
        log.info("the cache is reordered without Triton: %s: %s", type(error).__name__, error)
        return False
