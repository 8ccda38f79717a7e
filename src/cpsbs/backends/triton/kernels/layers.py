"""What lies between the matrix products of a layer, in one launch each.

Transformers computes these by several operators, each of which rounds its result. Here they are
computed in float32 and rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cpsbs.backends.triton.kernels.launching import kernel

BLOCK = 2048
"""Numbers that a program of ``_silu`` handles"""


@kernel
def _rms(x, weight, out, dim, eps, BLOCK: tl.constexpr):
    """Program (row): x / √(mean of x² + eps) · weight."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    here = place < dim
    value = tl.load(x + row * dim + place, mask=here, other=0.0).to(tl.float32)
    factor = tl.load(weight + place, mask=here, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / dim + eps)
    tl.store(out + row * dim + place, value * factor, mask=here)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Write x [rows, dim], each row divided by its root mean square, times the weight [dim]."""
    rows, dim = x.shape
    block = triton.next_power_of_2(dim)
    _rms[(rows,)](x, weight, out, dim, eps, BLOCK=block, num_warps=min(8, max(1, block // 256)))


@triton.jit
def _turn(x, first, second, row_stride, heads, c, s, c2, s2, HEADS: tl.constexpr):
    """Rotate the two halves of ``heads`` vectors of one row, in place."""
    head = tl.arange(0, HEADS)
    here = (head < heads)[:, None]
    one = x + row_stride + head[:, None] * (2 * first.shape[0]) + first[None, :]
    two = x + row_stride + head[:, None] * (2 * first.shape[0]) + second[None, :]
    a = tl.load(one, mask=here, other=0.0).to(tl.float32)
    b = tl.load(two, mask=here, other=0.0).to(tl.float32)
    tl.store(one, a * c[None, :] - b * s[None, :], mask=here)
    tl.store(two, b * c2[None, :] + a * s2[None, :], mask=here)


@kernel
def _rotate(
    query, new_keys, cosines, sines, cos_row, heads, kv_heads,
    HALF: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Program (row): rotary embedding of the row's queries and keys, in place."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.arange(0, HALF)
    second = HALF + first
    at = row * cos_row
    c = tl.load(cosines + at + first).to(tl.float32)
    s = tl.load(sines + at + first).to(tl.float32)
    c2 = tl.load(cosines + at + second).to(tl.float32)
    s2 = tl.load(sines + at + second).to(tl.float32)
    width = 2 * HALF
    _turn(query, first, second, row * heads * width, heads, c, s, c2, s2, HEADS)
    _turn(new_keys, first, second, row * kv_heads * width, kv_heads, c, s, c2, s2, KV_HEADS)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Apply rotary embeddings to queries and keys [rows, heads, dim], contiguous, in place.

    ``cos`` and ``sin`` are [rows or 1, dim], of the same strides.
    """
    rows, heads, dim = query.shape
    kv_heads = key.shape[1]
    _rotate[(rows,)](
        query, key, cos, sin, cos.stride(0) if len(cos) > 1 else 0, heads, kv_heads,
        HALF=dim // 2, HEADS=triton.next_power_of_2(heads),
        KV_HEADS=triton.next_power_of_2(kv_heads),
    )  # fmt: skip


@kernel
def _silu(x, factor, count, BLOCK: tl.constexpr):
    """Program (block): x / (1 + e^−x) · factor, in place of x."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = place < count
    value = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
    times = tl.load(factor + place, mask=here, other=0.0).to(tl.float32)
    tl.store(x + place, value / (1.0 + tl.exp(-value)) * times, mask=here)


def silu_times(x: Tensor, factor: Tensor) -> None:
    """Replace x by silu(x) · factor, both contiguous."""
    _silu[(triton.cdiv(x.numel(), BLOCK),)](x, factor, x.numel(), BLOCK=BLOCK)
