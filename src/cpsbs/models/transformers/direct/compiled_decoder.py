"""Hands a decoder and its KV cache to compiled functions that take whole steps of a search."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from cpsbs.backends.cpu.compiled import INTEGER, POINTER, Fields
from cpsbs.backends.cpu.products import in_one_thread
from cpsbs.models.transformers.direct.compiled_layers import CompiledLayers
from cpsbs.models.transformers.direct.decoder import Decoder, Encoded
from cpsbs.models.transformers.direct.layers import Embedding, LayerNorm
from cpsbs.models.transformers.direct.slots import Slots, Table

HEAD_SHARE = 4
"""By how many times the projection to the vocabulary may be larger than is best for one thread,
because everything else is in the same call."""


NO_END = 2**62
"""The number of positions of a model that has no limit."""


class _Decoder(Fields):
    """Mirrors the structure ``decoder`` of ``steps.c``, field by field."""

    _fields_ = (
        *(("token", POINTER), ("position", POINTER), ("positions", INTEGER)),
        *(("scale", ctypes.c_double), ("first", POINTER), ("last", POINTER)),
        *(("layers", POINTER), ("head", POINTER), ("wide", INTEGER)),
        *(("bias", POINTER), ("reach", INTEGER)),
    )


class _Cache(Fields):
    """Mirrors the structure ``cache`` of ``steps.c``, field by field."""

    _fields_ = (
        *((name, POINTER) for name in ("slot", "length", "source")),
        *((name, INTEGER) for name in ("stride", "used", "capacity", "left")),
        *((name, POINTER) for name in ("memory", "given_slot", "given_number")),
        *((name, INTEGER) for name in ("given_stride", "given_capacity")),
        *((name, POINTER) for name in ("given_memory", "cosines", "sines")),
    )


class CompiledSteps:
    """Runs a decoder on its KV cache by compiled functions, several steps at a time.

    ``of`` makes one where that is possible. It is what ``cpsbs.backends.base.CompiledDecoder`` asks
    for.
    """

    def __init__(
        self, decoder: Decoder, layers: CompiledLayers, slots: Slots, encoded: Encoded | None
    ) -> None:
        embed, head = decoder.embed, decoder.head
        assert isinstance(embed, Embedding)
        assert head.compiled is not None
        first, last = (
            norm.fields if isinstance(norm, LayerNorm) else None
            for norm in (embed.norm, decoder.norm)
        )
        self._kept = decoder  # whose addresses are held here
        self._layers, self._slots, self._encoded = layers, slots, encoded
        self._decoder = _Decoder.of(
            token=embed.tokens,
            position=embed.positions,
            positions=NO_END if embed.positions is None else embed.positions.shape[0],
            scale=float(embed.scale),
            first=first,
            last=last,
            layers=layers.address,
            head=head.compiled.address,
            wide=layers.wide,
            **layers.distances(),
        )
        self._head = head.inputs * head.outputs
        self._vocab_size = head.outputs
        self._scores = torch.empty(0, dtype=torch.float32, device="cpu")

    @staticmethod
    def of(decoder: Decoder, slots: Slots, encoded: Encoded | None) -> CompiledSteps | None:
        """Return the steps of a decoder, or None if some part of it is not compiled."""
        layers, embed, head = decoder.compiled, decoder.embed, decoder.head
        if layers is None or not isinstance(embed, Embedding) or head.compiled is None:
            return None
        if not all(x is None or isinstance(x, LayerNorm) for x in (embed.norm, decoder.norm)):
            return None
        if (encoded is None) != (decoder.layers[0].cross is None):
            return None
        if embed.tokens.shape[0] < head.outputs:
            return None
        return CompiledSteps(decoder, layers, slots, encoded)

    @property
    def multiplications(self) -> int:
        """How many multiplications a row takes in the next step: products, then attention."""
        longest = self._slots.table.slot.shape[1]
        if self._encoded is not None:
            longest += self._encoded.places[0].shape[1]
        return (
            self._layers.multiplications
            + self._head
            + longest * self._layers.multiplications_per_key
        )

    def suits(self, rows: int) -> bool:
        """Return whether a single thread is best for steps of so many rows."""
        return self._layers.suits(rows) and in_one_thread(rows * self._head // HEAD_SHARE)

    def begin(self, rows: int, steps: int) -> tuple[int, int, int]:
        """Make room for steps of at most so many rows; return addresses for ``steps.c``.

        These are the addresses of the decoder, of the KV cache and of scratch memory.
        """
        slots, table = self._slots, self._slots.table
        count, longest = table.slot.shape
        slot = torch.empty((rows, longest + steps), dtype=torch.int32, device="cpu")
        slot[:count, :longest] = table.slot
        of_rows = torch.empty((2, rows), dtype=torch.int32, device="cpu")
        of_rows[0, :count], of_rows[1, :count] = table.length, table.source
        self._left = slots.steps_left
        given = {} if self._encoded is None else self._given(self._encoded)
        self._cache: Any = _Cache.of(
            slot=slot,
            length=of_rows[0],
            source=of_rows[1],
            stride=slot.shape[1],
            used=slots.used,
            capacity=slots.capacity,
            left=self._left,
            memory=slots.memory,
            **given,
            **self._angles(slot.shape[1]),
        )
        self._rows = slot, of_rows
        scratch = self._layers.scratch(rows, max(slot.shape[1], given.get("given_stride", 0)))
        return ctypes.addressof(self._decoder), ctypes.addressof(self._cache), scratch.data_ptr()

    def room_for_scores(self, rows: int) -> Tensor:
        """Return [rows, V] memory for scores, which the next call may reuse."""
        size = rows * self._vocab_size
        if self._scores.numel() < size:
            self._scores = torch.empty(size, dtype=torch.float32, device="cpu")
        return self._scores[:size].view(rows, -1)

    def end(self, rows: int) -> None:
        """Take over the KV cache as compiled functions have left it, with this many rows."""
        slot, (length, source) = self._rows
        longest = int(length[:rows].max()) if rows else 0
        entry = torch.arange(rows, dtype=torch.int32, device="cpu")
        table = Table(slot[:rows, :longest], entry, length[:rows], source[:rows])
        self._slots.take(table, self._cache.used, self._left - self._cache.left)

    def _angles(self, positions: int) -> dict[str, Any]:
        """Return the rotation of so many positions, by the names of the fields."""
        rotation = self._layers.places.rotation
        if rotation is None:
            return {}
        cosines, sines = rotation.angles(positions)
        return {"cosines": cosines, "sines": sines}

    def _given(self, encoded: Encoded) -> dict[str, Any]:
        """Return what the encoder has left, by the names of the fields."""
        slot, number = encoded.places
        return {
            "given_slot": slot,
            "given_number": number,
            "given_stride": slot.stride(0),
            "given_capacity": encoded.length,
            "given_memory": [x for pair in encoded.layers for x in pair],
        }
