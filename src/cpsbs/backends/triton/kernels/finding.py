"""The largest candidates of each source.

``find_head`` finds the head, the m largest candidates of each source, in three launches (see
``Chunks.find_largest``):

1. ``_choose`` finds the m chunks of each source with the largest maxima, which hold the whole head;
2. ``_collect`` collects those of their members that are above the smallest of these m maxima, and
   these are few: hardly more than m;
3. ``_rank`` counts for each of these how many are larger, which is its place in the head.

Only ``_choose`` needs to see all of a source at once. It finds the m-th largest maximum by
bisection over float32 numbers as integers in the same order, counting how many are at least as
large. What takes time there are these counts, which all warps of a program wait for, so that there
should be few of them. The other two have several programs for each source, because most of a GPU
would be idle otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from cpsbs.backends.triton.kernels.launching import kernel
from cpsbs.backends.triton.kernels.numbers import host_number, log_odds, scaled
from cpsbs.scores.reading import Chunks

LOWEST: tl.constexpr = tl.constexpr(-2139095041)
"""The integer that stands for -inf"""

ABOVE_ALL: tl.constexpr = tl.constexpr(2139095041)
"""One more than the integer that stands for inf"""

NOTHING: tl.constexpr = tl.constexpr(-(2**31))
"""Less than the integer that stands for any number"""

NO_MEMBER: tl.constexpr = tl.constexpr(-(2**63))
"""Less than the key and place of any member"""

LAST: tl.constexpr = tl.constexpr(0x7FFFFFFF)
"""The largest int32: x ^ LAST reverses the order of numbers x from 0 on"""

CHUNKS: tl.constexpr = tl.constexpr(8192)
"""Chunks, or members of chunks, of which a program reads at most so many at a time"""

MOST_HELD = 2**14
"""The most chunks of a source whose keys a program holds in registers; two counts of so many share
an int32"""

CHOOSE_WARPS = 16
"""Warps of a program that chooses chunks"""

COLLECTED = 1024
"""Members of chunks that a program collects from, if a chunk is not longer"""

COLLECT_WARPS = 4
"""Warps of such a program"""

RANKED = 32
SLICE = 256
"""Members are ranked RANKED at a time, by comparing them with SLICE at a time."""

RANK_WARPS = 4
"""Warps of a program that ranks members"""

RANKERS = 8
"""The most programs that rank the members of a source"""

NEAR = 2048
"""If more than m and so many members are collected, the m largest are found before any are
ranked."""

BLOCK: tl.constexpr = tl.constexpr(1024)
"""Members that are read at a time to find these"""

SEGMENTS: tl.constexpr = tl.constexpr(32)
"""Segments that are looked at at a time for members on the level"""


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
    """Return what ``nth_largest`` does, of at most MOST_HELD int32 keys in registers.

    The number of ties may be larger if all of them are among the ``wanted``.
    """
    # As many keys are at least low and high, as far as is known.
    at_low, at_high = wanted + 1, 0
    while (high > low + 1) & (at_low != wanted):
        third = tl.maximum((high - low) // 3, 1)
        # Where fewer than ``wanted`` keys are above -inf, the first round shows it.
        a, b = tl.where(low == LOWEST, low + 1, low + third), low + 2 * third
        found = (key >= a.to(tl.int32)).to(tl.int32)
        found += (key >= b.to(tl.int32)).to(tl.int32) << 16
        # A GPU adds up one int32 of all threads of a warp in one instruction.
        both = tl.sum(found, axis=0)
        at_a, at_b = both & 0xFFFF, both >> 16
        high = tl.where(at_a < wanted, a, tl.where(at_b < wanted, b, high))
        at_high = tl.where(at_a < wanted, at_a, tl.where(at_b < wanted, at_b, at_high))
        low = tl.where(at_b >= wanted, b, tl.where(at_a >= wanted, a, low))
        at_low = tl.where(at_b >= wanted, at_b, tl.where(at_a >= wanted, at_a, at_low))
    return low, tl.where(at_low == wanted, wanted, wanted - at_high)


@triton.jit
def _running(number, COUNT: tl.constexpr):
    """Return the running sums [COUNT] of int32 numbers, the own number included."""
    # In a single scan every thread would add up the sums of all groups of 32 by itself.
    rows = tl.reshape(number, (COUNT // 32, 32))
    total = tl.sum(rows, axis=1)
    before = tl.cumsum(total, axis=0) - total
    return tl.reshape(before[:, None] + tl.cumsum(rows, axis=1), (COUNT,))


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


NUMBERS = ["m", "slots", "parents", "tokens", "chunks", "segments", "programs", "most"]
"""Arguments that differ between searches; to compile a variant for a value takes seconds."""


@triton.jit
def _chunk_keys(maxima, offset, chunk, here, chunks, inverse_temperature):
    """Return the maxima of chunks plus the offsets of their parents, as integers."""
    top = tl.load(maxima + chunk, mask=here, other=0.0)
    shift = tl.load(offset + chunk // chunks, mask=here, other=0.0)
    return _ordered(scaled(top, inverse_temperature) + shift)


@triton.jit
def _choose_held(
    maxima, offset, inverse_temperature, slot_of, chosen, count, slots, chunks, lowest,
    HELD: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Note the ``slots`` chunks with the largest maxima; return the smallest of these as a key."""
    chunk = tl.arange(0, HELD)
    here = chunk < count
    key = _chunk_keys(maxima, offset, chunk, here, chunks, inverse_temperature)
    key = tl.where(here, key, NOTHING)
    # Each of GROUPS ≥ ``slots`` groups has a key that is no less than the smallest of their maxima.
    largest = tl.max(tl.reshape(key, (HELD // GROUPS, GROUPS)), axis=0)
    low = tl.maximum(tl.min(largest, axis=0).to(tl.int64), lowest)
    high = tl.max(largest, axis=0).to(tl.int64) + 1
    level, ties = _nth_in_registers(key, slots, low, high)
    # The number of keys above the level and of those on it share an integer.
    equal, above = key == level.to(tl.int32), key > level.to(tl.int32)
    both = _running(above.to(tl.int32) + (equal.to(tl.int32) << 16), HELD)
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


@kernel(do_not_specialize=NUMBERS)
def _choose(
    maxima, offset, inverse_temperature, keys, slot_of, chosen, levels, sizes,
    m, slots, parents, chunks,
    HELD: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Find the ``slots`` = min(m, P·C) chunks of one source with the largest maxima.

    At least m of their members are no less than the level. If HELD > 0, a program holds the keys of
    all chunks, at most HELD, in registers.
    """
    source = tl.program_id(0).to(tl.int64)
    inverse_temperature = tl.load(inverse_temperature)
    count = parents * chunks
    offset += source * parents
    maxima += source * count
    slot_of += source * count
    chosen += source * slots
    lowest = tl.zeros((), tl.int64) + LOWEST
    if HELD > 0:
        level = _choose_held(
            maxima, offset, inverse_temperature, slot_of, chosen,
            count, slots, chunks, lowest, HELD, GROUPS,
        )  # fmt: skip
    else:
        level = _choose_by_blocks(
            maxima, offset, inverse_temperature, keys + source * count, slot_of, chosen,
            count, slots, chunks, lowest, tl.zeros((), tl.int64) + ABOVE_ALL,
        )  # fmt: skip
    tl.store(levels + source, tl.where(slots < m, lowest, level).to(tl.int32))
    tl.store(sizes + source, 0)


@kernel(do_not_specialize=NUMBERS)
def _collect(
    scores, offset, inverse_temperature, chosen, levels, sizes, near, ties, tied, bits,
    slots, parents, tokens, chunks, segments,
    LENGTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Program (source, segment): collect members of GROUP chosen chunks; set their bits to zero.

    Key and place of those above the level are appended to ``near`` [slots · LENGTH], as one integer
    in which the first of equal keys is the largest. No two are equal, so that it does not matter
    that programs append in any order. The places of those on the level are noted in ``tied``, in
    their order and from the first place of the segment on, and their number in ``ties``.
    """
    source = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    slot = segment * GROUP + tl.arange(0, GROUP)
    here = slot < slots
    chunk = tl.load(chosen + source * slots + slot, mask=here, other=0)
    parent = source * parents + chunk // chunks
    token = (chunk % chunks * LENGTH)[:, None] + tl.arange(0, LENGTH)[None, :]
    inside = here[:, None] & (token < tokens)
    score = tl.load(scores + (parent * tokens)[:, None] + token, mask=inside, other=0.0)
    shift = tl.load(offset + parent)[:, None]
    level = tl.load(levels + source)
    key = _ordered(scaled(score, tl.load(inverse_temperature)) + shift)
    key = tl.reshape(tl.where(inside, key, NOTHING), (GROUP * LENGTH,))
    # The number of keys above the level and of those on it share an integer.
    above, equal = key > level, key == level
    number = above.to(tl.int32) + (equal.to(tl.int32) << 16)
    both, all_of_both = _running(number, GROUP * LENGTH), tl.sum(number, axis=0)
    first = segment * GROUP * LENGTH
    place = first + tl.arange(0, GROUP * LENGTH)
    end = tl.atomic_add(sizes + source, all_of_both & 0xFFFF, sem="relaxed") + (both & 0xFFFF)
    near += source * slots * LENGTH
    tl.store(near + end - 1, (key.to(tl.int64) << 32) | (place ^ LAST).to(tl.int64), mask=above)
    tied += source * slots * LENGTH
    tl.store(tied + first + ((both >> 16) & 0xFFFF) - 1, place, mask=equal)
    tl.store(ties + source * segments + segment, (all_of_both >> 16) & 0xFFFF)
    word = slot[:, None] * (LENGTH // 32) + tl.arange(0, LENGTH // 32)[None, :]
    bits += source * slots * (LENGTH // 32)
    tl.store(bits + word, tl.zeros_like(word), mask=here[:, None])


@triton.jit
def _copy_largest(near, size, m, level, found):
    """Copy the m largest of ``size`` integers, no two of which are equal, to ``found``."""
    low, high = level.to(tl.int64) << 32, (tl.zeros((), tl.int64) + ABOVE_ALL) << 32
    least, _ = nth_largest(near, size, m, low, high, low, BLOCK)
    before = 0
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        own = tl.load(near + place, mask=place < size, other=low)
        take = (own >= least).to(tl.int32) * (place < size).to(tl.int32)
        tl.store(found + before + _running(take, BLOCK) - 1, own, mask=take > 0)
        before += tl.sum(take, axis=0)
    tl.debug_barrier()


@triton.jit
def _place_of_tie(ties, tied, number, segments, MEMBERS: tl.constexpr):
    """Return the places of members on the level by their numbers, in the order of their places."""
    before, at = 0, tl.zeros_like(number)
    for start in range(0, segments, SEGMENTS):
        segment = start + tl.arange(0, SEGMENTS)
        count = tl.load(ties + segment, mask=segment < segments, other=0)
        end = before + tl.cumsum(count, axis=0)
        # Every number is inside of one segment, where ``tied`` holds its place.
        number_there = number[:, None] - (end - count)[None, :]
        inside = (number_there >= 0) & (number_there < count[None, :])
        own = (segment * MEMBERS)[None, :] + number_there
        at += tl.sum(tl.where(inside, own, 0), axis=1)
        before += tl.sum(count, axis=0)
    return tl.load(tied + at)


@kernel(do_not_specialize=NUMBERS)
def _rank(
    scores, offset, inverse_temperature, chosen, levels, sizes, near, ties, tied, found, bits,
    values, index,
    m, slots, parents, tokens, chunks, segments, programs, most,
    KIND: tl.constexpr, LENGTH: tl.constexpr, GROUP: tl.constexpr,
    RANKED: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Program (source, part): write a part of the head at its ranks, and mark it in ``bits``.

    Members on the level follow in the order of their places if there are not enough above it.
    """
    source = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    inverse_temperature = tl.load(inverse_temperature)
    size = tl.load(sizes + source)
    scores += source * parents * tokens
    offset += source * parents
    chosen += source * slots
    near += source * slots * LENGTH
    bits += source * slots * (LENGTH // 32)
    if size > most:
        # All programs of a source do the same here, each for itself.
        found += (source * programs + part) * m
        _copy_largest(near, size, m, tl.load(levels + source), found)
        near, size = found, m
    for first in range(part * RANKED, tl.maximum(size, m), programs * RANKED):
        number = first + tl.arange(0, RANKED)
        own = tl.load(near + number, mask=number < size, other=LAST)
        place = (own & LAST).to(tl.int32) ^ LAST
        if (size < m) & (first + RANKED > size):
            tie = tl.minimum(tl.maximum(number, size), m - 1) - size
            tie = _place_of_tie(
                ties + source * segments, tied + source * slots * LENGTH, tie, segments,
                GROUP * LENGTH,
            )  # fmt: skip
            place = tl.where(number < size, place, tie)
        # The loads that lead to the value are issued before the members are compared.
        chunk = tl.load(chosen + place // LENGTH)
        parent, token = chunk // chunks, chunk % chunks * LENGTH + place % LENGTH
        item = parent.to(tl.int64) * tokens + token
        score, shift = tl.load(scores + item), tl.load(offset + parent)
        larger = tl.zeros((RANKED, SLICE), tl.int32)
        for start in range(0, size, SLICE):
            at = start + tl.arange(0, SLICE)
            other = tl.load(near + at, mask=at < size, other=NO_MEMBER)
            larger += (other[None, :] > own[:, None]).to(tl.int32)
        rank = tl.where(number < size, tl.sum(larger, axis=1), number)
        value = scaled(score, inverse_temperature) + shift
        value = tl.where(value == value, value, -float("inf"))
        if KIND != "log-probability":
            value = tl.minimum(value, 0.0)
        if KIND == "odds":
            value = log_odds(value)
        here = rank < m
        tl.store(values + source * m + rank, value, mask=here)
        tl.store(index + source * m + rank, item, mask=here)
        bit = tl.full((RANKED,), 1, tl.int32) << (place % 32)
        tl.atomic_or(bits + place // 32, bit, mask=here, sem="relaxed")


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
    held = max(held, 32) if held <= MOST_HELD else 0
    group = max(1, COLLECTED // length)
    segments, programs = triton.cdiv(slots, group), min(RANKERS, triton.cdiv(m, RANKED) + 1)
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
    scores, offset = chunks.scores.contiguous(), offset.contiguous()
    inverse_temperature = host_number(1 / chunks.temperature, device)
    levels, sizes = empty(), empty()
    _choose[(sources,)](
        chunks.maxima.contiguous(), offset, inverse_temperature,
        empty(0 if held else parents * per_parent), head.slot_of, head.chosen, levels, sizes,
        m, slots, parents, per_parent,
        HELD=held, GROUPS=min(held, max(32 * CHOOSE_WARPS, triton.next_power_of_2(slots))),
        num_warps=CHOOSE_WARPS,
    )  # fmt: skip
    near, tied = empty(slots * length, dtype=torch.int64), empty(slots * length)
    ties = empty(segments)
    _collect[(sources, segments)](
        scores, offset, inverse_temperature, head.chosen, levels, sizes, near, ties, tied,
        head.bits,
        slots, parents, tokens, per_parent, segments,
        LENGTH=length, GROUP=group, num_warps=COLLECT_WARPS,
    )  # fmt: skip
    most = NEAR + m
    found = empty(programs * m if slots * length > most else 0, dtype=torch.int64)
    _rank[(sources, programs)](
        scores, offset, inverse_temperature, head.chosen, levels, sizes, near, ties, tied, found,
        head.bits, head.values, head.index,
        m, slots, parents, tokens, per_parent, segments, programs, most,
        KIND=kind, LENGTH=length, GROUP=group, RANKED=RANKED, SLICE=SLICE, num_warps=RANK_WARPS,
    )  # fmt: skip
    return head
