"""The m largest of N numbers, found from the maxima of chunks.

The m largest lie in the m chunks with the largest maxima: whatever lies in another chunk has m
maxima before it that are at least as large. So one fast pass that takes maxima, and ``torch.topk``
over the members of m chunks, replace the slow pass of ``torch.topk`` over all N numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cpsbs.scores.memory import shared_arange


def head_size(k: int) -> int:
    """Return M = 8 K + 40, how many of the largest candidates are kept one by one at first.

    The odds of every other candidate are then below ¼, which the error bounds of
    ``cpsbs.conditional_poisson.population`` rest on.
    """
    return 8 * k + 40


def chunk_length(n: int, m: int) -> int:
    """Return a length of chunks for finding the m largest of N numbers.

    It is about √(N/m), for which the number of chunks equals the number of members of m chunks, and
    a multiple of 32, that is of four vectors of float32: torch takes maxima over such chunks
    several times faster than over others.
    """
    return 32 * max(1, round(math.sqrt(n / max(m, 1)) / 32))


def largest_by_chunks(x: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Return the m largest of x [R, N] in each row, in descending order, and their indices."""
    n = x.shape[-1]
    chunk = chunk_length(n, m)
    if m == n or n // chunk < m:
        values, index = x.topk(m, dim=-1)
        return values, index
    whole = n - n % chunk
    maxima = x[:, :whole].view(len(x), -1, chunk).amax(-1)
    start = maxima.topk(m, dim=-1, sorted=False).indices * chunk
    place = (start[..., None] + torch.arange(chunk, device=x.device)).flatten(1)
    rest = torch.arange(whole, n, device=x.device).expand(len(x), -1)
    place = torch.cat([place, rest], dim=-1)
    values, position = x.gather(-1, place).topk(m, dim=-1)
    return values, place.gather(-1, position)


def places_of_largest(x: Tensor, m: int) -> Tensor:
    """Return the indices [R, m] of the m largest of x [R, n], in descending order.

    The maxima of groups of eight come first, because ``torch.topk`` takes several times as long for
    a number as ``amax`` does. For few numbers a single call of ``torch.topk`` is faster.
    """
    rows, n = x.shape
    if n % 8 or n <= 16 * m or x.numel() < 2**17:
        return x.topk(m, dim=-1).indices
    groups = x.view(-1, 8)
    chosen = groups.amax(-1).view(rows, -1).topk(m, dim=-1, sorted=False).indices
    first = shared_arange(rows, x.device)[:, None] * (n // 8)
    inside = groups.index_select(0, (chosen + first).flatten()).view(rows, -1)
    place = inside.topk(m, dim=-1).indices
    return (chosen.gather(-1, place >> 3) << 3) + (place & 7)
