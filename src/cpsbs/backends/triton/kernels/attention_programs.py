"""The kernels of ``attention`` for single rows and for the encoder's keys."""

from __future__ import annotations

import triton
import triton.language as tl

from cpsbs.backends.triton.kernels.launching import kernel


@triton.jit
def plus(score, added, at, shown):
    """Return the scores with what is added to them at these places, if anything is."""
    if added is not None:
        score += tl.load(added + at, mask=shown, other=0.0).to(tl.float32)
    return score


@triton.jit
def weights(score, top, total):
    """Update the largest score [Q] and the sum of weights [Q] of queries by scores [Q, T].

    Returns both, the weights [Q, T] of the scores, and by how much earlier weights fade [Q, 1].
    """
    higher = tl.maximum(top, tl.max(score, 1))
    weight, fade = tl.exp(score - higher[:, None]), tl.exp(top - higher)
    return higher, total * fade + tl.sum(weight, 1), weight, fade[:, None]


@triton.jit
def blend(weight, fade, value, mean):
    """Return the weighted sums [Q, dim] with the values [T, dim] added."""
    return tl.dot(weight.to(value.dtype), value, mean * fade, input_precision="ieee")


@kernel
def own(
    out, query, q_row, q_head,
    new_keys, nk_row, nk_head, new_values, nv_row, nv_head,
    keys, values, place, position,
    mask, m_row, m_head, m_place, bias, b_row, b_head, b_place,
    k, capacity, scaling,
    GROUP: tl.constexpr, PADDED: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, kv head): attend from the row's GROUP queries to its past and its new key.

    It finds the row's past through the table, writes GROUP · DIM outputs, and then the new key and
    value into the cache at the row's position. Other programs may read this row at the same time,
    but only at earlier positions.
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    kv_heads = tl.num_programs(1)
    source = row // k
    length = tl.load(position + source).to(tl.int32)
    dims = tl.arange(0, PADDED_DIM)
    inside = dims < DIM
    k_new = tl.load(new_keys + row * nk_row + kv_head * nk_head + dims, mask=inside, other=0.0)
    v_new = tl.load(new_values + row * nv_row + kv_head * nv_head + dims, mask=inside, other=0.0)
    # The maximum starts above −∞, so that rows that see nothing do not compute ∞ − ∞.
    if GROUP == 1:
        head = kv_head
        q = tl.load(query + row * q_row + head * q_head + dims, mask=inside, other=0.0)
        q = q.to(tl.float32)
        score_new = tl.sum(q * k_new.to(tl.float32), 0) * scaling
        queried = head >= 0  # always true: there is one query
        # Every place of a block has a softmax of its own; they are joined after the loop.
        top, total = tl.full([BLOCK], -3.4e38, tl.float32), tl.zeros([BLOCK], tl.float32)
        mean = tl.zeros([BLOCK, PADDED_DIM], tl.float32)
    else:
        member = tl.arange(0, PADDED)
        queried = member < GROUP
        head = kv_head * GROUP + member
        q_at = row * q_row + head[:, None] * q_head + dims[None, :]
        q = tl.load(query + q_at, mask=queried[:, None] & inside[None, :], other=0.0)
        score_new = tl.sum(q.to(tl.float32) * k_new[None, :].to(tl.float32), 1) * scaling
        top, total = tl.full([PADDED], -3.4e38, tl.float32), tl.zeros([PADDED], tl.float32)
        mean = tl.zeros([PADDED, PADDED_DIM], tl.float32)
    m_at = row * m_row + head * m_head
    b_at = row * b_row + head * b_head
    score_new = plus(score_new, mask, m_at + length * m_place, queried)
    score_new = plus(score_new, bias, b_at + length * b_place, queried)

    for start in range(0, length, BLOCK):
        t = start + tl.arange(0, BLOCK)
        held = t < length
        holder = tl.load(place + row * capacity + t, mask=held, other=0)
        at = (((source * k + holder) * kv_heads + kv_head) * capacity + t) * DIM
        at = at[:, None] + dims[None, :]
        shown = held[:, None] & inside[None, :]
        # Both loads are issued before the first result is waited for.
        key = tl.load(keys + at, mask=shown, other=0.0)
        value = tl.load(values + at, mask=shown, other=0.0)
        if GROUP == 1:
            score = tl.sum(key.to(tl.float32) * q[None, :], 1) * scaling
            score = tl.where(held, score, float("-inf"))
            score = plus(score, mask, m_at + t * m_place, held)
            score = plus(score, bias, b_at + t * b_place, held)
            higher = tl.maximum(top, score)
            weight, fade = tl.exp(score - higher), tl.exp(top - higher)
            total = total * fade + weight
            mean = mean * fade[:, None] + weight[:, None] * value.to(tl.float32)
            top = higher
        else:
            score = tl.dot(q, tl.trans(key), input_precision="ieee") * scaling
            asked = queried[:, None] & held[None, :]
            score = tl.where(asked, score, float("-inf"))
            score = plus(score, mask, m_at[:, None] + t[None, :] * m_place, asked)
            score = plus(score, bias, b_at[:, None] + t[None, :] * b_place, asked)
            top, total, weight, fade = weights(score, top, total)
            mean = blend(weight, fade, value, mean)

    if GROUP == 1:
        highest = tl.max(top, 0)
        fade = tl.exp(top - highest)
        total, mean, top = tl.sum(total * fade, 0), tl.sum(mean * fade[:, None], 0), highest
    higher = tl.maximum(top, score_new)
    weight, fade = tl.exp(score_new - higher), tl.exp(top - higher)
    # A row that sees nothing has the sum 0.
    total = tl.maximum(total * fade + weight, 1e-30)
    out += row * kv_heads * GROUP * DIM
    if GROUP == 1:
        mean = (mean * fade + weight * v_new.to(tl.float32)) / total
        tl.store(out + head * DIM + dims, mean, mask=inside)
    else:
        mean = mean * fade[:, None] + weight[:, None] * v_new[None, :].to(tl.float32)
        o_at = head[:, None] * DIM + dims[None, :]
        tl.store(out + o_at, mean / total[:, None], mask=queried[:, None] & inside[None, :])
    at = ((row * kv_heads + kv_head) * capacity + length) * DIM
    tl.store(keys + at + dims, k_new, mask=inside)
    tl.store(values + at + dims, v_new, mask=inside)


