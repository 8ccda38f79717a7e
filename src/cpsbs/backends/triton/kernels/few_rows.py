"""Products of few rows with large matrices, as the layers of a decoding step need them.

What takes the time is reading: the matrices from the memory, and the rows from the cache, which
every program reads as well. So there is about one program for each multiprocessor, of as many
outputs and inputs as ``best_cut`` finds best. Where the inputs are cut, programs leave sums over
their parts, in float32, and whatever reads the result adds these up, in the same order every time.
So there are few launches, and none of them only adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from cpsbs.backends.triton.kernels.launching import kernel
from cpsbs.backends.triton.kernels.overlap import after_previous, early

MOST_ROWS = 128
"""The most rows for which these kernels are made: a program holds results of all rows."""

PROGRAMS, SHARED = 132, 227 * 1024
"""Multiprocessors, and the bytes of shared memory of a program, where there is no card to tell"""

DEPTH, MOST_STAGES = 64, 8
"""Inputs that a program multiplies at a time, and how many times as many are on their way."""

WIDTH, LEAST_COLUMNS, MOST_COLUMNS = 16, 64, 256
"""Outputs of a program are a multiple of the first of these, and at most the last. Tensor cores
multiply at least so many as the second one says."""

MOST_PARTS = 16
"""The most parts into which the inputs are cut"""

READ_BY_A_PROGRAM, READ_BY_ALL, WRITTEN_BY_A_PROGRAM, START = 70_000, 3_800_000, 24_000, 2.0
"""Bytes a microsecond, and the microseconds before the first of them, by which ``best_cut``
compares cuts. They are fitted to what ``python -m benchmarks.tuning products`` measures on an H200.
"""

COLUMNS_OF_A_WARP = 32
"""Outputs for each warp of a program"""


@triton.jit
def _places(weight, column, width, size, inputs, COLUMNS: tl.constexpr):
    """Return pointers [COLUMNS] to the weights of some outputs, and which of these there are."""
    own = tl.arange(0, COLUMNS)
    there = (own < width) & (column + own < size)
    own = tl.where(there, column + own, column)
    return weight + own.to(tl.int64) * inputs, there


@triton.jit
def _rows(x, first, count, inputs, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """Return pointers [ROWS, DEPTH] to inputs, and which of the rows there are."""
    row = first + tl.arange(0, ROWS)
    return x + row[:, None] * inputs + tl.arange(0, DEPTH)[None, :], (row < count)[:, None]


@triton.jit
def _store(out, total, first, at, there, count, outputs, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write results [COLUMNS, ROWS] of some rows for the outputs from ``at`` on."""
    row = first + tl.arange(0, ROWS)
    place = row[:, None] * outputs + at + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + place, tl.trans(total), mask=(row < count)[:, None] & there[None, :])


