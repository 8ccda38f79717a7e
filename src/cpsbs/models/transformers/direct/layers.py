"""Runs the layers that Transformer encoders and decoders share, in as few calls as possible.

A ``Layer`` holds the prepared parts of a layer: ``families`` takes them from the modules of
transformers by their names.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from cpsbs.backends.cpu.compiled import INTEGER, POINTER, address, library
from cpsbs.backends.cpu.products import gated_rows
from cpsbs.models.transformers.direct.attention import Distances, Heads, attend, put
from cpsbs.models.transformers.direct.products import ACTIVATIONS, Product
from cpsbs.models.transformers.direct.rotation import Rotation
from cpsbs.models.transformers.direct.slots import Table

Norm = Callable[[Tensor], Tensor]
"""Maps rows [n, d] to normalised rows."""

FeedForward = Callable[[Tensor, Tensor], Tensor]
"""Maps rows [n, d] and a residual [n, d] to the output of the feed-forward block + residual."""


class NormFields(ctypes.Structure):
    """Mirrors the structure ``norm`` of the C files, field by field."""

    _fields_ = (
        *(("weight", POINTER), ("bias", POINTER)),
        *(("eps", ctypes.c_double), ("centred", INTEGER)),
    )


@dataclass(frozen=True)
class LayerNorm:
    """A norm: rows minus their means, over their standard deviations, with a weight and a bias.

    Without centring it is an RMS norm.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    centred: bool = True

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised rows.

        The compiled function does it wherever there is one, so that a result does not depend on how
        many operations are in one compiled call.
        """
        compiled = library()
        if compiled is None:
            size = self.weight.shape
            if self.centred:
                return torch.nn.functional.layer_norm(x, size, self.weight, self.bias, self.eps)
            return torch.nn.functional.rms_norm(x, size, self.weight, self.eps)
        x = x.contiguous()
        out = torch.empty_like(x)
        fields = ctypes.addressof(self.fields)
        compiled.normalize_rows(fields, address(x), *x.shape, address(out))
        return out

    @cached_property
    def fields(self) -> NormFields:
        """The norm as compiled functions read it."""
        return NormFields(address(self.weight), address(self.bias), self.eps, self.centred)


@dataclass(frozen=True)
class UpAndDown:
    """A feed-forward block of two products, the first with an activation."""

    up: Product
    down: Product

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the output of the block + residual."""
        return self.down(self.up(x), residual)


@dataclass(frozen=True)
class Gated:
    """A feed-forward block whose first product makes two halves: the gate and what it lets pass."""

    up: Product
    activation: str
    down: Product

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the output of the block + residual."""
        both = self.up(x)
        passed = gated_rows(both, self.activation)
        if passed is None:
            gate, value = both.chunk(2, dim=-1)
            passed = ACTIVATIONS[self.activation][2](gate) * value
        return self.down(passed, residual)


Embed = Callable[[Tensor, Tensor], Tensor]
"""Maps tokens [n] and their positions [n] to rows [n, d]."""


@dataclass(frozen=True)
class Embedding:
    """Embeddings of tokens, scaled, plus those of their positions, normalised or not."""

    tokens: Tensor
    """[V, d]"""
    scale: float
    positions: Tensor | None
    """[T, d]; None if layers tell positions apart in other ways"""
    norm: Norm | None

    def __call__(self, token: Tensor, at: Tensor) -> Tensor:
        """Return the embeddings of tokens [n] at positions [n]."""
        x = torch.nn.functional.embedding(token, self.tokens)
        if self.scale != 1.0:
            x *= self.scale
        if self.positions is not None:
            x += self.positions.index_select(0, at)
        return x if self.norm is None else self.norm(x)


@dataclass(frozen=True)
class Cross:
    """The attention of a layer to the encoder's states."""

    norm: Norm
    query: Product
    key_value: Product
    """The keys and values of the encoder's states."""
    out: Product


@dataclass(frozen=True)
class Layer:
    """A layer: attention of the rows to each other, to an encoder's states, and feed-forward."""

    norm: Norm
    query_key_value: Product
    out: Product
    cross: Cross | None
    feed_norm: Norm
    feed: FeedForward


class Memory(Protocol):
    """Where the keys and values of rows lie: in slots of their sources."""

    memory: list[Tensor]
    """[S, heads, capacity, dim] the slots of each layer, keys and values in turn, flat."""
    capacity: int
    table: Table
    """What each row attends to."""
    new: Tensor
    """[n] the slot of each row."""

    @property
    def used(self) -> int:
        """The number of slots in use."""
        ...


@dataclass(frozen=True)
class Places:
    """How the layers of a stack tell apart the positions of rows in their sequences."""

    rotation: Rotation | None = None
    distances: Distances | None = None


EMBEDDED = Places()
"""The layers do not tell positions apart, because these are in the embeddings."""


def block(norm_first: bool, norm: Norm, x: Tensor, run: FeedForward) -> Tensor:
    """Return x + run(x), normalised before or after."""
    return run(norm(x), x) if norm_first else norm(run(x, x))


def attend_to_rows(
    layer: Layer,
    number: int,
    heads: Heads,
    slots: Memory,
    places: Places,
    position: Tensor,
    x: Tensor,
    residual: Tensor,
) -> Tensor:
    """Return the attention of rows to rows of their sources, their own among them, + residual.

    Args:
        layer: the layer.
        number: its number.
        heads: the sizes of the attention.
        slots: keeps the keys and values, those of x from now on.
        places: how the layer tells positions apart.
        position: [n] int32, the positions of the rows.
        x: [n, d] the input of the block.
        residual: [n, d] what is added to the output.
    """
    own, shared = heads.queries * heads.dim, heads.keys * heads.dim
    query, key, value = torch.split(layer.query_key_value(x), [own, shared, shared], dim=-1)
    if places.rotation is not None:
        query = places.rotation(query, position)
        key = places.rotation(key, position)
    keys, values = slots.memory[2 * number : 2 * number + 2]
    for memory, rows in ((keys, key), (values, value)):
        put(rows, memory, slots.capacity, slots.table.source, slots.new, heads)
    given = (query, keys, values, slots.capacity, slots.used, slots.table, heads)
    attended = attend(*given, places.distances, position)
    return layer.out(attended, residual)
