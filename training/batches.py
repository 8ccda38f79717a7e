"""Packs whole sentences into batches on the device, one after the other and without padding.

A batch has the same number of source tokens, target tokens and sentences at every step, so that a
step can be recorded as a CUDA graph and replayed. Filler takes the places that are left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from training.tokenizer import PAD_ID, Integers, Segmentations

LONGEST = 128
"""The maximal number of tokens of a sentence with its end; longer ones are left out."""


@dataclass(frozen=True)
class Shape:
    """The shape of a batch."""

    source: int = 30_208
    """The number of source tokens."""
    target: int = 32_768
    """The number of target tokens."""
    sentences: int = 2_048

    @property
    def fillers(self) -> int:
        """The number of sentences of filler that is enough to fill either side."""
        return -(-max(self.source, self.target) // LONGEST)


@dataclass(frozen=True)
class Packed:
    """Sentences one after the other, with the position of every token in its sentence."""

    tokens: Tensor
    """[tokens] the tokens of all sentences."""
    places: Tensor
    """[tokens] the position of each token in its sentence, from 0."""
    bounds: Tensor
    """[sentences + fillers + 1] int32; sentence i is tokens bounds[i] … bounds[i + 1] − 1."""


@dataclass(frozen=True)
class Batch:
    """Packed source and target sentences; the tokens of the target are to be predicted."""

    source: Packed
    target: Packed

    def tensors(self) -> list[Tensor]:
        """Return all tensors in a fixed order."""
        return [
            tensor
            for side in (self.source, self.target)
            for tensor in (side.tokens, side.places, side.bounds)
        ]


@dataclass(frozen=True)
class Side:
    """The sentences of one language in tokens; the last one is empty and fills batches."""

    tokens: Tensor
    start: Tensor
    length: Tensor

    @staticmethod
    def of(sentences: list[list[int]], device: torch.device) -> Side:
        """Return the sentences, which are given as lists of tokens, on the device."""
        flat = torch.tensor([token for sentence in sentences for token in sentence])
        length = torch.tensor([*map(len, sentences), 0])
        return Side(flat.to(device), (length.cumsum(0) - length).to(device), length.to(device))

    def packed(self, rows: Tensor, tokens: int, fillers: int) -> Packed:
        """Pack the sentences ``rows`` [sentences], followed by filler up to ``tokens``."""
        device = rows.device
        ends = self.length[rows].cumsum(0)
        filler = ends[-1] + LONGEST * torch.arange(1, fillers + 1, device=device)
        ends = torch.cat([ends, filler.clamp(max=tokens)])
        at = torch.arange(tokens, device=device)
        sentence = torch.searchsorted(ends, at, right=True)
        bounds = torch.nn.functional.pad(ends, (1, 0))
        place = at - bounds[sentence]
        real = sentence < len(rows)
        here = self.start[rows[sentence.clamp(max=len(rows) - 1)]] + place
        token = torch.where(real, self.tokens[torch.where(real, here, 0)], PAD_ID)
        return Packed(token.long(), place, bounds.int())


class Words:
    """One language of the corpus as word types, which are segmented again for every epoch."""

    def __init__(self, types: Integers, ways: Segmentations, device: torch.device) -> None:
        def moved(array: Integers) -> Tensor:
            return torch.from_numpy(array.astype(np.int32)).to(device)

        self._types, self._ways = moved(types), moved(ways.ways)
        self._lengths, self._tokens = moved(ways.lengths), moved(ways.tokens)
        self._last = (self._types == 0).nonzero()[:, 0]

    def segmented(self, dropout: bool, generator: torch.Generator) -> Side:
        """Segment every word in the usual way, or with dropout in one of its ways at random."""
        types = self._types
        first = self._ways.cumsum(0, dtype=torch.int32) - self._ways
        way = first[types]
        if dropout:
            u = torch.rand(len(types), device=types.device, generator=generator)
            way += (u * self._ways[types]).int().clamp(max=self._ways[types] - 1)
        length = self._lengths[way]
        ends = length.cumsum(0)
        start_of_way = (self._lengths.cumsum(0) - self._lengths)[way]
        # Token j of the text is token j − (where its word begins) of its word's segmentation.
        shift = torch.repeat_interleave(start_of_way - (ends - length), length)
        tokens = self._tokens[shift + torch.arange(len(shift), device=types.device)]
        last = ends[self._last]
        start = torch.nn.functional.pad(last, (1, 0))
        return Side(tokens, start, torch.nn.functional.pad(last - start[:-1], (0, 1)))


@dataclass(frozen=True)
class Parallel:
    """The sentences of both languages, to be divided into batches."""

    source: Side
    target: Side
    shape: Shape

    def batches(self, seed: list[int]) -> list[Integers]:
        """Return the numbers of the sentences of each batch, in random order."""
        source, target = (side.length[:-1].cpu().numpy() for side in (self.source, self.target))
        short = (np.minimum(source, target) > 1) & (np.maximum(source, target) <= LONGEST)
        order = np.random.default_rng(seed).permutation(short.nonzero()[0])
        return list(self._cut(order, source[order].cumsum(), target[order].cumsum()))

    def _cut(self, order: Integers, source: Integers, target: Integers) -> Iterator[Integers]:
        """Yield as many sentences at a time as fit, by the cumulative numbers of tokens."""
        begin = 0
        while begin < len(order):
            s, t = (int(x[begin - 1]) if begin else 0 for x in (source, target))
            end = min(
                int(np.searchsorted(source, s + self.shape.source, "right")),
                int(np.searchsorted(target, t + self.shape.target, "right")),
                begin + self.shape.sentences,
            )
            yield order[begin:end]
            begin = end

    def batch(self, sentences: Integers) -> Batch:
        """Return a batch of these sentences, in the fixed shape."""
        empty = len(self.source.length) - 1
        rows = torch.full((self.shape.sentences,), empty)
        rows[: len(sentences)] = torch.from_numpy(sentences)
        rows = rows.to(self.source.tokens.device, non_blocking=True)
        return Batch(
            self.source.packed(rows, self.shape.source, self.shape.fillers),
            self.target.packed(rows, self.shape.target, self.shape.fillers),
        )
