"""The kernels of ``poisson``, which says what each is for."""

from __future__ import annotations

import triton
import triton.language as tl

from cpsbs.backends.triton.kernels import POWER_SUMS
from cpsbs.backends.triton.kernels.launching import kernel
from cpsbs.backends.triton.kernels.noise import uniform64
from cpsbs.backends.triton.kernels.numbers import scaled, softplus

TERMS: tl.constexpr = tl.constexpr(POWER_SUMS)
"""Power sums. The terms of the series that are left out are below 1e-8, see
``CandidateWeights.power_sums``: odds of a tail item that maximise the bound leave the tail hardly
any mass."""

BLOCK: tl.constexpr = tl.constexpr(1024)
"""The chunks of a program of ``tail``: 32 times 32, so that two comparisons find one"""

SLICE: tl.constexpr = tl.constexpr(64)
"""Items of the head that are multiplied at a time"""

TILTS: tl.constexpr = tl.constexpr(8)
ROUNDS: tl.constexpr = tl.constexpr(4)
"""Tilts are found to 1/TILTS^ROUNDS = 1/4096 of a range of some twenty."""

COLUMNS: tl.constexpr = tl.constexpr(9)
"""Sums of a block of chunks: TERMS power sums of p, and the mass of its weights"""


NUMBERS = ["k", "m", "slots", "parents", "tokens", "chunks", "table", "blocks"]
"""Arguments that differ between searches; to compile a variant for a value takes seconds."""


@triton.jit
def _log_p(scores, base, token, tokens, inverse_temperature, offset):
    """Return float64 log p of tokens of the row that starts at ``base``; -inf beyond its end."""
    x = tl.load(scores + base + token, mask=token < tokens, other=-float("inf"))
    return scaled(x, inverse_temperature) + offset


@triton.jit
def unit_of(head, m):
    """Return the log-weight that the tail's are relative to: the smallest of the head."""
    unit = tl.load(head + m - 1)
    return tl.where(unit == -float("inf"), 0.0, unit)


