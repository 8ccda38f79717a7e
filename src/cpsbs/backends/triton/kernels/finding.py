"""The largest candidates of each source.

``find_head`` finds the head, the m largest candidates of each source, in one launch (see
``Chunks.find_largest``). A program handles one source. The m chunks with the largest maxima hold
the whole head. So do those of their members that are no less than the smallest of these m maxima,
and these are few: hardly more than m. Both times the m-th largest number is found by bisection over
float32 numbers as integers in the same order, counting how many are at least as large.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from cpsbs.backends.triton.kernels.numbers import host_number, log_odds, scaled
from cpsbs.scores.reading import Chunks

LOWEST: tl.constexpr = tl.constexpr(-2139095041)
"""The integer that stands for -inf"""

ABOVE_ALL: tl.constexpr = tl.constexpr(2139095041)
"""One more than the integer that stands for inf"""

NOTHING: tl.constexpr = tl.constexpr(-(2**31))
"""Less than the integer that stands for any number"""

LAST: tl.constexpr = tl.constexpr(0x7FFFFFFF)
"""The largest int32: x ^ LAST reverses the order of numbers x from 0 on"""

CHUNKS: tl.constexpr = tl.constexpr(8192)
"""Chunks, or members of chunks, of which a program reads at most so many at a time"""

MOST_HELD = 2**14
"""The most chunks of a source whose keys a program holds in registers"""

NEAR: tl.constexpr = tl.constexpr(1024)
"""Members that may belong to the head, of which a program reads so many at a time"""

RANKED: tl.constexpr = tl.constexpr(256)
SLICE: tl.constexpr = tl.constexpr(32)
"""Members of the head are ranked RANKED at a time, by comparing them with SLICE at a time."""


@triton.jit
def _ordered(x):
    """Return float64 numbers as int32 in the order of float32; NaN is the smallest."""
    x = tl.where(x == x, x, -float("inf")).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _counts(keys, count, a, b, c, BELOW_ALL: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many of the keys are at least a, b and c, which are above BELOW_ALL."""
    # Three counts of 21 bits share an integer, so that one reduction adds up all of them.
    found = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        key = tl.load(keys + place, mask=place < count, other=BELOW_ALL)
        found += (key >= a.to(key.dtype)).to(tl.int64)
        found += (key >= b.to(key.dtype)).to(tl.int64) << 21
        found += (key >= c.to(key.dtype)).to(tl.int64) << 42
    both = tl.sum(found, axis=0)
    return both & 0x1FFFFF, (both >> 21) & 0x1FFFFF, both >> 42


@triton.jit
def _narrowed(wanted, low, high, a, b, c, at_a, at_b, at_c):
    """Return the bounds after one round: at_a keys are at least a, and so on."""
    first_below = tl.where(at_a < wanted, a, tl.where(at_b < wanted, b, c))
    first_below = tl.where(at_c >= wanted, high, first_below)
    low = tl.where(at_a >= wanted, a, low)
    low = tl.where(at_b >= wanted, b, low)
    low = tl.where(at_c >= wanted, c, low)
    high = tl.minimum(first_below, high)
    # If exactly ``wanted`` keys are at least as large, the bisection is over.
    exact = (at_a == wanted) | (at_b == wanted) | (at_c == wanted)
    return low, tl.where(exact, low + 1, high)


@triton.jit
def nth_largest(keys, count, wanted, low, high, BELOW_ALL: tl.constexpr, BLOCK: tl.constexpr):
    """Return the ``wanted``-th largest key, and how many of its ties are among the ``wanted``.

    Keys are int32 or int64; ``low`` is at most any of the ``wanted`` largest and ``high`` above
    all, both int64. A round leaves a quarter of the range.
    """
    while high > low + 1:
        # high − low may overflow for int64 keys.
        quarter = tl.maximum((high >> 2) - (low >> 2), 1)
        a, b, c = low + quarter, low + 2 * quarter, low + 3 * quarter
        at_a, at_b, at_c = _counts(keys, count, a, b, c, BELOW_ALL, BLOCK)
        low, high = _narrowed(wanted, low, high, a, b, c, at_a, at_b, at_c)
    above, _, _ = _counts(keys, count, low + 1, low + 1, low + 1, BELOW_ALL, BLOCK)
    return low, (wanted - above).to(tl.int32)


