"""Attention of one query position per row over a cache, as a decoding step needs it.

The job is to read the keys and values once. What transformers calls instead is made for many
queries, and where heads share keys and values it copies these for every head before.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Those whose sums in float32 are good enough."""

TILE, WARPS = 4096, 4
"""Elements of the keys, and of the values, that a program reads at once, with so many warps."""

UNDERSTOOD = {
    *("module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal"),
    *("position_bias", "kwargs"),
}
"""Parameters of transformers' function whose meaning is known here."""

UNUSUAL = ("softcap", "s_aux", "head_mask", "layer_head_mask", "output_attentions")
"""What a model may also ask for; transformers' function decides what becomes of it."""

log = logging.getLogger("cpsbs")


@contextlib.contextmanager
def one_query_attention() -> Iterator[None]:
    """In this thread, attention "sdpa" of models comes from the kernel here where it can."""
    with _LOCK:
        _state.users += 1
        # Whoever has put something else there wants that.
        if _interface()["sdpa"] is sdpa_attention_forward and _state.understood:
            _interface.register("sdpa", _forward)
    before, _thread.active = _thread.active, True
    try:
        yield
    finally:
        _thread.active = before
        with _LOCK:
            _state.users -= 1
            if _state.users == 0 and _interface()["sdpa"] is _forward:
                _interface.register("sdpa", sdpa_attention_forward)


class _Thread(threading.local):
    active = False


class _State:
    users, broken = 0, False
    understood = set(inspect.signature(sdpa_attention_forward).parameters) <= UNDERSTOOD


_interface: Any = AttentionInterface
_thread, _state, _LOCK = _Thread(), _State(), threading.Lock()


def _forward(*args: Any, **kwargs: Any) -> Any:
    """In place of ``sdpa_attention_forward``."""
    if _thread.active and not _state.broken:
        try:
            found = _if_possible(*args, **kwargs)
            if found is not None:
                return found, None
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _state.broken = True
            log.info("attention is computed without Triton: %s: %s", type(error).__name__, error)
    return sdpa_attention_forward(*args, **kwargs)


