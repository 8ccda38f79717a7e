"""The encoder of a Transformer, run on the tokens of a batch without its padding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from cpsbs.backends.cpu.compiled import library
from cpsbs.models.transformers.direct.attention import Heads
from cpsbs.models.transformers.direct.compiled_layers import CompiledLayers
from cpsbs.models.transformers.direct.layers import (
    EMBEDDED,
    Embed,
    Layer,
    Norm,
    Places,
    attend_to_rows,
    block,
)
from cpsbs.models.transformers.direct.slots import Table, memory_for_slots


@dataclass(frozen=True)
class Encoder:
    """The parts of an encoder."""

    embed: Embed
    layers: tuple[Layer, ...]
    heads: Heads
    norm_first: bool
    """Whether a block normalises its input rather than its output."""
    norm: Norm | None
    """What normalises the output of the last layer."""
    places: Places = EMBEDDED
    """How the layers tell positions apart."""

    def suits(self, mask: Tensor) -> bool:
        """Return whether the states of sources with this mask [S, T] can be computed.

        A row knows only its number among the tokens of its source. Where attention depends on
        distances, they come from these numbers, so that there must be no padding between tokens.
        """
        if self.places.distances is None:
            return True
        begins = mask[:, 1:] & ~mask[:, :-1]
        return bool((begins.sum(-1) + mask[:, 0] == 1).all())

    def states(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return [S, T, d] the encoder's states; zero where there is padding.

        Args:
            tokens: [S, T] the tokens of the sources.
            mask: [S, T] which of them are no padding.
        """
        source, position = mask.nonzero(as_tuple=True)
        x = self.embed(tokens[source, position], position)
        rows = _AllRows(mask, source, self.heads)
        whole = self._compiled if library() is not None else None
        if whole is not None and not whole.suits(x.shape[0]):
            whole = None
        if whole is not None:
            x = whole.run(x, rows, rows.new)
        for layer in self.layers if whole is None else ():
            given = (layer, 0, self.heads, rows, self.places, rows.new)
            attend_to_source = partial(attend_to_rows, *given)
            x = block(self.norm_first, layer.norm, x, attend_to_source)
            x = block(self.norm_first, layer.feed_norm, x, layer.feed)
        x = x if self.norm is None else self.norm(x)
        states = torch.zeros((*mask.shape, x.shape[-1]), dtype=torch.float32, device="cpu")
        states[source, position] = x
        return states

    @cached_property
    def _compiled(self) -> CompiledLayers | None:
        return CompiledLayers.of(self.layers, self.heads, self.norm_first, self.places)


class _AllRows:
    """The keys and values of one layer; every row attends to all rows of its source.

    Args:
        mask: [S, T] the tokens that have rows.
        source: [n] the source of each row, in ascending order.
        heads: the sizes of the attention.
    """

    def __init__(self, mask: Tensor, source: Tensor, heads: Heads) -> None:
        lengths = mask.sum(-1, dtype=torch.int32)
        self.capacity = self.used = int(lengths.max())
        size = len(mask) * heads.keys * self.capacity * heads.dim
        self.memory = [memory_for_slots(size, heads.dim) for _ in range(2)]
        slot = torch.arange(self.capacity, dtype=torch.int32, device="cpu")
        self.new = (mask.cumsum(-1, dtype=torch.int32) - 1)[mask]
        one = torch.zeros(len(source), dtype=torch.int32, device="cpu")
        self.table = Table(slot[None], one, lengths[source], source.to(torch.int32))
