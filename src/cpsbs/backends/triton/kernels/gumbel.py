"""A step of stochastic beam search in four launches; the reference is ``designs.gumbel``.

1. ``_chunk_scores`` perturbs the masses of chunks, given the scores of their parents;
2. ``_choose_chunks`` finds the K + 1 largest of each source, in descending order;
3. ``_member_scores`` perturbs the candidates in these chunks, given the scores of the chunks;
4. ``_choose`` finds the K + 1 largest of them: the selection, and the largest that is dropped.

Perturbed scores are kept as int64 keys in the same order, so that they can be counted as in
``reading`` without loss: the order of float32 would not be that of the scores that are returned.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cpsbs.backends.triton.kernels.finding import nth_largest, taken
from cpsbs.backends.triton.kernels.launching import kernel
from cpsbs.backends.triton.kernels.noise import uniform64
from cpsbs.backends.triton.kernels.numbers import host_number, one_minus_exp, scaled, softplus
from cpsbs.randomness import Counters
from cpsbs.scores.candidates import Candidates, Selection

LOWEST: tl.constexpr = tl.constexpr(-(2**63 - 2**52 + 1))
"""The key of -inf"""

NOT_A_NUMBER: tl.constexpr = tl.constexpr(2**63 - 2**51)
"""The key of NaN: above all numbers, as in torch"""

BELOW_ALL: tl.constexpr = tl.constexpr(-(2**63))
"""Less than any key"""

SIGN_ASIDE: tl.constexpr = tl.constexpr(2**63 - 1)
"""All bits but the sign"""

CHUNKS: tl.constexpr = tl.constexpr(1024)
"""Chunks of a parent that are perturbed at a time"""

RANKED: tl.constexpr = tl.constexpr(128)
SLICE: tl.constexpr = tl.constexpr(32)
"""The K + 1 largest are ranked RANKED at a time, by comparing them with SLICE at a time."""

NUMBERS = ["k", "m", "parents", "tokens", "chunks"]
"""Arguments that differ between searches; to compile a variant for a value takes seconds."""


@triton.jit
def _key(x):
    """Return float64 numbers as int64 keys in the same order."""
    bits = x.to(tl.int64, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 63) & SIGN_ASIDE), NOT_A_NUMBER)


@triton.jit
def _value(key):
    """Return the number that a key stands for."""
    return (key ^ ((key >> 63) & SIGN_ASIDE)).to(tl.float64, bitcast=True)


@triton.jit
def _gumbel(seed, place):
    """Return standard Gumbel noise at these places of a seed's stream."""
    # A uniform number has 53 bits, so that 1 − u is exact.
    exponential = -tl.log(1.0 - uniform64(seed, place))
    return -tl.log(tl.maximum(exponential, 8.673617379884035e-19))  # 2^-60


@triton.jit
def _given_maximum(score, largest, maximum):
    """Return the scores conditioned on their maximum, which was ``largest``, being ``maximum``."""
    gap = score - largest
    below = tl.log(one_minus_exp(tl.where(gap < 0.0, gap, -1.0)))
    v = maximum - score + tl.where(gap < 0.0, below, -float("inf"))
    return tl.where(score == -float("inf"), score, maximum - softplus(v))


