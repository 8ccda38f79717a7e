"""The m largest candidates of each source, in one launch; see ``Chunks.find_largest``.

A program looks at one source. The m chunks with the largest maxima hold all of them. So do those of
their members that are no less than the smallest of these m maxima, and those are few: hardly more
than m. Both times the m-th largest number is found by bisection: of float32 numbers as integers in
the same order, by counting how many are at least so large.
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
"""The integer of -inf."""

ABOVE_ALL: tl.constexpr = tl.constexpr(2139095041)
"""One more than the integer of inf."""

NOTHING: tl.constexpr = tl.constexpr(-(2**31))
"""Less than the integer of any number."""

LAST: tl.constexpr = tl.constexpr(0x7FFFFFFF)

CHUNKS: tl.constexpr = tl.constexpr(8192)
"""Chunks, or members of chunks, that a program looks at together."""

NEAR: tl.constexpr = tl.constexpr(1024)
"""The same of members that may be among the largest."""

RANKED: tl.constexpr = tl.constexpr(256)
SLICE: tl.constexpr = tl.constexpr(32)
"""Of the m largest, so many are compared with so many at a time."""


@triton.jit
def _ordered(x):
    """Float64 as int32 in the order of float32; what is no number comes last."""
    x = tl.where(x == x, x, -float("inf")).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _counts(keys, count, a, b, c, BELOW_ALL: tl.constexpr, BLOCK: tl.constexpr):
    """How many of the keys are at least a, b and c, which are above BELOW_ALL."""
    # Three counts in one number, so that threads wait for each other once.
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
def nth_largest(keys, count, wanted, low, high, BELOW_ALL: tl.constexpr, BLOCK: tl.constexpr):
    """The key of which there are ``wanted`` at least as large, and how many ties are wanted.

    Keys are int32 or int64; ``low`` is at most any of the ``wanted`` largest and ``high`` above
    all, both int64. No more keys than ``wanted`` are above the one found; those that equal it make
    up the number. A round leaves a quarter of the range.
    """
    while high > low + 1:
        # The range of int64 keys is no int64.
        quarter = tl.maximum((high >> 2) - (low >> 2), 1)
        a, b, c = low + quarter, low + 2 * quarter, low + 3 * quarter
        at_a, at_b, at_c = _counts(keys, count, a, b, c, BELOW_ALL, BLOCK)
        first_below = tl.where(at_a < wanted, a, tl.where(at_b < wanted, b, c))
        first_below = tl.where(at_c >= wanted, high, first_below)
        low = tl.where(at_a >= wanted, a, low)
        low = tl.where(at_b >= wanted, b, low)
        low = tl.where(at_c >= wanted, c, low)
        high = tl.minimum(first_below, high)
        # With just as many as are wanted, the search is over.
        exact = (at_a == wanted) | (at_b == wanted) | (at_c == wanted)
        high = tl.where(exact, low + 1, high)
    above, _, _ = _counts(keys, count, low + 1, low + 1, low + 1, BELOW_ALL, BLOCK)
    return low, (wanted - above).to(tl.int32)


@triton.jit
def taken(key, level, ties, tied):
    """Which keys of a block are taken: those above the level, and of its equals the first few.

    ``tied`` equals were before this block; also how many are after it.
    """
    level = level.to(key.dtype)
    equal = (key == level).to(tl.int32)
    number = tied + tl.cumsum(equal, axis=0)
    take = (key > level) | ((equal > 0) & (number <= ties))
    return take.to(tl.int32), tied + tl.sum(equal, axis=0)


NUMBERS = ["m", "slots", "parents", "tokens", "chunks"]
"""Arguments that differ from search to search; compiling for certain values takes seconds."""


@triton.jit(do_not_specialize=NUMBERS)
def _find(
    scores, maxima, offset, inverse_temperature,
    keys, near, places, found, chosen, slot_of, bits, values, index,
    m, slots, parents, tokens, chunks,
    KIND: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """The largest of one source."""
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

    # The chunks with the largest maxima.
    for start in range(0, count, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        here = chunk < count
        top = tl.load(maxima + chunk, mask=here, other=0.0)
        shift = tl.load(offset + chunk // chunks, mask=here, other=0.0)
        tl.store(keys + chunk, _ordered(scaled(top, inverse_temperature) + shift), mask=here)
    tl.debug_barrier()
    lowest = tl.zeros((), tl.int64) + LOWEST
    above_all = tl.zeros((), tl.int64) + ABOVE_ALL
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
    tl.debug_barrier()

    # Those of their members that are no less; all of them, if there are fewer than m chunks.
    level = tl.where(slots < m, lowest, level)
    size = 0
    for start in range(0, slots * LENGTH, CHUNKS):
        place = start + tl.arange(0, CHUNKS)
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
    level, ties = nth_largest(near, size, m, level, above_all, NOTHING, NEAR)
    before, tied = 0, 0
    for start in range(0, size, NEAR):
        place = start + tl.arange(0, NEAR)
        key = tl.load(near + place, mask=place < size, other=NOTHING)
        take, tied = taken(key, level, ties, tied)
        own = tl.load(places + place, mask=place < size, other=0)
        # In one number, so that the first of equals is the largest.
        both = (key.to(tl.int64) << 32) | (own ^ LAST).to(tl.int64)
        tl.store(found + before + tl.cumsum(take, axis=0) - 1, both, mask=take > 0)
        before += tl.sum(take, axis=0)
    tl.debug_barrier()

    # In descending order.
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
"""The largest what: log p as it is, logarithms of weights p ≤ 1, or of p/(1 − p)."""


@dataclass(frozen=True)
class Head:
    """The m largest candidates of R sources, and the chunks that they are in."""

    values: Tensor
    """[R, m] float64, descending."""
    index: Tensor
    """[R, m]"""
    chosen: Tensor
    """[R, S] int32, the chunks that were looked at."""
    slot_of: Tensor
    """[R, P·C] int32, one more than the place of a chunk in ``chosen``, or 0."""
    bits: Tensor
    """[R, S, length / 32] int32, which members of these chunks are among the m."""


def find_head(chunks: Chunks, offset: Tensor, m: int, kind: Kind) -> Head:
    """The largest scores plus offset [R, P].

    m is at most MOST_IN_HEAD, and there are at least m candidates.
    """
    sources, parents, tokens = chunks.shape
    per_parent, length = chunks.maxima.shape[-1], chunks.length
    slots = min(m, parents * per_parent)
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
        empty(parents * per_parent), empty(slots * length), empty(slots * length),
        empty(m, dtype=torch.int64),
        head.chosen, head.slot_of, head.bits, head.values, head.index,
        m, slots, parents, tokens, per_parent,
        KIND=kind, LENGTH=length, num_warps=16,
    )  # fmt: skip
    return head
