"""Products of few rows with large matrices, as the layers of a decoding step need them.

What takes the time is reading the matrices, and every multiprocessor must read its part of them.
Where a matrix has too few columns of tiles for that, its inputs are cut into parts as well: the
programs leave sums over their parts, in float32, and whatever reads the result adds these up, in
the same order every time. So there are few launches, and none of them only adds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cpsbs.backends.triton.kernels.launching import kernel

MOST_ROWS = 128
"""The most rows for which these kernels are made: a program holds results of all rows."""

PROGRAMS = 132
"""About as many programs as there are multiprocessors do a product."""

DEPTH, STAGES = 64, 5
"""Inputs that a program multiplies at a time, and how many times as many are on their way."""

COLUMNS, GATED_COLUMNS = (128, 64, 32), 64
"""Outputs of a program: the largest of these that divides their number; and of each of two
matrices whose outputs are multiplied."""

WARPS, GATED_WARPS = 4, 8


@triton.jit
def _sums(
    x, weight, column, start, stop, count, inputs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return x · weightᵀ for some columns, summed over the inputs from start to stop."""
    row, within = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    there = (row < count)[:, None]
    x += row[:, None] * inputs + within[None, :]
    weight += (column + tl.arange(0, COLUMNS)).to(tl.int64)[:, None] * inputs + within[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for place in tl.range(start, stop, DEPTH, num_stages=STAGES):
        a = tl.load(x + place, mask=there, other=0.0)
        b = tl.load(weight + place, eviction_policy="evict_first")
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    return total


@kernel
def _parts(
    x, first, second, third, out, count, inputs, first_end, second_end, outputs, share,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (tile, part): sums over ``share`` inputs for COLUMNS outputs of up to 3 matrices."""
    column, part = tl.program_id(0) * COLUMNS, tl.program_id(1)
    at, weight = column, first
    if column >= second_end:
        at, weight = column - second_end, third
    elif column >= first_end:
        at, weight = column - first_end, second
    start = part * share
    total = _sums(
        x, weight, at, start, start + share, count, inputs, ROWS, COLUMNS, DEPTH, STAGES
    )  # fmt: skip
    row = tl.arange(0, ROWS)
    place = (part * count + row)[:, None] * outputs + column + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + place, total, mask=(row < count)[:, None])


@kernel
def _gated(
    x, gate, up, out, count, inputs, outputs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (tile): silu(x · gateᵀ) · (x · upᵀ) for COLUMNS outputs."""
    column = tl.program_id(0) * COLUMNS
    row, within, own = tl.arange(0, ROWS), tl.arange(0, DEPTH), tl.arange(0, COLUMNS)
    there = (row < count)[:, None]
    x += row[:, None] * inputs + within[None, :]
    place = (column + own).to(tl.int64)[:, None] * inputs + within[None, :]
    gate += place
    up += place
    one, other = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, inputs, DEPTH, num_stages=STAGES):
        a = tl.load(x + start, mask=there, other=0.0)
        b = tl.load(gate + start, eviction_policy="evict_first")
        c = tl.load(up + start, eviction_policy="evict_first")
        one = tl.dot(a, tl.trans(b), one, input_precision="ieee")
        other = tl.dot(a, tl.trans(c), other, input_precision="ieee")
    place = row[:, None] * outputs + column + own[None, :]
    tl.store(out + place, one / (1.0 + tl.exp(-one)) * other, mask=there)


@kernel
def _finish(
    parts, hidden, weight, normed, count, size, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (row): add the parts to the row, and normalise it by its root mean square."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    here = place < size
    value = tl.load(hidden + row * size + place, mask=here, other=0.0).to(tl.float32)
    factor = tl.load(weight + place, mask=here, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        value += tl.load(parts + (part * count + row) * size + place, mask=here, other=0.0)
    rounded = value.to(hidden.dtype.element_ty)
    tl.store(hidden + row * size + place, rounded, mask=here)
    value = rounded.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / size + eps)
    tl.store(normed + row * size + place, value * factor, mask=here)


def _columns(*outputs: int) -> int | None:
    """Return how many outputs a program handles, or None if that does not come out even."""
    return next((c for c in COLUMNS if all(n % c == 0 for n in outputs)), None)


def _cut(tiles: int, inputs: int) -> int:
    """Return into how many parts the inputs are cut, so that there are about PROGRAMS programs."""
    parts = 1
    while tiles * parts * 2 <= PROGRAMS * 1.5 and inputs % (2 * parts * DEPTH) == 0:
        parts *= 2
    return parts


def suits(rows: int, inputs: int, *outputs: int) -> bool:
    """Return whether these kernels can multiply so many rows by matrices of this size."""
    return rows <= MOST_ROWS and inputs % DEPTH == 0 and _columns(*outputs) is not None


def _padded(rows: int) -> int:
    return max(16, 1 << (rows - 1).bit_length())


def products_in_parts(x: Tensor, *weights: Tensor) -> Tensor:
    """Return [parts, rows, N] sums that add up to x · weightᵀ of one to three matrices.

    Args:
        x: [rows, inputs], contiguous.
        weights: [outputs, inputs], contiguous; N is the number of their outputs together.
    """
    (rows, inputs), outputs = x.shape, [w.shape[0] for w in weights]
    columns, every = _columns(*outputs), sum(outputs)
    assert columns is not None
    tiles = every // columns
    parts = _cut(tiles, inputs)
    out = torch.empty((parts, rows, every), dtype=torch.float32, device=x.device)
    first, second, third = (*weights, *weights[-1:] * 2)[:3]
    ends = [sum(outputs[: i + 1]) for i in range(len(outputs))] + 2 * [every]
    _parts[(tiles, parts)](
        x, first, second, third, out, rows, inputs, ends[0], ends[1], every, inputs // parts,
        ROWS=_padded(rows), COLUMNS=columns, DEPTH=DEPTH, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return out


def gated_product(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(x · gateᵀ) · (x · upᵀ), for x [rows, inputs] and matrices [outputs, inputs]."""
    (rows, inputs), outputs = x.shape, gate.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    columns = min(GATED_COLUMNS, _columns(outputs) or 0)
    _gated[(outputs // columns,)](
        x, gate, up, out, rows, inputs, outputs,
        ROWS=_padded(rows), COLUMNS=columns, DEPTH=DEPTH, STAGES=STAGES, num_warps=GATED_WARPS,
    )  # fmt: skip
    return out


def add_and_normalize(parts: Tensor, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add parts [parts, rows, size] to ``hidden`` [rows, size]; return its RMS norm."""
    rows, size = hidden.shape
    normed, block = torch.empty_like(hidden), triton.next_power_of_2(size)
    _finish[(rows,)](
        parts, hidden, weight, normed, rows, size, eps,
        PARTS=len(parts), BLOCK=block, num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip
    return normed
