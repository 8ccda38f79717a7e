"""Takes a step of a Transformer decoder in as few calls as possible.

A ``Decoder`` holds the prepared parts of a model: ``families`` takes them from the modules of
transformers by their names. A step maps the latest tokens of the rows to the scores of the next
ones; keys and values lie in ``Slots``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from cpsbs.backends.cpu.compiled import library
from cpsbs.models.transformers.direct.attention import Heads, attend, put
from cpsbs.models.transformers.direct.compiled_layers import CompiledLayers
from cpsbs.models.transformers.direct.layers import (
    EMBEDDED,
    Cross,
    Embed,
    Layer,
    Norm,
    Places,
    attend_to_rows,
    block,
)
from cpsbs.models.transformers.direct.products import Product
from cpsbs.models.transformers.direct.slots import (
    Slots,
    Table,
    memory_for_slots,
    visible_slots,
)


@dataclass(frozen=True)
class Decoder:
    """The parts of a model that a step needs."""

    embed: Embed
    layers: tuple[Layer, ...]
    heads: Heads
    norm_first: bool
    """Whether a block normalises its input rather than its output."""
    norm: Norm | None
    """What normalises the output of the last layer."""
    head: Product
    """The projection to the scores of the vocabulary."""
    places: Places = EMBEDDED
    """How the layers tell positions apart."""

    def step(self, token: Tensor, slots: Slots, encoded: Encoded | None) -> Tensor:
        """Return the scores [n, V] after the tokens [n].

        Args:
            token: the token that each row is extended by.
            slots: the keys and values of the prefixes, with a slot for each new token.
            encoded: the keys and values of the encoder's states, if there is an encoder.
        """
        position = slots.table.length - 1  # of the new tokens
        x = self.embed(token, position)
        whole = self.compiled
        if whole is not None and not whole.suits(x.shape[0]):
            whole = None
        if whole is not None and (encoded is None or self.layers[0].cross is not None):
            if encoded is None:
                x = whole.run(x, slots, position)
            else:
                table = encoded.table(slots.table)
                x = whole.run(x, slots, position, table, encoded.layers, encoded.length)
            return self.head(x if self.norm is None else self.norm(x))
        for number, layer in enumerate(self.layers):
            given = (layer, number, self.heads, slots, self.places, position)
            attend_to_prefix = partial(attend_to_rows, *given)
            x = block(self.norm_first, layer.norm, x, attend_to_prefix)
            if layer.cross is not None and encoded is not None:
                attend_to_source = partial(
                    self._attend_to_source, layer.cross, number, slots, encoded
                )
                x = block(self.norm_first, layer.cross.norm, x, attend_to_source)
            x = block(self.norm_first, layer.feed_norm, x, layer.feed)
        return self.head(x if self.norm is None else self.norm(x))

    @cached_property
    def compiled(self) -> CompiledLayers | None:
        """The layers as one compiled call; None if some part of them is not compiled."""
        if library() is None:
            return None
        return CompiledLayers.of(self.layers, self.heads, self.norm_first, self.places)

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
        every = torch.ones((sources, self.length), dtype=torch.bool, device="cpu")
        self._slot, self._number = visible_slots(every if mask is None else mask.bool())
        self._table: Table | None = None

    @staticmethod
    def of_states(decoder: Decoder, states: Tensor, mask: Tensor) -> Encoded:
        """Return the keys and values that a decoder makes of an encoder's states.

        Args:
            decoder: the decoder, which attends to an encoder.
            states: [S, T, d] the states.
            mask: [S, T] which of them may be attended to.
        """
        heads, (sources, length, _) = decoder.heads, states.shape
        source, position = mask.nonzero(as_tuple=True)
        rows = states[source, position]
        source, position = source.to(torch.int32), position.to(torch.int32)
        size, layers = sources * heads.keys * length * heads.dim, []
        for layer in decoder.layers:
            assert layer.cross is not None
            parts = layer.cross.key_value(rows).chunk(2, dim=-1)
            pair = [memory_for_slots(size, heads.dim) for _ in parts]
            for part, memory in zip(parts, pair, strict=True):
                put(part, memory, length, source, position, heads)
            keys, values = (x.view(sources, heads.keys, length, heads.dim) for x in pair)
            layers.append((keys, values))
        return Encoded(layers, mask)

    def table(self, rows: Table) -> Table:
        """Return what rows attend to, for rows with these sources."""
        if self._table is None or self._table.source is not rows.source:
            number = self._number[rows.source.long()]
            self._table = Table(self._slot, rows.source, number, rows.source)
        return self._table

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """[S, T] the places of the states that may be attended to, first, and [S] their numbers."""
        return self._slot, self._number

    def keep(self, sources: Tensor) -> None:
        """Drop all sources but these [S']."""
        self.layers = [(keys[sources], values[sources]) for keys, values in self.layers]
        self._slot, self._number = self._slot[sources], self._number[sources]
