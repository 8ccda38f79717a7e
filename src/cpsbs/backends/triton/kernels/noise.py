"""Counter-based random numbers (Philox): a row's depend on its seed and its count alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cpsbs.backends.triton.kernels.launching import kernel

BLOCK = 1024


@triton.jit
def uniform64(seed, place):
    """Return float64 numbers in [0, 1) with 53 bits, at these places (int64) of a seed's stream."""
    # The halves of the place, as ``tl.randint4x`` would take them, but only since Triton 3.4.
    half, other = place.to(tl.uint32), (place >> 32).to(tl.uint32)
    high, low, _, _ = tl.philox(seed, half, other, half * 0, half * 0)
    bits = (high.to(tl.uint32, bitcast=True).to(tl.int64) << 21) ^ (
        low.to(tl.uint32, bitcast=True).to(tl.int64) >> 11
    )
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@kernel
def _uniform(seeds, counts, rows, out, each, BLOCK: tl.constexpr):
    """Program (row, block): write BLOCK of the row's ``each`` numbers."""
    a = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + a)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(counts + row) << 32
    value = uniform64(tl.load(seeds + row), start + place)
    tl.store(out + a * each + place, value, mask=place < each)


def uniform(seeds: Tensor, counts: Tensor, row: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return numbers [A, *size] in [0, 1) for the rows [A] of streams with seeds and counts [B]."""
    out = torch.empty((len(row), *size), dtype=torch.float64, device=seeds.device)
    each = out[0].numel() if len(out) else 0
    if each:
        _uniform[(len(row), triton.cdiv(each, BLOCK))](seeds, counts, row, out, each, BLOCK=BLOCK)
    return out
