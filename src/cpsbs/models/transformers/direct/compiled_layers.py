"""Runs all layers of a step in one compiled call, where every part of them is compiled."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from cpsbs.backends.cpu.compiled import INTEGER, LANES, POINTER, Fields, address, library
from cpsbs.backends.cpu.products import ACTIVATIONS, in_one_thread
from cpsbs.models.transformers.direct.attention import Heads
from cpsbs.models.transformers.direct.layers import (
    Gated,
    Layer,
    LayerNorm,
    Memory,
    Norm,
    NormFields,
    Places,
    UpAndDown,
)
from cpsbs.models.transformers.direct.products import Product
from cpsbs.models.transformers.direct.slots import Table
from cpsbs.scores.memory import scratch_buffer


class _Layer(ctypes.Structure):
    """Mirrors the structure ``layer`` of the C files, field by field."""

    _fields_ = (
        *((name, NormFields) for name in ("own", "cross", "feed")),
        *((name, POINTER) for name in ("query_key_value", "out", "query", "cross_out")),
        *(("up", POINTER), ("down", POINTER), ("gate", INTEGER)),
    )


class _Table(Fields):
    """Mirrors the structure ``table`` of the C files, field by field."""

    _fields_ = (
        *(("slot", POINTER), ("stride", INTEGER), ("entry", POINTER), ("length", POINTER)),
        *(("source", POINTER), ("capacity", INTEGER), ("memory", POINTER)),
    )


class _Places(Fields):
    """Mirrors the structure ``places`` of the C files, field by field."""

    _fields_ = (
        *((name, POINTER) for name in ("position", "cosines", "sines", "bias")),
        ("reach", INTEGER),
    )


class _Stack(ctypes.Structure):
    """Mirrors the structure ``stack`` of the C files, field by field."""

    _fields_ = (
        *((name, INTEGER) for name in ("layers", "norm_first", "size", "keys", "group", "dim")),
        *(("scale", ctypes.c_double), ("layer", POINTER)),
    )


class CompiledLayers:
    """The layers of an encoder or a decoder; ``of`` makes one where that is possible."""

    def __init__(
        self, layers: tuple[Layer, ...], heads: Heads, norm_first: bool, places: Places
    ) -> None:
        self._kept = layers  # whose addresses are held here
        self.places = places
        """How the layers tell positions apart."""
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        size = layers[0].out.outputs
        group = heads.queries // heads.keys
        sizes = (len(layers), norm_first, size, heads.keys, group, heads.dim)
        self._stack = _Stack(*sizes, heads.scale, ctypes.addressof(self._layers))
        products = [x for layer in layers for x in _products(layer)]
        self.size = size
        """The size of a row."""
        self.wide = max(x.outputs for x in products)
        """The most outputs of a product."""
        self._row = 2 * size + self.wide + heads.queries * heads.dim
        self._inputs = max(x.inputs for x in products)
        self._largest = max(x.inputs * x.outputs for x in products)
        self.multiplications = sum(x.inputs * x.outputs for x in products)
        """The number of multiplications that all products take for one row."""
        self.multiplications_per_key = 2 * len(layers) * heads.queries * heads.dim
        """The number of multiplications that attention takes for one row and one key."""

    @staticmethod
    def of(
        layers: tuple[Layer, ...], heads: Heads, norm_first: bool, places: Places
    ) -> CompiledLayers | None:
        """Return the layers, or None if some part of them is not compiled."""
        parts = all(
            _is_compiled(layer.feed)
            and all(product.compiled is not None for product in _products(layer))
            and all(isinstance(norm, LayerNorm) for norm in _norms(layer))
            for layer in layers
        )
        if library() is None or not parts or heads.dim % LANES:
            return None
        return CompiledLayers(layers, heads, norm_first, places)

    def suits(self, rows: int) -> bool:
        """Return whether the largest product for so many rows is best done in one thread."""
        return in_one_thread(rows * self._largest)

    @property
    def address(self) -> int:
        """The address at which compiled functions find the layers."""
        return ctypes.addressof(self._stack)

    def scratch(self, rows: int, longest: int) -> Tensor:
        """Return scratch memory for rows that attend to at most ``longest`` others."""
        floats = 4 * LANES * (longest // LANES + 1)
        size = (rows * (4 * self._row + self._inputs + 4) + floats) // 8 + 1
        return scratch_buffer(size, torch.device("cpu"))

    def distances(self) -> dict[str, Any]:
        """Return the biases of attention scores by distance, by the names of the fields."""
        distances = self.places.distances
        return {} if distances is None else {"bias": distances.bias, "reach": distances.reach}

    def run(
        self,
        x: Tensor,
        own: Memory,
        position: Tensor,
        table: Table | None = None,
        encoded: list[tuple[Tensor, Tensor]] | None = None,
        length: int = 0,
    ) -> Tensor:
        """Return the output of the layers for rows x [n, d], which are overwritten.

        Args:
            x: the input.
            own: the keys and values of the rows; those of x are added.
            position: [n] int32, the positions of the rows.
            table: what rows attend to of the encoder's states.
            encoded: the keys and values of these, for each layer.
            length: their number for each source.
        """
        x = x.contiguous()
        rows = x.shape[0]
        memory = own.memory * (self._stack.layers if len(own.memory) == 2 else 1)
        mine, longest, given = (
            _table(own.table, memory, own.capacity),
            own.table.slot.shape[1],
            None,
        )
        if table is not None and encoded is not None:
            flat = [part for pair in encoded for part in pair]
            given, longest = _table(table, flat, length), max(longest, table.slot.shape[1])
        scratch = self.scratch(rows, longest)
        compiled = library()
        assert compiled is not None
        at: Any = _Places.of(position=position, **self.distances())
        if self.places.rotation is not None:
            last = int(position.max()) if rows else 0
            cosines, sines = self.places.rotation.angles(last + 1)
            at.replace(cosines=cosines, sines=sines)
        compiled.run_layers(
            self.address,
            address(x),
            rows,
            ctypes.addressof(mine),
            address(own.new),
            None if given is None else ctypes.addressof(given),
            ctypes.addressof(at),
            self.wide,
            LANES * (longest // LANES + 1),
            address(scratch),
        )
        return x


def _table(table: Table, memory: list[Tensor], capacity: int) -> Fields:
    slot = table.slot.contiguous()
    return _Table.of(
        slot=slot,
        stride=slot.stride(0),
        entry=table.entry,
        length=table.length,
        source=table.source,
        capacity=capacity,
        memory=memory,
    )


def _is_compiled(feed: Any) -> bool:
    """Return whether compiled functions know this kind of feed-forward block."""
    return isinstance(feed, UpAndDown) or (
        isinstance(feed, Gated) and feed.activation in ACTIVATIONS
    )


def _products(layer: Layer) -> list[Product]:
    feed: Any = layer.feed
    cross = [] if layer.cross is None else [layer.cross.query, layer.cross.out]
    return [layer.query_key_value, layer.out, *cross, feed.up, feed.down]


def _norms(layer: Layer) -> list[Norm]:
    cross = [] if layer.cross is None else [layer.cross.norm]
    return [layer.norm, *cross, layer.feed_norm]


def _layer(layer: Layer) -> _Layer:
    feed: Any = layer.feed
    cross = layer.cross
    return _Layer(
        _norm(layer.norm),
        _norm(None if cross is None else cross.norm),
        _norm(layer.feed_norm),
        _address(layer.query_key_value),
        _address(layer.out),
        None if cross is None else _address(cross.query),
        None if cross is None else _address(cross.out),
        _address(feed.up),
        _address(feed.down),
        ACTIVATIONS[feed.activation] if isinstance(feed, Gated) else -1,
    )


def _address(product: Product) -> int:
    assert product.compiled is not None
    return product.compiled.address


def _norm(norm: Norm | None) -> NormFields:
    """Return a norm, or one that is not there, as compiled functions read it."""
    return norm.fields if isinstance(norm, LayerNorm) else NormFields(None, None, 0.0, 1)
