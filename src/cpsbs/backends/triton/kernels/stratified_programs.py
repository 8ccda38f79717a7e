"""The kernels of ``stratified``, which says what each is for."""

from __future__ import annotations

import triton
import triton.language as tl

from cpsbs.backends.triton.kernels.launching import kernel
from cpsbs.backends.triton.kernels.noise import uniform64
from cpsbs.backends.triton.kernels.numbers import scaled
from cpsbs.backends.triton.kernels.poisson_programs import unit_of

RANKED: tl.constexpr = tl.constexpr(128)
"""Random numbers that a program of ``begin`` ranks"""

SLICE: tl.constexpr = tl.constexpr(32)
"""What all numbers, places or parents are compared with is read so many at a time."""

BLOCK: tl.constexpr = tl.constexpr(1024)
"""Chunks whose masses are added up at a time"""

WAYS: tl.constexpr = tl.constexpr(32)
"""Into so many parts each round of the search for a chunk divides what is left."""

COLUMNS: tl.constexpr = tl.constexpr(8)
"""Numbers that ``draw`` notes for each parent: where the interval of the parent ends, how many
places lie up to there, its share of the circle, μ, the target of its largest candidates, where its
points start, and two for the trace."""

TINY: tl.constexpr = tl.constexpr(2.0**-1000)
BELOW_ONE: tl.constexpr = tl.constexpr(1 - 2.0**-52)

NUMBERS = ["k", "slots", "parents", "tokens", "chunks", "blocks"]
"""Arguments that differ between searches; to compile a variant for a value takes seconds."""


@kernel(do_not_specialize=NUMBERS)
def begin(
    offset, log_prob, log_inclusion, seeds, counts, shifted, order,
    parents, chunks, blocks,
    LENGTH: tl.constexpr, PARENTS: tl.constexpr,
):  # fmt: skip
    """Program (source, block): the random order of RANKED chunks, or of RANKED members of a chunk.

    The first program of a source also subtracts what its parents were included with.
    """
    source, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seed, stream = tl.load(seeds + source), tl.load(counts + source) << 32
    if block == 0:
        row = tl.arange(0, PARENTS)
        here, place = row < parents, source * parents + row
        log_p = tl.load(log_prob + place, mask=here, other=0.0)
        value = tl.load(offset + place, mask=here, other=0.0)
        value -= tl.load(log_inclusion + place, mask=here, other=0.0)
        value = tl.where(log_p == -float("inf"), log_p, value)
        tl.store(shifted + place, value, mask=here)
    of_chunks = block < blocks
    count = tl.where(of_chunks, chunks, LENGTH)
    first = tl.where(of_chunks, 0, chunks)
    stream += 3 + 2 * parents + first
    number = tl.where(of_chunks, block, block - blocks) * RANKED + tl.arange(0, RANKED)
    own = uniform64(seed, stream + number)
    rank = tl.zeros((RANKED,), tl.int32)
    for start in range(0, count, SLICE):
        other_number = start + tl.arange(0, SLICE)
        other = uniform64(seed, stream + other_number)
        earlier = (other[None, :] == own[:, None]) & (other_number[None, :] < number[:, None])
        earlier |= other[None, :] < own[:, None]
        rank += tl.sum((earlier & (other_number < count)[None, :]).to(tl.int32), axis=1)
    out = order + source * (chunks + LENGTH) + first + rank
    tl.store(out, number, mask=number < count)


@kernel(do_not_specialize=NUMBERS)
def masses(
    maxima, sums, head, shifted, slot_of, again, order, reach, inverse_temperature,
    k, slots, parents, chunks,
    LENGTH: tl.constexpr,
):  # fmt: skip
    """Program (source, parent): running masses of the parent's chunks, in the random order."""
    source, parent = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = source * parents + parent
    unit = unit_of(head + source * k, k)
    shift = tl.load(shifted + row) - unit
    inverse_temperature = tl.load(inverse_temperature)
    before = tl.zeros((), tl.float64)
    for start in range(0, chunks, BLOCK):
        number = start + tl.arange(0, BLOCK)
        here = number < chunks
        chunk = tl.load(order + source * (chunks + LENGTH) + number, mask=here, other=0)
        place = row * chunks + chunk
        slot = tl.load(slot_of + place, mask=here, other=0)
        top = tl.load(maxima + place, mask=here, other=-float("inf"))
        mass = tl.load(sums + place, mask=here, other=0.0)
        alone = tl.load(again + source * slots + slot - 1, mask=slot > 0, other=0.0)
        level = tl.minimum(scaled(top, inverse_temperature) + shift, 0.0)
        mass *= tl.exp(level.to(tl.float32))
        mass = tl.where(slot > 0, alone, mass.to(tl.float64))
        mass = tl.where(here, mass, 0.0)
        tl.store(reach + row * chunks + number, before + tl.cumsum(mass, axis=0), mask=here)
        before += tl.sum(mass, axis=0)