@triton.jit
def in_head(bits, chunk, there, LENGTH: tl.constexpr):
    """Return [G, LENGTH] which members of the chunks [G] are in the head; none where not there."""
    place = tl.arange(0, LENGTH)[None, :]
    word = (chunk * (LENGTH // 32))[:, None] + place // 32
    return (tl.load(bits + word, mask=there[:, None], other=0) >> place % 32) & 1 > 0


@kernel(do_not_specialize=NUMBERS)
def without_head(
    scores, chosen, bits, head, offset, again, inverse_temperature,
    m, slots, parents, tokens, chunks,
    LENGTH: tl.constexpr, GROUP: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Program (source, block): TERMS sums of powers of e^{log p − unit}, without the head."""
    source = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    here = slot < slots
    chunk = tl.load(chosen + source * slots + slot, mask=here, other=0)
    parent = source * parents + chunk // chunks
    token = (chunk % chunks * LENGTH)[:, None] + tl.arange(0, LENGTH)[None, :]
    shift = tl.load(offset + parent) - unit_of(head + source * m, m)
    base = (parent * tokens)[:, None]
    log_w = _log_p(scores, base, token, tokens, tl.load(inverse_temperature), shift[:, None])
    taken = in_head(bits, source * slots + slot, here, LENGTH)
    weight = tl.exp(tl.where(taken, -float("inf"), log_w).to(tl.float32))
    power = weight
    out = again + (source * slots + slot) * TERMS
    for j in tl.static_range(TERMS):
        tl.store(out + j, tl.sum(power, axis=1).to(tl.float64), mask=here)
        power *= weight


@kernel(do_not_specialize=NUMBERS)
def tail(
    maxima, sums, head, offset, slot_of, again, reach, partial, inverse_temperature,
    m, slots, parents, chunks, table, blocks,
    ODDS: tl.constexpr,
):  # fmt: skip
    """Program (source, block): running masses of BLOCK chunks, and COLUMNS sums over them."""
    source = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    count = parents * chunks
    chunk = block * BLOCK + tl.arange(0, BLOCK)
    here = chunk < count
    term = tl.arange(0, TERMS).to(tl.int64)
    place = source * count + chunk
    # All loads are issued before the first result is waited for.
    value = tl.load(sums + term[:, None] * table + place[None, :], mask=here[None, :], other=0.0)
    slot = tl.load(slot_of + place, mask=here, other=0)
    top = tl.load(maxima + place, mask=here, other=-float("inf"))
    shift = tl.load(offset + source * parents + chunk // chunks, mask=here, other=0.0)
    unit = unit_of(head + source * m, m)
    log_weight = scaled(top, tl.load(inverse_temperature)) + shift - unit
    # The sums have the digits of float32, and so has what they are multiplied by.
    weight = tl.exp(tl.minimum(log_weight, 0.0).to(tl.float32))
    power = tl.cumprod(tl.broadcast_to(weight[None, :], (TERMS, BLOCK)), axis=0)
    own = again + (source * slots + slot - 1) * TERMS
    looked_at = (slot > 0)[None, :]
    alone = tl.load(own[None, :] + term[:, None], mask=looked_at, other=0.0)
    value = tl.where(looked_at, alone, (value * power).to(tl.float64))
    out = partial + (source * blocks + block) * COLUMNS
    of_block = tl.sum(value, axis=1)
    tl.store(out + term, of_block)
    if ODDS:  # p/(1 − p) = Σ p^j
        factor = tl.exp(unit * term.to(tl.float64))
    else:
        factor = tl.where(term == 0, 1.0, 0.0).to(tl.float64)
    total = tl.sum(value * factor[:, None], axis=0)
    tl.store(reach + place, tl.cumsum(total, axis=0), mask=here)
    tl.store(out + TERMS, tl.sum(of_block * factor, axis=0))


@triton.jit
def _sigmoid(x):
    """Return 1/(1 + e^−x)."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _times(a, b, c, d):
    """Return (a + ib)(c + id)."""
    return a * c - b * d, a * d + b * c


@triton.jit
def _from_tail(
    scores, offset, slot_of, bits, reach, source, seed, stream, block_mass, unit,
    slots, parents, tokens, chunks, inverse_temperature,
    ODDS: tl.constexpr, LENGTH: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Draw GROUP independent items from the tail of a source; return them and their log-weights.

    The block of chunks, the chunk and the token are each found by inverting a running sum.
    """
    number = tl.arange(0, GROUP)
    below_one = 1.0 - 2.220446049250313e-16
    block = tl.arange(0, BLOCKS)
    ends = tl.cumsum(block_mass, axis=0)
    everything = tl.max(ends, axis=0)
    at = uniform64(seed, stream + number) * everything * below_one
    first = tl.sum((ends[None, :] <= at[:, None]).to(tl.int32), axis=1)
    before = block[None, :] < first[:, None]
    at -= tl.sum(tl.where(before, block_mass[None, :], 0.0), axis=1)
    reach += source * parents * chunks
    low = first * BLOCK
    last = tl.minimum(low + BLOCK, parents * chunks) - 1
    # Rounding must not lift it to the mass of the block.
    at = tl.minimum(at, tl.load(reach + last) * below_one)
    # Find the part by the ends of 32 parts of 32 chunks, then the chunk within the part.
    step = tl.arange(0, 32)[None, :]
    end = low[:, None] + 32 * step + 31
    passed = tl.load(reach + end, mask=end < last[:, None], other=float("inf")) <= at[:, None]
    low += 32 * tl.sum(passed.to(tl.int32), axis=1)
    end = low[:, None] + step
    passed = tl.load(reach + end, mask=end < last[:, None], other=float("inf")) <= at[:, None]
    found = (low + tl.sum(passed.to(tl.int32), axis=1)).to(tl.int64)
    parent = found // chunks
    place = tl.arange(0, LENGTH)
    token = (found % chunks * LENGTH)[:, None] + place[None, :]
    shift = tl.load(offset + source * parents + parent)
    base = ((source * parents + parent) * tokens)[:, None]
    log_w = _log_p(scores, base, token, tokens, inverse_temperature, shift[:, None])
    slot = tl.load(slot_of + source * parents * chunks + found)
    taken = in_head(bits, source * slots + slot - 1, slot > 0, LENGTH)
    log_w = tl.where(taken, -float("inf"), log_w)
    # The sum of the chunk has the digits of float32 as well.
    weight = tl.exp((log_w - unit).to(tl.float32))
    if ODDS:
        weight /= 1.0 - tl.exp(log_w.to(tl.float32))
    end = tl.cumsum(weight.to(tl.float64), axis=1)
    level = uniform64(seed, stream + GROUP + number) * tl.max(end, axis=1) * below_one
    inside = tl.sum((end <= level[:, None]).to(tl.int32), axis=1)
    inside = tl.minimum(inside, LENGTH - 1)
    value = tl.max(tl.where(place[None, :] == inside[:, None], log_w, -float("inf")), axis=1)
    if ODDS:
        value -= tl.log(1.0 - tl.exp(value))
    return parent * tokens + found % chunks * LENGTH + inside, value


@kernel(do_not_specialize=NUMBERS)
def draw(
    scores, head_index, head, offset, slot_of, bits, reach, partial, seeds, counts,
    cosines, sines, back, tail_real, tail_imaginary, binomials,
    index, picked, present, tilts, turned, probability, log_normalizer, inverse_temperature,
    k, m, slots, parents, tokens, chunks, blocks, log_low, log_high, log_limit,
    ODDS: tl.constexpr, LENGTH: tl.constexpr, COINS: tl.constexpr, PLACES: tl.constexpr,
    POINTS: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Draw the sample of one source: K items, their weights, and what ``inclusion`` needs."""
    inverse_temperature = tl.load(inverse_temperature)
    source = tl.program_id(0).to(tl.int64)
    head += source * m
    head_index += source * m
    coin = tl.arange(0, COINS)
    y = tl.load(head + coin, mask=coin < m, other=-float("inf"))
    forced = tl.sum((y == float("inf")).to(tl.int32), axis=0)
    positive = tl.sum((y > -float("inf")).to(tl.int32), axis=0)
    # The head is in descending order, so that its K-th is forced only if all K places are.
    reference = tl.load(head + k - 1)
    follows = tl.load(head + k, mask=k < m, other=0.0)
    reference = tl.where(reference == float("inf"), follows, reference)
    reference = tl.where(tl.abs(reference) == float("inf"), 0.0, reference)
    unit = unit_of(head, m)
    y -= reference

    # Add up the power sums of the tail's weights, relative to the largest possible one.
    order = tl.arange(0, TERMS)
    block = tl.arange(0, BLOCKS)
    place = partial + (source * blocks + block) * COLUMNS
    powers = tl.load(place[:, None] + order[None, :], mask=(block < blocks)[:, None], other=0.0)
    powers = tl.sum(powers, axis=0)
    block_mass = tl.load(place + TERMS, mask=block < blocks, other=0.0)
    if ODDS:
        ahead = tl.maximum(order[None, :] - order[:, None], 0)
        mixed = tl.load(binomials + order[:, None] * TERMS + order[None, :])
        mixed *= tl.exp(unit * ahead.to(tl.float64))
        powers = tl.sum(mixed * powers[None, :], axis=1)
    largest = unit - reference
    sign = tl.where(order % 2 == 0, 1.0, -1.0).to(tl.float64)
    degree = (order + 1).to(tl.float64)

    # Find the tilt at which K − ½ of the coins are expected to come up heads. Float32, and an error
    # of a few thousandths, will do: all that follows is exact for any tilt. A round tries TILTS
    # at once, which takes as long as one.
    zero = largest * 0.0  # in float64, because numbers from the host are float32
    low, high = zero + log_low, zero + log_high
    high = tl.where(tl.sum(block_mass, axis=0) > 0, tl.minimum(high, log_limit - largest), high)
    low, high = low.to(tl.float32), high.to(tl.float32)
    near_y, near_largest = y.to(tl.float32), largest.to(tl.float32)
    near_powers, near_degree = (sign * powers).to(tl.float32), degree.to(tl.float32)
    share = tl.arange(0, TILTS).to(tl.float32)
    for _ in range(ROUNDS):
        step = (high - low) / TILTS
        tried = low + step * share
        heads = tl.sum(_sigmoid(near_y[:, None] + tried[None, :]), axis=0)
        of_tail = tl.exp(near_degree[:, None] * (tried + near_largest)[None, :])
        heads += tl.sum(near_powers[:, None] * of_tail, axis=0)
        # The first of them is a lower bound already.
        passed = (heads < k - 0.5) & (share > 0.0)
        low += step * tl.max(tl.where(passed, share, 0.0), axis=0)
        high = low + step
    tilt = ((low + high) / 2).to(tl.float64)

    # Compute the characteristic function of S at the points of the circle.
    point = tl.arange(0, POINTS)
    cosine, sine = tl.load(cosines + point), tl.load(sines + point)
    # Every SLICE-th item is multiplied up, and only then the products of all threads.
    real = tl.full((SLICE, POINTS), 1.0, tl.float64)
    imaginary = tl.zeros((SLICE, POINTS), tl.float64)
    log_z = tl.where(y == float("inf"), tilt, softplus(y + tilt))
    log_z = tl.sum(log_z, axis=0) - k * tilt
    for start in range(0, m, SLICE):
        place_in_head = start + tl.arange(0, SLICE)
        x = tl.load(head + place_in_head, mask=place_in_head < m, other=-float("inf"))
        x += tilt - reference
        p, q = _sigmoid(x)[:, None], _sigmoid(-x)[:, None]
        real, imaginary = _times(real, imaginary, q + p * cosine[None, :], p * sine[None, :])
    real, imaginary = tl.reduce((real, imaginary), 0, _times)
    terms = sign * powers * tl.exp(degree * (tilt + largest)) / degree
    log_z += tl.sum(terms, axis=0)
    table = order[:, None] * POINTS + point[None, :]
    size = tl.exp(tl.sum(terms[:, None] * tl.load(tail_real + table), axis=0))
    angle = tl.sum(terms[:, None] * tl.load(tail_imaginary + table), axis=0)
    tail_a, tail_b = size * tl.cos(angle), size * tl.sin(angle)
    real, imaginary = _times(real, imaginary, tail_a, tail_b)
    # Row K − j of ``back`` is e^{−ijθ} / (L/2).
    first = back + 2 * point
    real, imaginary = _times(real, imaginary, tl.load(first), tl.load(first + 1))
    chance = tl.sum(real, axis=0)
    tl.store(turned + (source * 2) * POINTS + point, real)
    tl.store(turned + (source * 2 + 1) * POINTS + point, imaginary)
    tl.store(tilts + source, tilt + 0.0)
    tl.store(probability + source, chance)
    tl.store(log_normalizer + source, log_z + tl.log(chance) + (k - forced) * reference)

    # Find the largest of the probabilities that K − c coins of the tail come up heads.
    most = zero
    for start in range(0, k + 1, 32):
        heads_of_head = start + tl.arange(0, 32)
        row = back + (heads_of_head[:, None] * POINTS + point[None, :]) * 2
        inside = (heads_of_head <= k)[:, None]
        a = tl.load(row, mask=inside, other=0.0) * tail_a[None, :]
        b = tl.load(row + 1, mask=inside, other=0.0) * tail_b[None, :]
        most = tl.maximum(most, tl.max(tl.sum(a - b, axis=1), axis=0))

    # Flip the coins of the head, and accept by the law of the tail's other K − c.
    seed = tl.load(seeds + source)
    drawn_before = tl.load(counts + source)
    stream = drawn_before << 32
    p = _sigmoid(y + tilt)
    flips = (y > -float("inf")).to(tl.int32)
    flips = tl.where(forced == k, (y == float("inf")).to(tl.int32), flips)
    # The search reports scores that are NaN; here they must not cause an endless loop.
    determined = (forced >= k) | (positive <= k) | (chance != chance)
    done = determined.to(tl.int32)
    while done == 0:
        chosen = uniform64(seed, stream + coin) < p
        count = tl.minimum(tl.sum(chosen.to(tl.int32), axis=0), k + 1)
        row = back + (tl.minimum(count, k) * POINTS + point) * 2
        likely = tl.sum(tl.load(row) * tail_a - tl.load(row + 1) * tail_b, axis=0)
        likely = tl.where(count <= k, likely, 0.0)
        done = (uniform64(seed, stream + COINS) * most < likely).to(tl.int32)
        flips = chosen.to(tl.int32)
        stream += COINS + 1
    # Whatever the scores are, never write more than K.
    heads_so_far = tl.cumsum(flips, axis=0)
    flips = tl.where(heads_so_far <= k, flips, 0)
    count = tl.sum(flips, axis=0)
    slot = source * k + heads_so_far - 1
    item = tl.load(head_index + coin, mask=coin < m, other=0)
    tl.store(index + slot, item, mask=flips > 0)
    tl.store(picked + slot, y, mask=flips > 0)

    # Draw items of the tail, and all of them again if two coincide.
    wanted = tl.where(determined, 0, k - count)
    out = source * k + count
    number = tl.arange(0, PLACES)
    again = (wanted > 0).to(tl.int32)
    while again > 0:
        tl.debug_barrier()  # the last comparison has read what is written now
        for start in range(0, wanted, GROUP):
            items, log_w = _from_tail(
                scores, offset, slot_of, bits, reach, source, seed, stream, block_mass, unit,
                slots, parents, tokens, chunks, inverse_temperature, ODDS, LENGTH, GROUP, BLOCKS,
            )  # fmt: skip
            some = start + tl.arange(0, GROUP)
            tl.store(index + out + some, items, mask=some < wanted)
            tl.store(picked + out + some, log_w - reference, mask=some < wanted)
            stream += 2 * GROUP
        tl.debug_barrier()
        drawn = tl.load(index + out + number, mask=number < wanted, other=-1)
        again = tl.zeros((), tl.int32)
        for start in range(0, wanted, GROUP):
            some = start + tl.arange(0, GROUP)
            others = tl.load(index + out + some, mask=some < wanted, other=-2)
            twice = (others[:, None] == drawn[None, :]) & (some[:, None] < number[None, :])
            again += tl.sum(twice.to(tl.int32))
    there = number < count + wanted
    tl.store(present + source * k + number, there, mask=number < k)
    tl.store(index + source * k + number, tl.zeros_like(number), mask=(number < k) & ~there)
    tl.store(counts + source, drawn_before + 1)


@kernel(do_not_specialize=NUMBERS)
def inclusion(
    picked, present, tilts, turned, probability, head, cosines, sines, lifts, out,
    k, m,
    PLACES: tl.constexpr, COINS: tl.constexpr, POINTS: tl.constexpr,
):  # fmt: skip
    """Program (source, block): log π = log p + log P(S without i = K − 1) − log P(S = K).

    It handles PLACES of the K items i of the source.
    """
    source = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    here = number < k
    y = tl.load(picked + source * k + number, mask=here, other=0.0)
    x = y + tl.load(tilts + source)
    p, q = _sigmoid(x), _sigmoid(-x)
    point = tl.arange(0, POINTS)
    real = tl.load(turned + source * 2 * POINTS + point)
    aside = tl.load(turned + (source * 2 + 1) * POINTS + point) * tl.load(sines + point)
    turn = real * tl.load(cosines + point) - aside
    modulus = (p * q)[:, None] * tl.load(lifts + point)[None, :]
    modulus += ((q - p) * (q - p))[:, None]
    others = q * tl.sum(turn[None, :] / modulus, axis=1)
    others += p * tl.sum(real[None, :] / modulus, axis=1)
    value = -softplus(-x) + tl.log(others) - tl.log(tl.load(probability + source))
    coin = tl.arange(0, COINS)
    all_y = tl.load(head + source * m + coin, mask=coin < m, other=-float("inf"))
    certain = tl.sum((all_y > -float("inf")).to(tl.int32), axis=0) <= k
    value = tl.where((y == float("inf")) | certain, 0.0, tl.minimum(value, 0.0))
    there = tl.load(present + source * k + number, mask=here, other=0)
    tl.store(out + source * k + number, tl.where(there != 0, value, 0.0), mask=here)