@triton.jit
def _nth_in_registers(key, wanted, low, high):
    """Return what ``nth_largest`` does, of int32 keys that a program holds in registers."""
    while high > low + 1:
        quarter = tl.maximum((high >> 2) - (low >> 2), 1)
        a, b, c = low + quarter, low + 2 * quarter, low + 3 * quarter
        found = (key >= a.to(tl.int32)).to(tl.int64)
        found += (key >= b.to(tl.int32)).to(tl.int64) << 21
        found += (key >= c.to(tl.int32)).to(tl.int64) << 42
        both = tl.sum(found, axis=0)
        low, high = _narrowed(
            wanted, low, high, a, b, c, both & 0x1FFFFF, (both >> 21) & 0x1FFFFF, both >> 42
        )
    above = tl.sum((key > low.to(tl.int32)).to(tl.int32), axis=0)
    return low, wanted - above


@triton.jit
def taken(key, level, ties, tied):
    """Return which keys of a block are taken: all above the level, and its first ``ties`` equals.

    ``tied`` equals came before this block; how many came up to its end is returned too.
    """
    level = level.to(key.dtype)
    equal = (key == level).to(tl.int32)
    number = tied + tl.cumsum(equal, axis=0)
    take = (key > level) | ((equal > 0) & (number <= ties))
    return take.to(tl.int32), tied + tl.sum(equal, axis=0)


NUMBERS = ["m", "slots", "parents", "tokens", "chunks"]
"""Arguments that differ between searches; to compile a variant for a value takes seconds."""


