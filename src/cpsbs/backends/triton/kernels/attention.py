"""Attention from one new token per row to the KV cache, as a decoding step needs it.

The aim is to read keys and values once. A row attends to its own past through a table that says in
which row of its source each position lies, so that nothing has to move when hypotheses change rows,
and what hypotheses have in common is read from the same memory. All rows of a source attend to the
encoder's states together. Query heads that share keys and values are handled as several queries.

A program handles a few rows together (``tree_attention``) where the size of a head suits that, and
otherwise one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from cpsbs.backends.triton.kernels import attention_programs as programs
from cpsbs.backends.triton.kernels import tree_attention as tree
from cpsbs.backends.triton.kernels.overlap import early

TILE = {False: 1024, True: 4096}
"""Elements of the keys, and of the values, that a program reads at a time: with one query (False),
and with several (True), which tensor cores multiply …"""

WARPS = {False: 1, True: 2}
"""… and its warps. For one query, many small programs hide each other's latency best."""

QUERIES = 16
"""Queries of a program that share keys: tensor cores multiply at least 16 rows."""


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
    together: bool = True,
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
        together: whether a program may handle several rows of a source.
    """
    rows, heads, _, dim = query.shape
    kv_heads, capacity = cache[0].shape[1:3]
    window = capacity if window is None else window
    group = heads // kv_heads
    if suits_tree(group, dim, query.dtype):
        found = attend_in_tree(query, new, cache, place, position, mask, bias, scaling, together)
        if found is not None:
            return found
    out = torch.empty((rows, 1, heads, dim), dtype=query.dtype, device=query.device)
    query, k_new, v_new = (_dense(x) for x in (query, *new))
    padded_dim = max(16, triton.next_power_of_2(dim))
    block = max(16, min(TILE[group > 1] // padded_dim, 128, triton.next_power_of_2(window)))
    programs.own[(rows, kv_heads)](
        *(out, query, query.stride(0), query.stride(1)),
        *(k_new, k_new.stride(0), k_new.stride(1), v_new, v_new.stride(0), v_new.stride(1)),
        *(*cache, place, position),
        *_added(mask, rows, heads), *_added(bias, rows, heads),
        *(place.shape[1], capacity, float(dim**-0.5 if scaling is None else scaling)),
        GROUP=group, PADDED=max(QUERIES, triton.next_power_of_2(group)),
        DIM=dim, PADDED_DIM=padded_dim, BLOCK=block, num_warps=WARPS[group > 1],
    )  # fmt: skip
    return out


def suits_tree(group: int, dim: int, dtype: torch.dtype) -> bool:
    """Return whether a program may handle rows together, with ``group`` queries each."""
    few = group <= tree.most_group(dim, dtype.itemsize)
    return few and dim >= 32 and dim & (dim - 1) == 0


def attend_in_tree(
    query: Tensor,
    new: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    place: Tensor,
    position: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scaling: float | None = None,
    together: bool = True,
    parts: Tensor | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
) -> Tensor | None:
    """Do what ``attend_by_table`` does where ``suits_tree`` is true.

    Returns None, and has done nothing, if the device has too little shared memory for it.

    Args:
        query: see ``attend_by_table``, as are all that are not named here.
        new: the keys and values of the new tokens.
        cache: the keys and values of the past.
        place: where they lie.
        position: the positions of the new tokens.
        mask: what is added to the scores.
        bias: what else is added.
        scaling: the factor of the products.
        together: whether a program may handle several rows of a source.
        parts: [n, …] numbers of which ``query`` and ``new`` are views of the first part. They are
            sums over all parts.
        angles: cosines and sines [rows or 1, dim] of a rotation of queries and new keys.
    """
    rows, heads, _, dim = query.shape
    sources, k, capacity = place.shape
    kv_heads, dtype = cache[0].shape[1], cache[0].dtype
    group = heads // kv_heads
    width = dim * dtype.itemsize
    members = tree.members(k, group, width) if together else 1
    out = torch.empty((rows, 1, heads, dim), dtype=dtype, device=query.device)
    if parts is None:
        query, new = _dense(query), (_dense(new[0]), _dense(new[1]))
    k_new, v_new = new
    cos, sin = (None, None) if angles is None else angles
    queries = max(tree.QUERIES, triton.next_power_of_2(members * group))
    count = 1 if parts is None else len(parts)
    try:
        tree.attend[(sources * triton.cdiv(k, members), kv_heads)](
            *(out, query, query.stride(0), query.stride(1)),
            *(k_new, k_new.stride(0), k_new.stride(1)),
            *(v_new, v_new.stride(0), v_new.stride(1)),
            *(0 if parts is None else parts.stride(0), cos, sin),
            *(0 if cos is None or len(cos) == 1 else cos.stride(0), *cache, place, position),
            *_added(mask, rows, heads), *_added(bias, rows, heads),
            *(k, capacity, float(dim**-0.5 if scaling is None else scaling)),
            GROUP=group, QUERIES=queries, MEMBERS=members,
            PADDED=triton.next_power_of_2(members), HALF=dim // 2,
            BLOCK=tree.BLOCK if width <= tree.WIDE else tree.WIDE_BLOCK,
            PARTS=count, EARLY=parts is not None,
            num_warps=tree.WARPS, **({} if parts is None else early()),
        )  # fmt: skip
    except OutOfResources:  # it was not launched
        return None
    return out


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
    programs.shared[(sources, kv_heads, triton.cdiv(k * group, QUERIES))](
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