@triton.jit
def _mixed(bits):
    """Return the int64 numbers mixed as by ``randomness._splitmix64``."""
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * (0xBF58476D1CE4E5B9 - 0x10000000000000000)
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * (0x94D049BB133111EB - 0x10000000000000000)
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)


@triton.jit
def _largest(head, head_index, slot, k, reference, scale, heavy, turn):
    """Return the targets of light candidates among the K largest, what they are, and their keys."""
    value = tl.load(head + slot, mask=slot < k, other=-float("inf"))
    item = tl.load(head_index + slot, mask=slot < k, other=-1)
    target = scale * tl.exp(tl.minimum(value - reference, 700.0))
    target = tl.where((slot >= heavy) & (slot < k), target, 0.0)
    return target, item, _mixed(item * 0x2545F4914F6CDD1D + turn)


@triton.jit
def _point(number, first, places, total):
    """Return where the places of light candidates with these numbers lie on [0, Σ μ)."""
    return (first + number.to(tl.float64)) / places * total * BELOW_ONE


@triton.jit
def _find_chunk(reach, at, chunks, STRIDE: tl.constexpr):
    """Return the number of the chunk, in the random order, on which each point [n] falls."""
    low = tl.zeros_like(at).to(tl.int32)
    stride = STRIDE
    part = tl.arange(0, WAYS)[None, :]
    while stride >= 1:
        end = low[:, None] + stride * (part + 1) - 1
        value = tl.load(reach[:, None] + end, mask=end < chunks - 1, other=float("inf"))
        low += stride * tl.sum((value <= at[:, None]).to(tl.int32), axis=1)
        stride = stride // WAYS
    return low