@kernel(do_not_specialize=NUMBERS)
def _chunk_scores(
    maxima, sums, offset, score, seeds, counts, inverse_temperature, keys, parents, chunks
):
    """Program (source, parent): perturb all chunks of the parent, given the parent's score."""
    source, parent = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = source * parents + parent
    seed, stream = tl.load(seeds + source), tl.load(counts + source) << 32
    inverse_temperature = tl.load(inverse_temperature)
    shift = tl.load(offset + row)
    largest = tl.full((), -float("inf"), tl.float64)
    for start in range(0, chunks, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        here = chunk < chunks
        top = tl.load(maxima + row * chunks + chunk, mask=here, other=-float("inf"))
        mass = tl.load(sums + row * chunks + chunk, mask=here, other=0.0).to(tl.float64)
        x = scaled(top, inverse_temperature) + tl.log(mass) + shift
        x += _gumbel(seed, stream + parent * chunks + chunk)
        largest = tl.maximum(largest, tl.max(tl.where(here, x, -float("inf")), axis=0))
        tl.store(keys + row * chunks + chunk, _key(x), mask=here)
    tl.debug_barrier()
    maximum = tl.load(score + row)
    for start in range(0, chunks, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        here = chunk < chunks
        x = _value(tl.load(keys + row * chunks + chunk, mask=here, other=0))
        tl.store(keys + row * chunks + chunk, _key(_given_maximum(x, largest, maximum)), mask=here)


@triton.jit
def _take_largest(keys, count, m, low, high, found, places, BLOCK: tl.constexpr):
    """Write the m largest keys and their places, in no order; -inf where there are fewer."""
    level, ties = nth_largest(keys, count, m, low, high, BELOW_ALL, BLOCK)
    before, tied = 0, 0
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        key = tl.load(keys + place, mask=place < count, other=BELOW_ALL)
        take, tied = taken(key, level, ties, tied)
        slot = before + tl.cumsum(take, axis=0) - 1
        tl.store(found + slot, key, mask=take > 0)
        tl.store(places + slot, place, mask=take > 0)
        before += tl.sum(take, axis=0)
    for start in range(0, m, RANKED):
        slot = start + tl.arange(0, RANKED)
        missing = (slot >= before) & (slot < m)
        tl.store(found + slot, tl.zeros((RANKED,), tl.int64) + LOWEST, mask=missing)
        tl.store(places + slot, tl.zeros((RANKED,), tl.int32), mask=missing)
    tl.debug_barrier()


@triton.jit
def _rank(found, m, slot, own):
    """Return how many of the m keys found come before those in these slots."""
    rank = tl.zeros((RANKED,), tl.int32)
    for start in range(0, m, SLICE):
        other_slot = start + tl.arange(0, SLICE)
        other = tl.load(found + other_slot, mask=other_slot < m, other=BELOW_ALL)
        earlier = (other[None, :] == own[:, None]) & (other_slot[None, :] < slot[:, None])
        rank += tl.sum(((other[None, :] > own[:, None]) | earlier).to(tl.int32), axis=1)
    return rank


@kernel(do_not_specialize=NUMBERS)
def _choose_chunks(
    keys, found, places, chosen, tops, m, parents, chunks, BLOCK: tl.constexpr
):  # fmt: skip
    """Find the m chunks of one source with the largest scores, in descending order."""
    source = tl.program_id(0).to(tl.int64)
    count = parents * chunks
    found += source * m
    places += source * m
    low, high = tl.zeros((), tl.int64) + LOWEST, tl.zeros((), tl.int64) + (NOT_A_NUMBER + 1)
    _take_largest(keys + source * count, count, m, low, high, found, places, BLOCK)
    for start in range(0, m, RANKED):
        slot = start + tl.arange(0, RANKED)
        own = tl.load(found + slot, mask=slot < m, other=0)
        out = source * m + _rank(found, m, slot, own)
        tl.store(tops + out, own, mask=slot < m)
        tl.store(chosen + out, tl.load(places + slot, mask=slot < m, other=0), mask=slot < m)


@kernel(do_not_specialize=NUMBERS)
def _member_scores(
    scores, offset, chosen, tops, seeds, counts, inverse_temperature, keys,
    m, parents, tokens, chunks,
    LENGTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Program (source, block): perturb the LENGTH members of GROUP of the source's m chunks."""
    source = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    here = slot < m
    chunk = tl.load(chosen + source * m + slot, mask=here, other=0)
    maximum = _value(tl.load(tops + source * m + slot, mask=here, other=0))
    row = source * parents + chunk // chunks
    member = tl.arange(0, LENGTH)[None, :]
    token = (chunk % chunks * LENGTH)[:, None] + member
    inside = here[:, None] & (token < tokens)
    x = tl.load(scores + (row * tokens)[:, None] + token, mask=inside, other=-float("inf"))
    x = scaled(x, tl.load(inverse_temperature)) + tl.load(offset + row)[:, None]
    place = slot[:, None] * LENGTH + member
    # This is the second draw of the step.
    stream = (tl.load(counts + source) + 1) << 32
    x += _gumbel(tl.load(seeds + source), stream + place)
    moved = _given_maximum(x, tl.max(x, axis=1)[:, None], maximum[:, None])
    tl.store(keys + source * m * LENGTH + place, _key(moved), mask=here[:, None])


@kernel(do_not_specialize=NUMBERS)
def _choose(
    keys, found, places, chosen, tops, threshold, counts,
    index, present, new_score, new_threshold,
    k, m, parents, tokens, chunks,
    LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Select K of one source's m · LENGTH candidates, in descending order, and its threshold."""
    source = tl.program_id(0).to(tl.int64)
    found += source * m
    places += source * m
    chosen += source * m
    tops += source * m
    # The largest member of a chunk has the chunk's score, so that m are no less than the last.
    low, high = tl.load(tops + m - 1), tl.load(tops) + 1
    keys += source * m * LENGTH
    _take_largest(keys, m * LENGTH, m, low, high, found, places, BLOCK)
    last = tl.zeros((), tl.int64) + SIGN_ASIDE
    for start in range(0, m, RANKED):
        slot = start + tl.arange(0, RANKED)
        own = tl.load(found + slot, mask=slot < m, other=SIGN_ASIDE)
        last = tl.minimum(last, tl.min(own, axis=0))
        rank = _rank(found, m, slot, own)
        place = tl.load(places + slot, mask=slot < m, other=0)
        chunk = tl.load(chosen + place // LENGTH)
        token = chunk % chunks * LENGTH + place % LENGTH
        # Places beyond the last token are never present, but must name some candidate.
        token = tl.where(token < tokens, token, 0)
        value = _value(own)
        goes_on = (slot < m) & (rank < k)
        out = source * k + rank
        tl.store(index + out, (chunk // chunks).to(tl.int64) * tokens + token, mask=goes_on)
        tl.store(present + out, value > -float("inf"), mask=goes_on)
        tl.store(new_score + out, value, mask=goes_on)
    # The threshold is the largest score that was ever dropped, the same for all K.
    before, dropped = tl.load(threshold + source * parents), _value(last)
    dropped = tl.where(dropped <= before, before, dropped)
    for start in range(0, k, RANKED):
        slot = start + tl.arange(0, RANKED)
        tl.store(new_threshold + source * k + slot, dropped, mask=slot < k)
    tl.store(counts + source, tl.load(counts + source) + 2)


def select(candidates: Candidates, k: int, counters: Counters) -> Selection:
    """Select the K candidates of each source with the largest perturbed scores.

    The counts of the random streams advance by two.
    """
    chunks = candidates.chunks
    sources, parents, tokens = chunks.shape
    m, per_parent, length = k + 1, chunks.maxima.shape[-1], chunks.length
    device = candidates.offset.device
    offset, inverse_temperature = candidates.offset, host_number(1 / chunks.temperature, device)
    seeds, counts = counters.seeds, counters.counts

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty((sources, *shape), dtype=dtype, device=device)

    of_chunks, of_members = empty(parents, per_parent), empty(m, length)
    _chunk_scores[(sources, parents)](
        chunks.maxima.contiguous(), chunks.sums[0].contiguous(), offset,
        candidates.state["score"].contiguous(), seeds, counts, inverse_temperature, of_chunks,
        parents, per_parent,
        num_warps=8,
    )  # fmt: skip
    found, places = empty(m), empty(m, dtype=torch.int32)
    chosen, tops = empty(m, dtype=torch.int32), empty(m)
    _choose_chunks[(sources,)](
        of_chunks, found, places, chosen, tops, m, parents, per_parent, BLOCK=8192, num_warps=16
    )
    group = max(1, 1024 // length)
    _member_scores[(sources, triton.cdiv(m, group))](
        chunks.scores.contiguous(), offset, chosen, tops, seeds, counts, inverse_temperature,
        of_members,
        m, parents, tokens, per_parent,
        LENGTH=length, GROUP=group, num_warps=8,
    )  # fmt: skip
    index, present = empty(k), empty(k, dtype=torch.bool)
    score, threshold = empty(k, dtype=torch.float64), empty(k, dtype=torch.float64)
    _choose[(sources,)](
        of_members, found, places, chosen, tops,
        candidates.state["threshold"].contiguous(), counts,
        index, present, score, threshold,
        k, m, parents, tokens, per_parent,
        LENGTH=length, BLOCK=2048, num_warps=8,
    )  # fmt: skip
    return Selection(index, present, state={"score": score, "threshold": threshold})
