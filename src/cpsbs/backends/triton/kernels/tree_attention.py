"""Attention to the past of one or a few rows of a source, which are leaves of one tree.

Near the root the rows of a program have their past in common: it is read once for them. Behind the
last position that they share, a program reads some positions of each row at a time, finds their
keys through the table, and multiplies them with the queries of all its rows: tensor cores do that
for 16 queries in no more time than for one. Only products of a row with its own past count. Where
there are few sources and heads, a program has a single row, so that there are many programs, and
each has few positions to go through one after another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cpsbs.backends.triton.kernels.attention_programs import blend, plus, weights
from cpsbs.backends.triton.kernels.launching import kernel
from cpsbs.backends.triton.kernels.overlap import after_previous, prefetch

BLOCK, WIDE_BLOCK = 64, 32
"""Keys that a program multiplies at a time, and the same for wide heads"""

WIDE = 128
"""Heads of more bytes are wide: a program has registers for fewer of their keys, and fewer rows."""

WARPS = 4

MOST_MEMBERS, MOST_WIDE_MEMBERS, QUERIES = 16, 8, 16
"""The most rows that a program handles, as long as these have no more queries that share keys."""


def members(k: int, group: int, width: int) -> int:
    """Return how many of K rows a program handles, divided evenly among as few as possible.

    Args:
        k: the rows of a source.
        group: the queries of a row that share keys.
        width: the bytes of a head.
    """
    most = MOST_MEMBERS if width <= WIDE else MOST_WIDE_MEMBERS
    programs = -(-k // max(1, min(most, QUERIES // group)))
    return -(-k // programs)


def most_group(dim: int, itemsize: int) -> int:
    """Return the most queries of a row that share keys for which a program has enough registers.

    Args:
        dim: the size of a head.
        itemsize: the bytes of a number.
    """
    if itemsize > 2:
        return 16
    return 64 if dim <= 64 else 32


SCANNED: tl.constexpr = tl.constexpr(256)
"""Positions that are compared at a time to find out how much the rows share."""


@triton.jit
def _added_up(parts, at, shown, step, PARTS: tl.constexpr):
    """Return the sum of numbers that lie in parts ``step`` apart."""
    total = tl.load(parts + at, mask=shown, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * step + at, mask=shown, other=0.0).to(tl.float32)
    return total


@triton.jit
def _turned(one, two, cosines, sines, at, HALF: tl.constexpr):
    """Return the halves of vectors after a rotation by the angles at these places."""
    c, s = tl.load(cosines + at).to(tl.float32), tl.load(sines + at).to(tl.float32)
    d, r = tl.load(cosines + at + HALF).to(tl.float32), tl.load(sines + at + HALF).to(tl.float32)
    return one * c - two * s, two * d + one * r


@triton.jit
def _finite(x):
    """Return the numbers, with 0 for inf and NaN."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0)


@triton.jit
def _score(q, p, keys, at, shown, scaling, HALF: tl.constexpr):
    """Return the products of queries, in two halves, with the keys at these places."""
    key = tl.load(keys + at, mask=shown, other=0.0)
    other = tl.load(keys + at + HALF, mask=shown, other=0.0)
    score = tl.dot(q, tl.trans(key), input_precision="ieee")
    return tl.dot(p, tl.trans(other), score, input_precision="ieee") * scaling


