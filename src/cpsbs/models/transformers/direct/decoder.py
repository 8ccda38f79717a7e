"""One decoding step of a Transformer decoder, in as few calls as it takes.

A ``Decoder`` holds the prepared parts of a model: ``families`` takes them from the modules of
transformers by their names. A step maps the latest tokens of the rows to the scores of the next
ones; keys and values lie in ``Slots``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cpsbs.models.transformers.direct.attention import Heads, attend, put
from cpsbs.models.transformers.direct.products import Product
from cpsbs.models.transformers.direct.slots import Slots, Table, visible_slots

Norm = Callable[[Tensor], Tensor]
"""Maps rows [n, d] to normalised rows."""

FeedForward = Callable[[Tensor, Tensor], Tensor]
"""Maps rows [n, d] and a residual [n, d] to the output of the feed-forward block + residual."""


@dataclass(frozen=True)
class Cross:
    """The attention of a layer to the encoder's states."""

    norm: Norm
    query: Product
    out: Product


@dataclass(frozen=True)
class Layer:
    """A decoder layer: attention to the prefix, to the encoder's states, and feed-forward."""

    norm: Norm
    query_key_value: Product
    out: Product
    cross: Cross | None
    feed_norm: Norm
    feed: FeedForward


@dataclass(frozen=True)
class Decoder:
    """The parts of a model that a step needs."""

    embed: Callable[[Tensor, Tensor], Tensor]
    """Maps tokens [n] and their positions [n] to rows [n, d]."""
    layers: tuple[Layer, ...]
    heads: Heads
    norm_first: bool
    """Whether a block normalises its input rather than its output."""
    norm: Norm | None
    """What normalises the output of the last layer."""
    head: Product
    """The projection to the scores of the vocabulary."""
    rotate: Callable[[Tensor], Callable[[Tensor], Tensor]] | None = None
    """Maps positions [n] to a function that rotates queries or keys [n, heads, dim] there."""

    def step(self, token: Tensor, slots: Slots, encoded: Encoded | None) -> Tensor:
        """Return the scores [n, V] after the tokens [n].

        Args:
            token: the token that each row is extended by.
            slots: the keys and values of the prefixes, with a slot for each new token.
            encoded: the keys and values of the encoder's states, if there is an encoder.
        """
        position = slots.table.length - 1  # of the new tokens
        x = self.embed(token, position)
        rotate = None if self.rotate is None else self.rotate(position)
        for number, layer in enumerate(self.layers):
            attend_to_prefix = partial(self._attend, number, slots, rotate)
            x = self._block(layer.norm, x, attend_to_prefix)
            if layer.cross is not None and encoded is not None:
                attend_to_source = partial(
                    self._attend_to_source, layer.cross, number, slots, encoded
                )
                x = self._block(layer.cross.norm, x, attend_to_source)
            x = self._block(layer.feed_norm, x, layer.feed)
        return self.head(x if self.norm is None else self.norm(x))

    def _block(self, norm: Norm, x: Tensor, run: FeedForward) -> Tensor:
        return run(norm(x), x) if self.norm_first else norm(run(x, x))

    def _attend(
        self,
        number: int,
        slots: Slots,
        rotate: Callable[[Tensor], Tensor] | None,
        x: Tensor,
        residual: Tensor,
    ) -> Tensor:
        """Return the attention of the rows to their prefixes, plus the residual."""
        heads, layer = self.heads, self.layers[number]
        own, shared = heads.queries * heads.dim, heads.keys * heads.dim
        query, key, value = torch.split(layer.query_key_value(x), [own, shared, shared], dim=-1)
        if rotate is not None:
            query = rotate(query.reshape(-1, heads.queries, heads.dim)).flatten(1)
            key = rotate(key.reshape(-1, heads.keys, heads.dim)).flatten(1)
        keys, values = slots.memory[2 * number : 2 * number + 2]
        for memory, rows in ((keys, key), (values, value)):
            put(rows, memory, slots.capacity, slots.table.source, slots.new, heads)
        attended = attend(query, keys, values, slots.capacity, slots.used, slots.table, heads)
        return layer.out(attended, residual)

    def _attend_to_source(
        self,
        cross: Cross,
        number: int,
        slots: Slots,
        encoded: Encoded,
        x: Tensor,
        residual: Tensor,
    ) -> Tensor:
        """Return the attention of the rows to their sources, plus the residual."""
        keys, values = encoded.layers[number]
        table, length = encoded.table(slots.table), encoded.length
        attended = attend(cross.query(x), keys, values, length, length, table, self.heads)
        return cross.out(attended, residual)


class Encoded:
    """The keys and values of the encoder's states, once for each source.

    Args:
        layers: [S, heads, T, dim] keys and values for each layer.
        mask: [S, T] which states may be attended to; None for all.
    """

    def __init__(self, layers: list[tuple[Tensor, Tensor]], mask: Tensor | None) -> None:
        sources, _, self.length, _ = layers[0][0].shape
        self.layers = [(keys.contiguous(), values.contiguous()) for keys, values in layers]
        every = torch.ones((sources, self.length), dtype=torch.bool)
        self._slot, self._number = visible_slots(every if mask is None else mask.bool())
        self._table: Table | None = None

    def table(self, rows: Table) -> Table:
        """Return what rows attend to, for rows with these sources."""
        if self._table is None or self._table.source is not rows.source:
            number = self._number[rows.source.long()]
            self._table = Table(self._slot, rows.source, number, rows.source)
        return self._table

    def keep(self, sources: Tensor) -> None:
        """Drop all sources but these [S']."""
        self.layers = [(keys[sources], values[sources]) for keys, values in self.layers]
        self._slot, self._number = self._slot[sources], self._number[sources]
