"""Designs that draw K of more than K candidates, and keep all where there are no more."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import pad

from cpsbs.conditional_poisson.population import TooFewError
from cpsbs.designs.base import Design
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Candidates, Selection


class DrawingDesign(Design):
    """A design that has only to say how it draws."""

    @abstractmethod
    def draw(self, candidates: Candidates, k: int, streams: Streams, joint: bool) -> Selection:
        """Pick K of the candidates of every source.

        Raises:
            TooFewError: if some sources have not enough to choose from.
        """

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        """``draw``; but sources with too few candidates keep them all, with certainty."""
        _, parents, tokens = candidates.shape
        few: Tensor | None = None
        if parents * tokens > k:
            try:
                return self.draw(candidates, k, streams, joint)
            except TooFewError as error:
                few = error.rows  # only the first steps of a search come here
        here = min(k, parents * tokens)
        values, index = candidates.chunks.largest(candidates.offset, here)
        kept = _everything(values, index, k, joint)
        if few is None or bool(few.all()):
            return kept
        rows = (~few).nonzero()[:, 0]
        drawn = self.draw(candidates.of(rows), k, streams.select(rows), joint)
        return _with_rows(kept, rows, drawn)


def _everything(values: Tensor, index: Tensor, k: int, joint: bool) -> Selection:
    """The largest candidates [B, ≤ K], each certain to be picked."""
    missing = (0, k - values.shape[1])
    present = pad(values > -math.inf, missing)
    certain = torch.zeros(present.shape, dtype=torch.float64, device=present.device)
    pairs = certain[..., None] + certain[:, None, :] if joint else None
    return Selection(pad(index, missing), present, certain, pairs)


def _with_rows(kept: Selection, rows: Tensor, drawn: Selection) -> Selection:
    """The first selection with these sources [b] replaced by the second one's."""

    def put(old: Tensor | None, new: Tensor | None) -> Tensor | None:
        return None if old is None or new is None else old.index_copy(0, rows, new)

    return Selection(
        index=kept.index.index_copy(0, rows, drawn.index),
        present=kept.present.index_copy(0, rows, drawn.present),
        log_inclusion=put(kept.log_inclusion, drawn.log_inclusion),
        joint_log_inclusion=put(kept.joint_log_inclusion, drawn.joint_log_inclusion),
    )
