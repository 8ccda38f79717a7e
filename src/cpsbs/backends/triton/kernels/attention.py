"""Attention from one new token per row to the KV cache, as a decoding step needs it.

The aim is to read keys and values once. A row attends to its own past through a table that says in
which row of its source each position lies, so that nothing has to move when hypotheses change rows,
and what hypotheses have in common is read from the same memory. All rows of a source attend to the
encoder's states together. Query heads that share keys and values are handled as several queries.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = {False: 1024, True: 4096}
"""Elements of the keys, and of the values, that a program reads at a time: with one query (False),
and with several (True), which tensor cores multiply …"""

WARPS = {False: 1, True: 2}
"""… and its warps. For one query, many small programs hide each other's latency best."""

QUERIES = 16
"""Queries of a program that share keys: tensor cores multiply at least 16 rows."""


@triton.jit
def _plus(score, added, at, shown):
    """Return the scores with what is added to them at these places, if anything is."""
    if added is not None:
        score += tl.load(added + at, mask=shown, other=0.0).to(tl.float32)
    return score


@triton.jit
def _blend(score, v, top, total, mean):
    """Update the running softmax of queries [Q] by scores [Q, T] and values [T, dim].

    It is kept as the largest score [Q], the sum of weights [Q] and the weighted sum [Q, dim].
    """
    higher = tl.maximum(top, tl.max(score, 1))
    weight, fade = tl.exp(score - higher[:, None]), tl.exp(top - higher)
    total = total * fade + tl.sum(weight, 1)
    mean = tl.dot(weight.to(v.dtype), v, mean * fade[:, None], input_precision="ieee")
    return higher, total, mean


@triton.jit
def _own(
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
    score_new = _plus(score_new, mask, m_at + length * m_place, queried)
    score_new = _plus(score_new, bias, b_at + length * b_place, queried)

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
            score = _plus(score, mask, m_at + t * m_place, held)
            score = _plus(score, bias, b_at + t * b_place, held)
            higher = tl.maximum(top, score)
            weight, fade = tl.exp(score - higher), tl.exp(top - higher)
            total = total * fade + weight
            mean = mean * fade[:, None] + weight[:, None] * value.to(tl.float32)
            top = higher
        else:
            score = tl.dot(q, tl.trans(key), input_precision="ieee") * scaling
            asked = queried[:, None] & held[None, :]
            score = tl.where(asked, score, float("-inf"))
            score = _plus(score, mask, m_at[:, None] + t[None, :] * m_place, asked)
            score = _plus(score, bias, b_at[:, None] + t[None, :] * b_place, asked)
            top, total, mean = _blend(score, value, top, total, mean)

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
    own = ((row * kv_heads + kv_head) * capacity + length) * DIM
    tl.store(keys + own + dims, k_new, mask=inside)
    tl.store(values + own + dims, v_new, mask=inside)


def attend_by_table(
    query: Tensor,
    new: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    place: Tensor,
    position: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scaling: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attend from the new token of each row to its past and itself; return [rows, 1, heads, dim].

    Args:
        query: [rows, heads, 1, dim] the queries of the new tokens.
        new: [rows, kv heads, 1, dim] their keys and values.
        cache: [rows, kv heads, capacity, dim] keys and values, contiguous. The new ones are written
            into it, in their own row, at their position.
        place: [b, K, capacity] int32, in which row of its source each position of a row lies.
        position: [b] the positions of the new tokens.
        mask: [rows or 1, heads or 1, 1, window] what is added to the scores.
        bias: what else is added, in the same shapes.
        scaling: the factor of the products; by default 1/√dim.
        window: a number above all positions that the host knows; by default the capacity.
    """
    rows, heads, _, dim = query.shape
    kv_heads, capacity = cache[0].shape[1:3]
    window = capacity if window is None else window
    group = heads // kv_heads
    out = torch.empty((rows, 1, heads, dim), dtype=query.dtype, device=query.device)
    query, k_new, v_new = (_dense(x) for x in (query, *new))
    padded_dim = max(16, triton.next_power_of_2(dim))
    block = max(16, min(TILE[group > 1] // padded_dim, 128, triton.next_power_of_2(window)))
    _own[(rows, kv_heads)](
        *(out, query, query.stride(0), query.stride(1)),
        *(k_new, k_new.stride(0), k_new.stride(1), v_new, v_new.stride(0), v_new.stride(1)),
        *(*cache, place, position),
        *_added(mask, rows, heads), *_added(bias, rows, heads),
        *(place.shape[1], capacity, float(dim**-0.5 if scaling is None else scaling)),
        GROUP=group, PADDED=max(QUERIES, triton.next_power_of_2(group)),
        DIM=dim, PADDED_DIM=padded_dim, BLOCK=block, num_warps=WARPS[group > 1],
    )  # fmt: skip
    return out


@triton.jit
def _shared(
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
        score = _plus(score, mask, m_at + t[None, :] * m_place, asked)
        score = _plus(score, bias, b_at + t[None, :] * b_place, asked)
        top, total, mean = _blend(score, value, top, total, mean)
    o_at = (row * kv_heads * GROUP + head) * DIM
    mean = mean / tl.maximum(total, 1e-30)[:, None]
    tl.store(out + o_at[:, None] + dims[None, :], mean, mask=shown)


def attend_shared(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scaling: float | None = None,
) -> Tensor:
    """Attend from queries [b·K, heads, 1, dim] to their sources; return [b·K, 1, heads, dim].

    Keys and values are [b, kv heads, length, dim], contiguous; for mask, bias and scaling see
    ``attend_by_table``.
    """
    rows, heads, _, dim = query.shape
    sources, kv_heads, length, _ = key.shape
    k, group = rows // sources, heads // kv_heads
    out = torch.empty((rows, 1, heads, dim), dtype=query.dtype, device=query.device)
    query = _dense(query)
    padded_dim = max(16, triton.next_power_of_2(dim))
    block = max(16, min(TILE[True] // padded_dim, 128, triton.next_power_of_2(length)))
    _shared[(sources, kv_heads, triton.cdiv(k * group, QUERIES))](
        *(out, query, query.stride(0), query.stride(1), key, value),
        *_added(mask, rows, heads), *_added(bias, rows, heads),
        *(k, length, float(dim**-0.5 if scaling is None else scaling)),
        GROUP=group, QUERIES=QUERIES, DIM=dim, PADDED_DIM=padded_dim, BLOCK=block, num_warps=1,
    )  # fmt: skip
    return out


def _dense(x: Tensor) -> Tensor:
    """Return x with the elements of a head side by side, as they nearly always are."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _added(x: Tensor | None, rows: int, heads: int) -> tuple[Any, int, int, int]:
    """Return x and its strides by row, head and position; they are 0 where x is broadcast."""
    if x is None:
        return None, 0, 0, 0
    strides = x.expand(rows, heads, 1, x.shape[-1]).stride()
    return x, strides[0], strides[1], strides[3]