@triton.jit
def _slots(
    block, common_blocks, shared, length, leader, k,
    MEMBERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return position, row and existence of what is in the slots [BLOCK] of a block.

    The first blocks are of the positions that all rows share; others have some of each row.
    """
    slot, span = tl.arange(0, BLOCK), BLOCK // MEMBERS
    common = block < common_blocks
    t = tl.where(
        common, block * BLOCK + slot, shared + (block - common_blocks) * span + slot % span
    )
    whose = tl.where(common, leader, leader + slot // span)
    theirs = common | (slot < span * MEMBERS)
    return t, whose, theirs & (t < tl.where(common, shared, length)) & (whose < k)


@kernel
def attend(
    out, query, q_row, q_head,
    new_keys, nk_row, nk_head, new_values, nv_row, nv_head, step,
    cosines, sines, c_row,
    keys, values, place, position,
    mask, m_row, m_head, m_place, bias, b_row, b_head, b_place,
    k, capacity, scaling,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, MEMBERS: tl.constexpr, PADDED: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (MEMBERS rows, kv head): attend from their GROUP queries each; write the new keys.

    Queries, new keys and new values are sums of PARTS numbers, ``step`` apart. They are rotated if
    there are cosines. PADDED is a power of two, at least MEMBERS. If EARLY, the kernel before this
    one writes nothing but these numbers, so that the table can be read meanwhile, and keys and
    values can be fetched into the card's cache.
    """
    if not EARLY:
        after_previous()
    groups = tl.cdiv(k, MEMBERS)
    source = (tl.program_id(0) // groups).to(tl.int64)
    leader = tl.program_id(0) % groups * MEMBERS
    kv_head = tl.program_id(1).to(tl.int64)
    kv_heads = tl.num_programs(1)
    length = tl.load(position + source).to(tl.int32)
    n = tl.arange(0, QUERIES)
    member, head = leader + n // GROUP, kv_head * GROUP + n % GROUP
    queried = (n < MEMBERS * GROUP) & (member < k)
    row = source * k + member
    half = tl.arange(0, HALF)[None, :]
    shown = queried[:, None]

    # How many positions the rows share, from the first one on.
    every, shared = leader + tl.minimum(tl.arange(0, PADDED), MEMBERS - 1), length
    table = place + source * k * capacity
    for start in range(0, length, SCANNED):
        t = start + tl.arange(0, SCANNED)
        first = tl.load(table + leader * capacity + t, mask=t < length, other=0)[None, :]
        compared = (every < k)[:, None] & (t < length)[None, :]
        other = tl.load(table + every[:, None] * capacity + t[None, :], mask=compared, other=0)
        differs = tl.max((compared & (other != first)).to(tl.int32), axis=0)
        shared = tl.minimum(shared, tl.min(tl.where(differs > 0, t, length), axis=0))
    common_blocks = tl.cdiv(shared, BLOCK)
    blocks = common_blocks + tl.cdiv(length - shared, BLOCK // MEMBERS)
    past = (source * k * kv_heads + kv_head) * capacity
    if EARLY:
        line: tl.constexpr = 1024 // keys.dtype.element_ty.primitive_bitwidth
        for block in range(blocks):
            t, whose, held = _slots(
                block, common_blocks, shared, length, leader, k, MEMBERS, BLOCK
            )  # fmt: skip
            holder = tl.load(table + whose * capacity + t, mask=held, other=0)
            spot = past + tl.where(held, holder.to(tl.int64) * kv_heads * capacity + t, 0)
            for i in tl.static_range((2 * HALF + line - 1) // line):
                prefetch(keys + spot * (2 * HALF) + i * line)
                prefetch(values + spot * (2 * HALF) + i * line)
        after_previous()

    at = (row * q_row + head * q_head)[:, None] + half
    q = _added_up(query, at, shown, step, PARTS)
    p = _added_up(query, at + HALF, shown, step, PARTS)
    at = (row * nk_row + kv_head * nk_head)[:, None] + half
    k_one = _added_up(new_keys, at, shown, step, PARTS)
    k_two = _added_up(new_keys, at + HALF, shown, step, PARTS)
    at = (row * nv_row + kv_head * nv_head)[:, None] + half
    kind = keys.dtype.element_ty
    v_one = _added_up(new_values, at, shown, step, PARTS).to(kind)
    v_two = _added_up(new_values, at + HALF, shown, step, PARTS).to(kind)
    if cosines is not None:
        at = tl.where(queried, row, 0)[:, None] * c_row + half
        q, p = _turned(q, p, cosines, sines, at, HALF)
        k_one, k_two = _turned(k_one, k_two, cosines, sines, at, HALF)
    q, p, k_one, k_two = q.to(kind), p.to(kind), k_one.to(kind), k_two.to(kind)
    score_new = tl.sum(q.to(tl.float32) * k_one.to(tl.float32), 1)
    score_new = (score_new + tl.sum(p.to(tl.float32) * k_two.to(tl.float32), 1)) * scaling
    m_at, b_at = row * m_row + head * m_head, row * b_row + head * b_head
    score_new = plus(score_new, mask, m_at + length * m_place, queried)
    score_new = plus(score_new, bias, b_at + length * b_place, queried)
    m_at, b_at = m_at[:, None], b_at[:, None]

    # The maximum starts above −∞, so that rows that see nothing do not compute ∞ − ∞.
    top, total = tl.full([QUERIES], -3.4e38, tl.float32), tl.zeros([QUERIES], tl.float32)
    mean = tl.zeros([QUERIES, HALF], tl.float32)
    rest = tl.zeros([QUERIES, HALF], tl.float32)
    for block in range(blocks):
        t, whose, held = _slots(block, common_blocks, shared, length, leader, k, MEMBERS, BLOCK)
        holder = tl.load(table + whose * capacity + t, mask=held, other=0)
        spot = (past + holder.to(tl.int64) * kv_heads * capacity + t)[:, None] * (2 * HALF) + half
        # All loads are issued before the first result is waited for.
        value = tl.load(values + spot, mask=held[:, None], other=0.0)
        other = tl.load(values + spot + HALF, mask=held[:, None], other=0.0)
        score = _score(q, p, keys, spot, held[:, None], scaling, HALF)
        own = (member[:, None] == whose[None, :]) | (block < common_blocks)
        asked = own & held[None, :] & shown
        score = tl.where(asked, score, float("-inf"))
        score = plus(score, mask, m_at + t[None, :] * m_place, asked)
        score = plus(score, bias, b_at + t[None, :] * b_place, asked)
        top, total, weight, fade = weights(score, top, total)
        mean, rest = blend(weight, fade, value, mean), blend(weight, fade, other, rest)

    higher = tl.maximum(top, score_new)
    weight, fade = tl.exp(score_new - higher), tl.exp(top - higher)
    # A row that sees nothing has the sum 0.
    total = tl.maximum(total * fade + weight, 1e-30)
    mean = (mean * fade[:, None] + weight[:, None] * v_one.to(tl.float32)) / total[:, None]
    rest = (rest * fade[:, None] + weight[:, None] * v_two.to(tl.float32)) / total[:, None]
    at = ((row * kv_heads * GROUP + head) * (2 * HALF))[:, None] + half
    tl.store(out + at, mean, mask=shown)
    tl.store(out + at + HALF, rest, mask=shown)
    own = (((row * kv_heads + kv_head) * capacity + length) * (2 * HALF))[:, None] + half
    once = shown & (n % GROUP == 0)[:, None]
    tl.store(keys + own, k_one, mask=once)
    tl.store(keys + own + HALF, k_two, mask=once)
    # In later steps a value has the weight 0 for other rows, and 0 · inf is NaN. A row that refers
    # to it has met it here already.
    tl.store(values + own, _finite(v_one), mask=once)
    tl.store(values + own + HALF, _finite(v_two), mask=once)