def _if_possible(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: Any = None,
    is_causal: Any = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """[rows, 1, heads, dim], or None. It does not matter whether one query is causal."""
    rows, heads, queries, dim = query.shape
    kv_heads, window = key.shape[1:3]
    tensors = [query, key, value]
    both = (attention_mask, position_bias)
    added = [x for x in both if x is not None]
    possible = (
        # Triton's interpreter is there for tests.
        (query.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")
        and queries == 1
        and key.shape == value.shape == (rows, kv_heads, window, dim)
        and heads == kv_heads * getattr(module, "num_key_value_groups", 1)
        and dropout == 0
        and isinstance(scaling, float | int | None)
        and len({x.dtype for x in tensors}) == 1
        and all(x.dtype in DTYPES and x.device == query.device for x in tensors + added)
        and all(x.ndim == 4 and x.shape[2:] == (1, window) for x in added)
        and all(x.shape[0] in (1, rows) and x.shape[1] in (1, heads) for x in added)
        and all(kwargs.get(name) is None or kwargs[name] is False for name in UNUSUAL)
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors + added))
        and not torch.compiler.is_compiling()
    )
    return attend(query, key, value, *both, scaling) if possible else None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scaling: float | None = None,
) -> Tensor:
    """[rows, 1, heads, dim] of a query [rows, heads, 1, dim], on the current device.

    Keys and values are [rows, kv heads, window, dim], mask and bias, which are added to the
    scores, [rows or 1, heads or 1, 1, window]. The scaling of the products is 1/√dim if not given.
    """
    rows, heads, _, dim = query.shape
    kv_heads, window = key.shape[1:3]
    group = heads // kv_heads
    out = torch.empty((rows, 1, heads, dim), dtype=query.dtype, device=query.device)
    added: list[Any] = []
    for x in (mask, bias):
        # Where it is the same for all rows or heads, their stride becomes 0.
        strides = (0,) * 4 if x is None else x.expand(rows, heads, 1, window).stride()
        added += [x, strides[0], strides[1], strides[3]]
    padded_dim = max(16, 1 << (dim - 1).bit_length())
    block = max(16, min(TILE // padded_dim, 128, 1 << (window - 1).bit_length()))
    _kernel()[(rows, kv_heads)](
        out,
        *(query, query.stride(0), query.stride(1), query.stride(3)),
        *(key, *key.stride(), value, *value.stride()),
        *added,
        *(window, float(dim**-0.5 if scaling is None else scaling)),
        # What tensor cores multiply has 16 rows at least.
        *(group, max(16, 1 << (group - 1).bit_length()), dim, padded_dim, block),
        num_warps=WARPS,
    )
    return out


tl: Any = None
"""triton.language, once there is use for it."""


# fmt: off
# The arguments have no types because Triton would have to know them.
def _attend(  # type: ignore[no-untyped-def]
    out,
    query, q_row, q_head, q_dim,
    keys, k_row, k_head, k_place, k_dim,
    values, v_row, v_head, v_place, v_dim,
    mask, m_row, m_head, m_place,
    bias, b_row, b_head, b_place,
    window, scaling,
    GROUP: tl.constexpr, PADDED: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):
    # fmt: on
    """The queries of a row [GROUP] that share keys and values; the softmax goes on by blocks."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, PADDED_DIM)
    keys += row * k_row + kv_head * k_head
    values += row * v_row + kv_head * v_head
    # From not quite −∞ on, so that a row of which nothing is seen has no ∞ − ∞.
    if GROUP == 1:
        head = kv_head
        q_at = query + row * q_row + head * q_head + dims * q_dim
        q = tl.load(q_at, mask=dims < DIM, other=0.0).to(tl.float32)
        # Each place of a block on its own, so that warps wait for each other at the end only.
        top, total = tl.full([BLOCK], -3.4e38, tl.float32), tl.zeros([BLOCK], tl.float32)
        mean = tl.zeros([BLOCK, PADDED_DIM], tl.float32)
    else:
        member = tl.arange(0, PADDED)[:, None]
        head = kv_head * GROUP + member
        shown = (member < GROUP) & (dims < DIM)[None, :]
        q_at = query + row * q_row + head * q_head + dims[None, :] * q_dim
        q = tl.load(q_at, mask=shown, other=0.0)
        top, total = tl.full([PADDED], -3.4e38, tl.float32), tl.zeros([PADDED], tl.float32)
        mean = tl.zeros([PADDED, PADDED_DIM], tl.float32)
    for start in range(0, window, BLOCK):
        place = start + tl.arange(0, BLOCK)
        held = (place < window)[:, None] & (dims < DIM)[None, :]
        # Both before anything waits for the first.
        k = tl.load(keys + place[:, None] * k_place + dims[None, :] * k_dim, mask=held, other=0.0)
        v = tl.load(values + place[:, None] * v_place + dims[None, :] * v_dim, mask=held, other=0.0)
        if GROUP == 1:
            score = tl.sum(k.to(tl.float32) * q[None, :], 1)
            asked = place < window
        else:
            score = tl.dot(q, tl.trans(k), input_precision="ieee")
            place = place[None, :]
            asked = (member < GROUP) & (place < window)
        score = tl.where(asked, score * scaling, float("-inf"))
        if mask is not None:
            at = mask + row * m_row + head * m_head + place * m_place
            score += tl.load(at, mask=asked, other=0.0).to(tl.float32)
        if bias is not None:
            at = bias + row * b_row + head * b_head + place * b_place
            score += tl.load(at, mask=asked, other=0.0).to(tl.float32)
        if GROUP == 1:
            higher = tl.maximum(top, score)
            weight, fade = tl.exp(score - higher), tl.exp(top - higher)
            total = total * fade + weight
            mean = mean * fade[:, None] + weight[:, None] * v.to(tl.float32)
        else:
            higher = tl.maximum(top, tl.max(score, 1))
            weight, fade = tl.exp(score - higher[:, None]), tl.exp(top - higher)
            total = total * fade + tl.sum(weight, 1)
            mean = tl.dot(weight.to(v.dtype), v, mean * fade[:, None], input_precision="ieee")
        top = higher
    out += (row * tl.num_programs(1) * GROUP + head) * DIM
    # Of nothing seen there is nothing to divide by.
    if GROUP == 1:
        fade = tl.exp(top - tl.max(top, 0))
        total = tl.maximum(tl.sum(total * fade, 0), 1e-30)
        tl.store(out + dims, tl.sum(mean * fade[:, None], 0) / total, mask=dims < DIM)
    else:
        tl.store(out + dims[None, :], mean / tl.maximum(total, 1e-30)[:, None], mask=shown)


@functools.cache
def _kernel() -> Any:
    global tl
    triton: Any = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
    return triton.jit(_attend)