@kernel(do_not_specialize=NUMBERS)
def draw(
    scores, head, head_index, shifted, slot_of, bits, reach, order, seeds, counts,
    inverse_temperature, until, notes, drawn, picked,
    index, present, inclusion, trace_start, trace_inside, trace_share,
    k, slots, parents, tokens, chunks,
    LENGTH: tl.constexpr, PLACES: tl.constexpr, PARENTS: tl.constexpr, STRIDE: tl.constexpr,
    GROUP: tl.constexpr, FULL_SHARE: tl.constexpr, FORBIDDEN: tl.constexpr,
):  # fmt: skip
    """Draw K candidates of one source. ``until``, ``notes``, ``drawn``, ``picked`` are scratch."""
    source = tl.program_id(0).to(tl.int64)
    inverse_temperature = tl.load(inverse_temperature)
    scores += source * parents * tokens
    head += source * k
    head_index += source * k
    shifted += source * parents
    slot_of += source * parents * chunks
    reach += source * parents * chunks
    order += source * (chunks + LENGTH)
    until += source * k
    notes += source * parents * COLUMNS
    drawn += source * k
    picked += source * k * 3
    drawn_before = tl.load(counts + source)
    seed, stream = tl.load(seeds + source), drawn_before << 32
    first, turn = uniform64(seed, stream), uniform64(seed, stream + 1)
    turn = (turn * 9007199254740992.0).to(tl.int64)  # 2^53: all bits that the number has

    # Find the targets: how many of the K largest are heavy, and the factor c of the others.
    slot = tl.arange(0, PLACES)
    value = tl.load(head + slot, mask=slot < k, other=-float("inf"))
    reference = unit_of(head, k)
    largest = tl.exp(tl.minimum(value - reference, 700.0))
    row = tl.arange(0, PARENTS)
    inside = row < parents
    masses = tl.load(reach + row * chunks + chunks - 1, mask=inside, other=0.0)
    rest = tl.sum(masses, axis=0)
    left = tl.cumsum(largest, axis=0, reverse=True) + tl.maximum(rest, TINY)
    count = (k - slot).to(tl.float64)
    heavy = tl.min(tl.where((largest * count < left) & (slot < k), slot, k), axis=0)
    scale = tl.sum(tl.where(slot == tl.minimum(heavy, k - 1), count / left, 0.0), axis=0)
    log_scale = tl.log(scale) - reference
    few = (rest == 0.0) | (tl.load(head) - tl.load(head + k - 1) > FORBIDDEN)
    few = few.to(tl.int32)
    sure = tl.where(few > 0, k, heavy)  # with at most K candidates, all are kept

    # On [0, μ) of a parent lie its light candidates among the K largest, then all others.
    own, own_item, own_key = _largest(head, head_index, slot, k, reference, scale, heavy, turn)
    end = tl.zeros((PLACES,), tl.float64)
    among, choice = tl.zeros((PARENTS,), tl.float64), scale * masses
    for start in range(0, k, SLICE):
        other_slot = start + tl.arange(0, SLICE)
        target, other, other_key = _largest(
            head, head_index, other_slot, k, reference, scale, heavy, turn
        )
        same = (own_item // tokens)[:, None] == (other // tokens)[None, :]
        same &= other_key[None, :] <= own_key[:, None]
        end += tl.sum(tl.where(same, target[None, :], 0.0), axis=1)
        of_parent = row[:, None] == (other // tokens)[None, :]
        among += tl.sum(tl.where(of_parent, target[None, :], 0.0), axis=1)
        choice += tl.sum(tl.where(of_parent, (target * (1.0 - target))[None, :], 0.0), axis=1)
    # Candidates that are heavy or impossible are on no interval.
    tl.store(until + slot, tl.where(own > 0.0, end, -1.0), mask=slot < k)
    size = tl.where(inside, among + scale * masses, 0.0)
    ends = tl.cumsum(size, axis=0)
    total = tl.maximum(tl.max(ends, axis=0), TINY)
    places = tl.maximum(k - heavy, 1).to(tl.float64)

    # Give the parents their places: as many as lie up to the end of each.
    up_to = tl.zeros((PARENTS,), tl.int32)
    for start in range(0, k, SLICE):
        other_slot = start + tl.arange(0, SLICE)
        point = _point(other_slot - heavy, first, places, total)
        within = (point[None, :] < ends[:, None]) | (row == parents - 1)[:, None]
        within &= ((other_slot >= heavy) & (other_slot < k))[None, :]
        up_to += tl.sum(within.to(tl.int32), axis=1)
    note = notes + row * COLUMNS
    tl.store(note, ends, mask=inside)
    tl.store(note + 1, up_to.to(tl.float64), mask=inside)
    tl.debug_barrier()
    earlier = tl.load(note - COLUMNS + 1, mask=inside & (row > 0), other=0.0)
    times = up_to.to(tl.float64) - earlier
    share = tl.where((times > 0.0) & inside, tl.minimum(choice / FULL_SHARE, 1.0), 0.0)
    tl.store(note + 2, share, mask=inside)
    tl.debug_barrier()

    # Spread the offsets of the parents over a circle that they divide in random order.
    own_number = uniform64(seed, stream + 3 + row)
    circle = tl.zeros((PARENTS,), tl.float64)
    for start in range(0, parents, SLICE):
        other_row = start + tl.arange(0, SLICE)
        other_number = uniform64(seed, stream + 3 + other_row)
        other_share = tl.load(notes + other_row * COLUMNS + 2, mask=other_row < parents, other=0.0)
        up = other_number[None, :] < own_number[:, None]
        up |= (other_number[None, :] == own_number[:, None]) & (other_row[None, :] <= row[:, None])
        circle += tl.sum(tl.where(up, other_share[None, :], 0.0), axis=1)
    whole = tl.maximum(tl.sum(share, axis=0), TINY)
    even = (circle - uniform64(seed, stream + 3 + parents + row) * share) / whole
    even += uniform64(seed, stream + 2)
    even -= tl.floor(even)
    part = size - tl.floor(size)
    upper = part + even * (1.0 - part)
    begin = tl.where(times > tl.floor(size), even * part, upper)
    tl.store(note + 3, size, mask=inside)
    tl.store(note + 4, among, mask=inside)
    tl.store(note + 5, begin, mask=inside)
    turns = (ends - size) * places / total
    tl.store(note + 6, turns - tl.floor(turns), mask=inside)
    tl.store(note + 7, tl.log(times / size), mask=inside)
    tl.debug_barrier()

    # Find the candidate of each place.
    member = tl.arange(0, LENGTH)
    shuffled = tl.load(order + chunks + member)
    for start in range(0, k, GROUP):
        place = start + tl.arange(0, GROUP)
        here = place < k
        point = _point(place - heavy, first, places, total)
        parent = tl.zeros((GROUP,), tl.int32)
        for low in range(0, parents, SLICE):
            other_row = low + tl.arange(0, SLICE)
            bound = tl.load(
                notes + other_row * COLUMNS, mask=other_row < parents, other=float("inf")
            )
            parent += tl.sum((bound[None, :] <= point[:, None]).to(tl.int32), axis=1)
        parent = tl.minimum(parent, parents - 1)
        noted = notes + parent * COLUMNS
        skipped = tl.load(noted - COLUMNS + 1, mask=parent > 0, other=0.0)
        at = tl.load(noted + 5) + (place - heavy).to(tl.float64) - skipped
        at = tl.minimum(at, tl.load(noted + 3) * BELOW_ONE)
        beyond = at - tl.load(noted + 4)

        # Among the K largest of its parent it is the first whose interval ends beyond the point.
        nearest = tl.full((GROUP,), float("inf"), tl.float64)
        found = tl.full((GROUP,), -1, tl.int64)
        for low in range(0, k, SLICE):
            other_slot = low + tl.arange(0, SLICE)
            bound = tl.load(until + other_slot, mask=other_slot < k, other=-1.0)
            other = tl.load(head_index + other_slot, mask=other_slot < k, other=-1)
            fits = (other // tokens)[None, :] == parent[:, None]
            fits &= bound[None, :] > at[:, None]
            bound = tl.where(fits, bound[None, :], float("inf"))
            best = tl.min(bound, axis=1)
            other = tl.where(fits & (bound == best[:, None]), other[None, :], -1)
            found = tl.where(best < nearest, tl.max(other, axis=1), found)
            nearest = tl.minimum(nearest, best)

        # Otherwise it is in a chunk of the parent.
        level = tl.maximum(beyond, 0.0) / scale
        ranges = reach + parent * chunks
        number = _find_chunk(ranges, level * BELOW_ONE, chunks, STRIDE)
        level -= tl.load(ranges + number - 1, mask=number > 0, other=0.0)
        chunk = tl.load(order + number)
        token = (chunk * LENGTH)[:, None] + shuffled[None, :]
        base = parent.to(tl.int64) * tokens
        x = tl.load(scores + base[:, None] + token, mask=token < tokens, other=-float("inf"))
        x = scaled(x, inverse_temperature)
        x += (tl.load(shifted + parent) - reference)[:, None]
        marked = tl.load(slot_of + parent * chunks + chunk)
        words = bits + (source * slots + marked - 1) * (LENGTH // 32)
        word = tl.load(
            words[:, None] + (shuffled // 32)[None, :], mask=(marked > 0)[:, None], other=0
        )
        taken = ((word >> (shuffled % 32)[None, :]) & 1) > 0
        mass = tl.cumsum(tl.where(taken, 0.0, tl.exp(x)), axis=1)
        level = tl.minimum(tl.maximum(level, 0.0), tl.max(mass, axis=1) * BELOW_ONE)
        which = tl.minimum(tl.sum((mass <= level[:, None]).to(tl.int32), axis=1), LENGTH - 1)
        token = tl.max(tl.where(member[None, :] == which[:, None], token, 0), axis=1)
        token = tl.minimum(token, tokens - 1)
        item = tl.where((beyond < 0.0) & (found >= 0), found, base + token)
        certain = place < sure
        item = tl.where(certain, tl.load(head_index + place, mask=here, other=0), item)
        parent = (item // tokens).to(tl.int32)
        target = scaled(tl.load(scores + item, mask=here, other=0.0), inverse_temperature)
        target += tl.load(shifted + parent)
        exists = (target > -float("inf")).to(tl.int32) >= few
        target = tl.minimum(target + log_scale, 0.0)
        within = tl.minimum(tl.load(notes + parent * COLUMNS + 7) + target, 0.0)
        tl.store(drawn + place, tl.where(exists, item, -1 - item), mask=here)
        tl.store(picked + place * 3, tl.where(certain, 1.0, target), mask=here)
        tl.store(picked + place * 3 + 1, tl.where(certain, 0.0, within), mask=here)
        turned = tl.load(notes + parent * COLUMNS + 6)
        tl.store(picked + place * 3 + 2, tl.where(certain, 0.0, turned), mask=here)
    tl.debug_barrier()

    # Write them in the order of the tree.
    weight = tl.exp(-log_scale)
    for start in range(0, k, GROUP):
        place = start + tl.arange(0, GROUP)
        here = place < k
        signed = tl.load(drawn + place, mask=here, other=0)
        item = tl.where(signed < 0, -1 - signed, signed)
        rank = tl.zeros((GROUP,), tl.int32)
        for low in range(0, k, SLICE):
            other_place = low + tl.arange(0, SLICE)
            other = tl.load(drawn + other_place, mask=other_place < k, other=0)
            other = tl.where(other < 0, -1 - other, other)
            lower = (other[None, :] == item[:, None]) & (other_place[None, :] < place[:, None])
            lower |= other[None, :] < item[:, None]
            rank += tl.sum((lower & (other_place < k)[None, :]).to(tl.int32), axis=1)
        out = source * k + rank
        target = tl.load(picked + place * 3, mask=here, other=0.0)
        certain = target > 0.0
        tl.store(index + out, item, mask=here)
        tl.store(present + out, signed >= 0, mask=here)
        tl.store(inclusion + out, tl.where(certain, 0.0, target), mask=here)
        tl.store(trace_inside + out, tl.load(picked + place * 3 + 1, mask=here), mask=here)
        tl.store(trace_start + out, tl.load(picked + place * 3 + 2, mask=here), mask=here)
        tl.store(trace_share + out, tl.where(certain, 0.0, weight), mask=here)
    tl.store(counts + source, drawn_before + 1)
