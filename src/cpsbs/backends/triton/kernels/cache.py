"""The KV cache after every row has continued from another row of its source: by table or moved."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cpsbs.backends.triton.kernels.launching import kernel

TILE = 8192
"""The most elements that a program holds in registers."""

MOST_ROWS = 1024
"""The most rows of a source, because a program holds a part of all of them."""


@kernel
def _advance(
    place, mask, parents, position, k, capacity,
    PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (source, block): update BLOCK positions of the table for the source's K rows.

    Everything is read before anything is written, as rows exchange their entries.
    """
    source = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    here = tl.load(position + source)
    if start <= here:
        row = tl.arange(0, PADDED)
        exists = row < k
        parent = tl.load(parents + source * k + row, mask=exists, other=0)
        t = start + tl.arange(0, BLOCK)[None, :]
        before = (source * k + parent)[:, None] * capacity + t
        after = (source * k + row)[:, None] * capacity + t
        filled = exists[:, None] & (t <= here)
        holder = tl.load(place + before, mask=filled, other=0)
        # Threads read what other threads of the program write.
        tl.debug_barrier()
        tl.store(place + after, tl.where(t == here, row[:, None], holder), mask=filled)
        tl.store(mask + after, tl.zeros_like(holder), mask=filled & (t == here))


def advance(place: Tensor, mask: Tensor, parent: Tensor, position: Tensor, window: int) -> None:
    """Let every row hold what its parent held, where it lies, and a new position in its own row.

    Args:
        place: [b, K, capacity] int32, overwritten.
        mask: [b·K, 1, 1, capacity]; it becomes 0 at the new position.
        parent: [b, K] numbers 0 … K − 1 of rows of the same source.
        position: [b] the new position.
        window: a number above all positions that the host knows.
    """
    sources, k, capacity = place.shape
    padded = triton.next_power_of_2(k)
    block = min(32, TILE // padded)
    _advance[(sources, triton.cdiv(window, block))](
        place, mask, parent, position, k, capacity, PADDED=padded, BLOCK=block
    )


@kernel
def _move(
    states, parents, position, sources, k, heads, blocks, inner, dim,
    PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move BLOCK of the ``inner`` = capacity · dim elements of one head between K rows of a source.

    There is a program for each state, source, head and block.
    """
    program = tl.program_id(0).to(tl.int64)
    block = program % blocks
    head = program // blocks % heads
    source = program // blocks // heads % sources
    state = program // blocks // heads // sources
    end = tl.load(position + source) * dim
    if block * BLOCK < end:
        row = tl.arange(0, PADDED).to(tl.int64)
        parent = tl.load(parents + source * k + row, mask=row < k, other=0)
        at = block * BLOCK + tl.arange(0, BLOCK)
        moves = ((row < k) & (parent != row))[:, None] & (at < end)[None, :]
        here = states + ((state * sources + source) * k * heads + head) * inner + at[None, :]
        held = tl.load(here + parent[:, None] * heads * inner, mask=moves)
        # Threads read what other threads of the program write.
        tl.debug_barrier()
        tl.store(here + row[:, None] * heads * inner, held, mask=moves)


def move(states: Tensor, parent: Tensor, position: Tensor, window: int) -> None:
    """Replace the past of each row in states [n, b·K, heads, capacity, dim] by its parent's [b, K].

    What stands at a source's position [b] or behind it need not move; ``window`` is an upper bound
    of the positions that the host knows.
    """
    n, _, heads, capacity, dim = states.shape
    sources, k = parent.shape
    padded = triton.next_power_of_2(k)
    block = min(1024, TILE // padded)
    blocks = triton.cdiv(window * dim, block)
    _move[(n * sources * heads * blocks,)](
        states, parent, position, sources, k, heads, blocks, capacity * dim, dim,
        PADDED=padded, BLOCK=block, num_warps=8,
    )  # fmt: skip
