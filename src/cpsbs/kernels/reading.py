"""The first reading of the scores, see ``polynomials.chunks``: maxima and sums of powers, once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
"""Scores that a program reads."""


@triton.jit
def _read(
    scores, maxima, sums,
    stride, tokens, chunks, table, inverse_temperature,
    TERMS: tl.constexpr, LENGTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Some chunks [GROUP] of one row."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    token = chunk[:, None] * LENGTH + tl.arange(0, LENGTH)[None, :]
    x = tl.load(scores + row * stride + token, mask=token < tokens, other=-float("inf"))
    x = x.to(tl.float32) * inverse_temperature
    largest = tl.max(x, axis=1)
    bound = tl.where(largest == -float("inf"), 0.0, largest)
    weight = tl.exp(x - bound[:, None])
    place = row * chunks + chunk
    inside = chunk < chunks
    tl.store(maxima + place, largest, mask=inside)
    power = weight
    for j in tl.static_range(TERMS):
        tl.store(sums + j * table + place, tl.sum(power, axis=1), mask=inside)
        power *= weight


def read_into(
    scores: Tensor, temperature: float, length: int, maxima: Tensor, sums: Tensor
) -> None:
    """Fill maxima [rows, C] and sums [J, rows, C] from scores [rows, V]; both float32.

    ``length`` is a power of two; rows of scores need not lie side by side.
    """
    rows, tokens = scores.shape
    chunks = maxima.shape[-1]
    group = max(1, TILE // length)
    grid = (rows, triton.cdiv(chunks, group))
    _read[grid](
        scores, maxima, sums, scores.stride(0), tokens, chunks, rows * chunks, 1 / temperature,
        TERMS=len(sums), LENGTH=length, GROUP=group,
    )  # fmt: skip