@kernel
def shared(
    out, query, q_row, q_head, keys, values,
    mask, m_row, m_head, m_place, bias, b_row, b_head, b_place,
    k, length, scaling,
    GROUP: tl.constexpr, QUERIES: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (source, kv head, block): attend from QUERIES of the source's K · GROUP queries.

    They share keys and values [length, DIM]; each has DIM outputs.
    """
    source = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    kv_heads = tl.num_programs(1)
    n = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    queried = n < k * GROUP
    row = source * k + n // GROUP
    head = kv_head * GROUP + n % GROUP
    dims = tl.arange(0, PADDED_DIM)
    inside = dims < DIM
    shown = queried[:, None] & inside[None, :]
    q_at = row * q_row + head * q_head
    q = tl.load(query + q_at[:, None] + dims[None, :], mask=shown, other=0.0)
    m_at = (row * m_row + head * m_head)[:, None]
    b_at = (row * b_row + head * b_head)[:, None]
    top, total = tl.full([QUERIES], -3.4e38, tl.float32), tl.zeros([QUERIES], tl.float32)
    mean = tl.zeros([QUERIES, PADDED_DIM], tl.float32)
    for start in range(0, length, BLOCK):
        t = start + tl.arange(0, BLOCK)
        at = ((source * kv_heads + kv_head) * length + t) * DIM
        at = at[:, None] + dims[None, :]
        held = (t < length)[:, None] & inside[None, :]
        key = tl.load(keys + at, mask=held, other=0.0)
        value = tl.load(values + at, mask=held, other=0.0)
        asked = queried[:, None] & (t < length)[None, :]
        score = tl.dot(q, tl.trans(key), input_precision="ieee") * scaling
        score = tl.where(asked, score, float("-inf"))
        score = plus(score, mask, m_at + t[None, :] * m_place, asked)
        score = plus(score, bias, b_at + t[None, :] * b_place, asked)
        top, total, weight, fade = weights(score, top, total)
        mean = blend(weight, fade, value, mean)
    o_at = (row * kv_heads * GROUP + head) * DIM
    mean = mean / tl.maximum(total, 1e-30)[:, None]
    tl.store(out + o_at[:, None] + dims[None, :], mean, mask=shown)