@triton.jit
def _chunk_keys(maxima, offset, chunk, here, chunks, inverse_temperature):
    """Return the maxima of chunks plus the offsets of their parents, as integers."""
    top = tl.load(maxima + chunk, mask=here, other=0.0)
    shift = tl.load(offset + chunk // chunks, mask=here, other=0.0)
    return _ordered(scaled(top, inverse_temperature) + shift)


@triton.jit
def _choose_held(
    maxima, offset, inverse_temperature, slot_of, chosen, count, slots, chunks, lowest, above_all,
    HELD: tl.constexpr,
):  # fmt: skip
    """Note the ``slots`` chunks with the largest maxima; return the smallest of these as a key."""
    chunk = tl.arange(0, HELD)
    here = chunk < count
    key = _chunk_keys(maxima, offset, chunk, here, chunks, inverse_temperature)
    key = tl.where(here, key, NOTHING)
    level, ties = _nth_in_registers(key, slots, lowest, above_all)
    # The number of keys above the level and of those on it share an integer.
    equal, above = key == level.to(tl.int32), key > level.to(tl.int32)
    both = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
    take = above | (equal & ((both >> 16) <= ties))
    slot = (both & 0xFFFF) + tl.minimum(both >> 16, ties)
    tl.store(slot_of + chunk, tl.where(take, slot, 0), mask=here)
    tl.store(chosen + slot - 1, chunk, mask=take)
    return level


@triton.jit
def _choose_by_blocks(
    maxima, offset, inverse_temperature, keys, slot_of, chosen,
    count, slots, chunks, lowest, above_all,
):  # fmt: skip
    """Do the same for more chunks than a program can hold."""
    for start in range(0, count, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        here = chunk < count
        key = _chunk_keys(maxima, offset, chunk, here, chunks, inverse_temperature)
        tl.store(keys + chunk, key, mask=here)
    tl.debug_barrier()
    level, ties = nth_largest(keys, count, slots, lowest, above_all, NOTHING, CHUNKS)
    before, tied = 0, 0
    for start in range(0, count, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        here = chunk < count
        key = tl.load(keys + chunk, mask=here, other=NOTHING)
        take, tied = taken(key, level, ties, tied)
        slot = before + tl.cumsum(take, axis=0)
        tl.store(slot_of + chunk, slot * take, mask=here)
        tl.store(chosen + slot - 1, chunk, mask=take > 0)
        before += tl.sum(take, axis=0)
    return level


@triton.jit(do_not_specialize=NUMBERS)
def _find(
    scores, maxima, offset, inverse_temperature,
    keys, near, places, found, chosen, slot_of, bits, values, index,
    m, slots, parents, tokens, chunks,
    KIND: tl.constexpr, LENGTH: tl.constexpr, HELD: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Find the m largest candidates of one source, in descending order, and mark them in ``bits``.

    ``slots`` = min(m, P·C) chunks are looked into; all else is scratch memory. If HELD > 0, a
    program holds the keys of all chunks, at most HELD, in registers. It reads MEMBERS members of
    chunks at a time.
    """
    source = tl.program_id(0).to(tl.int64)
    inverse_temperature = tl.load(inverse_temperature)
    count = parents * chunks
    scores += source * parents * tokens
    offset += source * parents
    maxima += source * count
    keys += source * count
    slot_of += source * count
    chosen += source * slots
    near += source * slots * LENGTH
    places += source * slots * LENGTH
    bits += source * slots * (LENGTH // 32)
    found += source * m

    # Find the chunks with the largest maxima.
    lowest = tl.zeros((), tl.int64) + LOWEST
    above_all = tl.zeros((), tl.int64) + ABOVE_ALL
    if HELD > 0:
        level = _choose_held(
            maxima, offset, inverse_temperature, slot_of, chosen,
            count, slots, chunks, lowest, above_all, HELD,
        )  # fmt: skip
    else:
        level = _choose_by_blocks(
            maxima, offset, inverse_temperature, keys, slot_of, chosen,
            count, slots, chunks, lowest, above_all,
        )  # fmt: skip
    tl.debug_barrier()

    # Collect their members that are no less; all of them, if there are fewer than m chunks.
    level = tl.where(slots < m, lowest, level)
    size = 0
    for start in range(0, slots * LENGTH, MEMBERS):
        place = start + tl.arange(0, MEMBERS)
        chunk = tl.load(chosen + place // LENGTH, mask=place < slots * LENGTH, other=0)
        parent, token = chunk // chunks, chunk % chunks * LENGTH + place % LENGTH
        inside = (place < slots * LENGTH) & (token < tokens)
        score = tl.load(scores + parent.to(tl.int64) * tokens + token, mask=inside, other=0.0)
        shift = tl.load(offset + parent, mask=inside, other=0.0)
        key = _ordered(scaled(score, inverse_temperature) + shift)
        close = (inside & (key >= level.to(tl.int32))).to(tl.int32)
        at = size + tl.cumsum(close, axis=0) - 1
        tl.store(near + at, key, mask=close > 0)
        tl.store(places + at, place, mask=close > 0)
        size += tl.sum(close, axis=0)
        first = (place < slots * LENGTH) & (place % 32 == 0)
        tl.store(bits + place // 32, tl.zeros_like(place), mask=first)
    tl.debug_barrier()
    if size <= NEAR:
        each = tl.arange(0, NEAR)
        every_key = tl.load(near + each, mask=each < size, other=NOTHING)
        level, ties = _nth_in_registers(every_key, m, level, above_all)
    else:
        level, ties = nth_largest(near, size, m, level, above_all, NOTHING, NEAR)
    before, tied = 0, 0
    for start in range(0, size, NEAR):
        place = start + tl.arange(0, NEAR)
        key = tl.load(near + place, mask=place < size, other=NOTHING)
        take, tied = taken(key, level, ties, tied)
        own = tl.load(places + place, mask=place < size, other=0)
        # Key and place share an integer, in which the first of equal keys is the largest.
        both = (key.to(tl.int64) << 32) | (own ^ LAST).to(tl.int64)
        tl.store(found + before + tl.cumsum(take, axis=0) - 1, both, mask=take > 0)
        before += tl.sum(take, axis=0)
    tl.debug_barrier()

    # Write them in descending order.
    for first in range(0, m, RANKED):
        number = first + tl.arange(0, RANKED)
        here = number < m
        own = tl.load(found + number, mask=here, other=LAST)
        rank = tl.zeros((RANKED,), tl.int32)
        for start in range(0, m, SLICE):
            place = start + tl.arange(0, SLICE)
            other = tl.load(found + place, mask=place < m, other=0)
            larger = (other[None, :] > own[:, None]) & (place < m)[None, :]
            rank += tl.sum(larger.to(tl.int32), axis=1)
        place = (own & LAST).to(tl.int32) ^ LAST
        chunk = tl.load(chosen + place // LENGTH)
        parent, token = chunk // chunks, chunk % chunks * LENGTH + place % LENGTH
        item = parent.to(tl.int64) * tokens + token
        value = scaled(tl.load(scores + item), inverse_temperature) + tl.load(offset + parent)
        value = tl.where(value == value, value, -float("inf"))
        if KIND != "log-probability":
            value = tl.minimum(value, 0.0)
        if KIND == "odds":
            value = log_odds(value)
        tl.store(values + source * m + rank, value, mask=here)
        tl.store(index + source * m + rank, item, mask=here)
        bit = tl.full((RANKED,), 1, tl.int32) << (place % 32)
        tl.atomic_or(bits + place // 32, bit, mask=here)


Kind = Literal["log-probability", "probability", "odds"]
"""What the values are: log p as it is, or the logarithms of weights p ≤ 1 or p/(1 − p)."""


@dataclass(frozen=True)
class Head:
    """The m largest candidates of R sources, and the S chunks of each source that hold them."""

    values: Tensor
    """[R, m] float64, in descending order"""
    index: Tensor
    """[R, m] the candidates"""
    chosen: Tensor
    """[R, S] int32, the chunks that were looked into"""
    slot_of: Tensor
    """[R, P·C] int32, one more than the place of a chunk in ``chosen``, or 0"""
    bits: Tensor
    """[R, S, length / 32] int32, a bit for each member of these chunks that is among the m"""


def find_head(chunks: Chunks, offset: Tensor, m: int, kind: Kind) -> Head:
    """Find the m candidates with the largest score + offset [R, P].

    There must be at least m candidates, and m is at most MOST_IN_HEAD.
    """
    sources, parents, tokens = chunks.shape
    per_parent, length = chunks.maxima.shape[-1], chunks.length
    slots = min(m, parents * per_parent)
    held = triton.next_power_of_2(parents * per_parent)
    held = held if held <= MOST_HELD else 0
    device = offset.device

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty((sources, *shape), dtype=dtype, device=device)

    head = Head(
        empty(m, dtype=torch.float64),
        empty(m, dtype=torch.int64),
        empty(slots),
        empty(parents * per_parent),
        empty(slots, length // 32),
    )
    _find[(sources,)](
        chunks.scores.contiguous(), chunks.maxima.contiguous(), offset.contiguous(),
        host_number(1 / chunks.temperature, device),
        empty(0 if held else parents * per_parent), empty(slots * length), empty(slots * length),
        empty(m, dtype=torch.int64),
        head.chosen, head.slot_of, head.bits, head.values, head.index,
        m, slots, parents, tokens, per_parent,
        KIND=kind, LENGTH=length, HELD=max(held, 32) if held else 0,
        MEMBERS=min(CHUNKS.value, triton.next_power_of_2(slots * length)), num_warps=16,
    )  # fmt: skip
    return head
