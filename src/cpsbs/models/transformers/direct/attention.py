"""Attention of the rows of a step to the slots of their sources, compiled or by torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cpsbs.backends.cpu.compiled import LANES, address, library, rows_of
from cpsbs.models.transformers.direct.slots import Table


@dataclass(frozen=True)
class Distances:
    """Biases of attention scores that depend on the distance from query to key, as in T5.

    Only compiled attention supports them.
    """

    bias: Tensor
    """[heads, 2·reach + 1] for keys from ``reach`` before the query to ``reach`` behind it; the
    outermost ones hold for all keys beyond"""

    @property
    def reach(self) -> int:
        """The distance from which on all keys have the same bias."""
        return self.bias.shape[1] // 2


@dataclass(frozen=True)
class Heads:
    """The sizes of an attention block."""

    queries: int
    """The number of heads of the queries."""
    keys: int
    """The number of heads of the keys and values, a divisor of ``queries``."""
    dim: int
    """The size of a head."""
    scale: float
    """What the products of queries and keys are multiplied by."""


def put(
    rows: Tensor, memory: Tensor, capacity: int, source: Tensor, slot: Tensor, heads: Heads
) -> None:
    """Write rows [n, heads·dim] into the slots [n] of their sources [n].

    The memory is [S, heads, capacity, dim].
    """
    compiled = library()
    if compiled is None:
        places = (
            source.long()[:, None] * heads.keys + torch.arange(heads.keys, device="cpu")
        ) * capacity
        places += slot[:, None]
        memory.view(-1, heads.dim).index_copy_(0, places.flatten(), rows.reshape(-1, heads.dim))
        return
    rows = rows_of(rows)
    sizes = (len(rows), heads.keys, heads.dim)
    given = (address(memory), capacity, address(source), address(slot))
    compiled.put(address(rows), rows.stride(0), *given, *sizes)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    capacity: int,
    used: int,
    table: Table,
    heads: Heads,
    distances: Distances | None = None,
    position: Tensor | None = None,
) -> Tensor:
    """Return [n, heads·dim] the attention of queries [n, heads·dim] to the slots of their rows.

    The keys and values are [S, heads, capacity, dim], of which the first ``used`` slots count. If
    scores depend on distances, the positions of the rows [n] int32 are needed.
    """
    compiled = library()
    if compiled is None or heads.dim % LANES:
        assert distances is None
        return _attend_by_torch(query, keys, values, capacity, used, table, heads)
    query = rows_of(query)
    out = torch.empty((len(query), heads.queries * heads.dim), dtype=torch.float32, device="cpu")
    weight = torch.empty(
        LANES * (table.slot.shape[1] // LANES + 1), dtype=torch.float32, device="cpu"
    )
    of_rows = (address(table.entry), address(table.length), address(table.source), len(query))
    compiled.attend(
        address(query),
        query.stride(0),
        address(keys),
        address(values),
        capacity,
        address(table.slot),
        table.slot.stride(0),
        *of_rows,
        heads.keys,
        heads.queries // heads.keys,
        heads.dim,
        heads.scale,
        *((None, 0, None) if distances is None else _fields(distances, position)),
        address(weight),
        address(out),
    )
    return out


def _fields(distances: Distances, position: Tensor | None) -> tuple[int | None, int, int | None]:
    return address(distances.bias), distances.reach, address(position)


def _attend_by_torch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    capacity: int,
    used: int,
    table: Table,
    heads: Heads,
) -> Tensor:
    """Return what ``attend`` does, by masked products of all rows and all slots of a source."""
    counts = torch.bincount(table.source)
    sources, k, group = len(counts), int(counts.max()), heads.queries // heads.keys
    source = table.source.long()
    place = (
        source * k + torch.arange(len(query), device="cpu") - (counts.cumsum(0) - counts)[source]
    )
    shape = (sources, k, heads.keys, group, heads.dim)
    rows = torch.zeros(
        (sources * k, query.shape[1]), dtype=torch.float32, device="cpu"
    ).index_copy_(0, place, query)
    # The rows of all queries that share keys follow each other.
    rows = rows.view(shape).permute(0, 2, 3, 1, 4).reshape(-1, group * k, heads.dim)
    bias = torch.zeros((sources * k, used), dtype=torch.float32, device="cpu").index_copy_(
        0, place, table.bias(used)
    )
    bias = bias.view(sources, 1, 1, k, used).expand(-1, heads.keys, group, -1, -1)
    bias = bias.reshape(-1, group * k, used)
    size = sources * heads.keys * capacity * heads.dim
    keys, values = (
        x.view(-1)[:size].view(-1, capacity, heads.dim)[:, :used] for x in (keys, values)
    )
    score = torch.baddbmm(bias, rows, keys.transpose(1, 2), alpha=heads.scale)
    found = torch.bmm(score.softmax(-1), values)
    found = found.view(sources, heads.keys, group, k, heads.dim).permute(0, 3, 1, 2, 4)
    return found.reshape(sources * k, -1).index_select(0, place)
