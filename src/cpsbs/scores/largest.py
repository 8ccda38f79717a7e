"""The largest few of many numbers: first of maxima, then of what stands behind these."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cpsbs.scores.memory import numbers


def chunk_length(n: int, m: int) -> int:
    """About √(n/m), which balances the number of chunks with the size of m of them.

    A multiple of 32, four vectors of float32: torch takes maxima over such chunks several times
    faster than over others.
    """
    return 32 * max(1, round(math.sqrt(n / max(m, 1)) / 32))


def largest_by_chunks(x: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The m largest of x [R, N] in each row, descending, and their places.

    As in ``Chunks.largest``: one fast pass that takes maxima replaces the slow one that torch.topk
    makes over all of x.
    """
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
    """[R, m] where the m largest of x [R, n] are, descending.

    They lie in the m groups of eight with the largest maxima, and torch.topk takes several times
    as long for a number as taking the maximum does; for few numbers it is the launches that count.
    """
    rows, n = x.shape
    if n % 8 or n <= 16 * m or x.numel() < 2**17:
        return x.topk(m, dim=-1).indices
    groups = x.view(-1, 8)
    chosen = groups.amax(-1).view(rows, -1).topk(m, dim=-1, sorted=False).indices
    first = numbers(rows, x.device)[:, None] * (n // 8)
    inside = groups.index_select(0, (chosen + first).flatten()).view(rows, -1)
    place = inside.topk(m, dim=-1).indices
    return (chosen.gather(-1, place >> 3) << 3) + (place & 7)