@kernel
def _parts(
    x, first, second, third, out, count, inputs, outputs, first_size, second_size, third_size,
    width, steps,
    ROWS: tl.constexpr, MORE: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program (tile, part): sums over ``steps`` · DEPTH inputs for ``width`` outputs.

    There are up to three matrices, each with tiles of its own, and ROWS + MORE rows.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    weight, size, at = first, first_size, 0
    first_tiles, second_tiles = tl.cdiv(first_size, width), tl.cdiv(second_size, width)
    if tile >= first_tiles + second_tiles:
        tile -= first_tiles + second_tiles
        weight, size, at = third, third_size, first_size + second_size
    elif tile >= first_tiles:
        tile -= first_tiles
        weight, size, at = second, second_size, first_size
    start = part * steps * DEPTH
    stop = tl.minimum(start + steps * DEPTH, inputs)
    weight, there = _places(weight, tile * width, width, size, inputs, COLUMNS)
    after_previous()
    weight = weight[:, None] + tl.arange(0, DEPTH)[None, :]
    a_at, a_there = _rows(x, 0, count, inputs, ROWS, DEPTH)
    b_at, b_there = _rows(x, ROWS, count, inputs, MORE or 16, DEPTH)
    a_total = tl.zeros((COLUMNS, ROWS), tl.float32)
    b_total = tl.zeros((COLUMNS, MORE or 16), tl.float32)
    for place in tl.range(start, stop, DEPTH, num_stages=STAGES):
        w = tl.load(weight + place, mask=there[:, None], other=0.0, eviction_policy="evict_first")
        a = tl.load(a_at + place, mask=a_there, other=0.0)
        a_total = tl.dot(w, tl.trans(a), a_total, input_precision="ieee")
        if MORE:
            b = tl.load(b_at + place, mask=b_there, other=0.0)
            b_total = tl.dot(w, tl.trans(b), b_total, input_precision="ieee")
    out += part * count * outputs
    at += tile * width
    _store(out, a_total, 0, at, there, count, outputs, ROWS, COLUMNS)
    if MORE:
        _store(out, b_total, ROWS, at, there, count, outputs, MORE, COLUMNS)


@triton.jit
def _silu_times(x, factor):
    return x / (1.0 + tl.exp(-x)) * factor


@kernel
def _gated(
    x, gate, up, out, count, inputs, outputs, width,
    ROWS: tl.constexpr, MORE: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program (tile): silu(x · gateᵀ) · (x · upᵀ) for ``width`` outputs of ROWS + MORE rows."""
    at = tl.program_id(0) * width
    gate, there = _places(gate, at, width, outputs, inputs, COLUMNS)
    up, _ = _places(up, at, width, outputs, inputs, COLUMNS)
    after_previous()
    gate = gate[:, None] + tl.arange(0, DEPTH)[None, :]
    up = up[:, None] + tl.arange(0, DEPTH)[None, :]
    a_at, a_there = _rows(x, 0, count, inputs, ROWS, DEPTH)
    b_at, b_there = _rows(x, ROWS, count, inputs, MORE or 16, DEPTH)
    a_gate = tl.zeros((COLUMNS, ROWS), tl.float32)
    a_up = tl.zeros((COLUMNS, ROWS), tl.float32)
    b_gate = tl.zeros((COLUMNS, MORE or 16), tl.float32)
    b_up = tl.zeros((COLUMNS, MORE or 16), tl.float32)
    for place in tl.range(0, inputs, DEPTH, num_stages=STAGES):
        v = tl.load(gate + place, mask=there[:, None], other=0.0, eviction_policy="evict_first")
        w = tl.load(up + place, mask=there[:, None], other=0.0, eviction_policy="evict_first")
        a = tl.trans(tl.load(a_at + place, mask=a_there, other=0.0))
        a_gate = tl.dot(v, a, a_gate, input_precision="ieee")
        a_up = tl.dot(w, a, a_up, input_precision="ieee")
        if MORE:
            b = tl.trans(tl.load(b_at + place, mask=b_there, other=0.0))
            b_gate = tl.dot(v, b, b_gate, input_precision="ieee")
            b_up = tl.dot(w, b, b_up, input_precision="ieee")
    total = _silu_times(a_gate, a_up)
    _store(out, total, 0, at, there, count, outputs, ROWS, COLUMNS)
    if MORE:
        total = _silu_times(b_gate, b_up)
        _store(out, total, ROWS, at, there, count, outputs, MORE, COLUMNS)


@kernel
def _finish(
    parts, hidden, weight, normed, count, size, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (row): add the parts to the row, and normalise it by its root mean square."""
    after_previous()
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


@dataclass(frozen=True)
class Cut:
    """How a product is cut into programs."""

    width: int
    """The outputs of a program"""
    parts: int
    """The parts of the inputs"""
    steps: int
    """A part has so many times DEPTH inputs; the last one may have fewer."""


@cache
def best_cut(rows: int, inputs: int, outputs: tuple[int, ...], matrices: int, programs: int) -> Cut:
    """Return the cut that is expected to take the least time.

    Args:
        rows: the rows.
        inputs: their inputs, a multiple of DEPTH.
        outputs: those of each matrix that has tiles of its own.
        matrices: how many matrices a program multiplies; the inputs are cut for one only.
        programs: how many programs run at the same time.
    """
    depth = inputs // DEPTH
    cuts = [
        Cut(width, parts, -(-depth // parts))
        for width in range(WIDTH, MOST_COLUMNS // matrices + 1, WIDTH)
        for parts in range(1, MOST_PARTS + 1 if matrices == 1 else 2)
        if (parts - 1) * -(-depth // parts) < depth  # the last part is not empty
    ]
    return min(cuts, key=lambda cut: _microseconds(cut, rows, outputs, matrices, programs))


def _microseconds(
    cut: Cut, rows: int, outputs: tuple[int, ...], matrices: int, programs: int
) -> float:
    """Return about how long a product takes: the memory or the multiprocessors are the limit."""
    left = cut.parts * _tiles(cut.width, outputs)
    step, columns = 2 * DEPTH * cut.steps, _padded(cut.width, LEAST_COLUMNS)
    read = step * (columns * matrices + rows) / READ_BY_A_PROGRAM
    written = rows * cut.width * (4 if matrices == 1 else 2) / WRITTEN_BY_A_PROGRAM
    total = 0.0
    while left > 0:
        now = min(left, programs)
        all_read = now * step * cut.width * matrices / READ_BY_ALL
        total += START + max(read, all_read) + written
        left -= now
    return total


def _tiles(width: int, outputs: tuple[int, ...]) -> int:
    return sum(-(-n // width) for n in outputs)


def suits(rows: int, inputs: int, *outputs: int) -> bool:
    """Return whether these kernels can multiply so many rows by matrices of this size."""
    return rows <= MOST_ROWS and inputs % DEPTH == 0 and all(n % 8 == 0 for n in outputs)


def _padded(count: int, least: int = 16) -> int:
    return max(least, 1 << (count - 1).bit_length())


def _split(rows: int) -> tuple[int, int]:
    """Return two numbers of rows, powers of two or 0 for the second, that have room for all."""
    first = _padded(rows) // 2
    second = _padded(rows - first)
    return (first, second) if first >= 16 and second < first < rows else (_padded(rows), 0)


@dataclass(frozen=True)
class _Card:
    programs: int
    shared: int

    @staticmethod
    @cache
    def of(device: torch.device) -> _Card:
        if device.type != "cuda":
            return _Card(PROGRAMS, SHARED)
        found = triton.runtime.driver.active.utils.get_device_properties(device.index)
        return _Card(found["multiprocessor_count"], found["max_shared_mem"])


def _sizes(rows: int, width: int, matrices: int, shared: int) -> dict[str, int]:
    """Return the constants of a program, and its warps."""
    (first, second), columns = _split(rows), _padded(width, LEAST_COLUMNS)
    step = 2 * DEPTH * (columns * matrices + first + second)
    return {
        "ROWS": first, "MORE": second, "COLUMNS": columns, "DEPTH": DEPTH,
        "STAGES": min(MOST_STAGES, max(2, (shared - 4096) // step)),
        "num_warps": max(4, columns * matrices // COLUMNS_OF_A_WARP),
    }  # fmt: skip


def products_in_parts(x: Tensor, *weights: Tensor) -> Tensor:
    """Return [parts, rows, N] sums that add up to x · weightᵀ of one to three matrices.

    Args:
        x: [rows, inputs], contiguous.
        weights: [outputs, inputs], contiguous; N is the number of their outputs together.
    """
    (rows, inputs), outputs = x.shape, tuple(w.shape[0] for w in weights)
    card = _Card.of(x.device)
    cut = best_cut(rows, inputs, outputs, 1, card.programs)
    out = torch.empty((cut.parts, rows, sum(outputs)), dtype=torch.float32, device=x.device)
    missing = 3 - len(outputs)
    _parts[(_tiles(cut.width, outputs), cut.parts)](
        x, *weights, *weights[-1:] * missing, out, rows, inputs, sum(outputs),
        *outputs, *(0,) * missing, cut.width, cut.steps,
        **_sizes(rows, cut.width, 1, card.shared), **early(),
    )  # fmt: skip
    return out


def gated_product(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(x · gateᵀ) · (x · upᵀ), for x [rows, inputs] and matrices [outputs, inputs]."""
    (rows, inputs), outputs = x.shape, gate.shape[0]
    card = _Card.of(x.device)
    width = best_cut(rows, inputs, (outputs,), 2, card.programs).width
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    _gated[(-(-outputs // width),)](
        x, gate, up, out, rows, inputs, outputs, width,
        **_sizes(rows, width, 2, card.shared), **early(),
    )  # fmt: skip
    return out


def add_and_normalize(parts: Tensor, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add parts [parts, rows, size] to ``hidden`` [rows, size]; return its RMS norm."""
    rows, size = hidden.shape
    normed, block = torch.empty_like(hidden), triton.next_power_of_2(size)
    _finish[(rows,)](
        parts, hidden, weight, normed, rows, size, eps,
        PARTS=len(parts), BLOCK=block, num_warps=min(16, max(1, block // 256)), **early(),
    )  # fmt: skip
    return normed
