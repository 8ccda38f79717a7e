"""A base class for designs that draw K of more than K candidates.

Where a source has no more than K candidates, as in the first steps of a search, there is nothing to
draw: all are kept, with an inclusion probability of one.
"""

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
    """A design that defines ``draw``, and keeps all candidates where there are at most K."""

    @abstractmethod
    def draw(self, candidates: Candidates, k: int, streams: Streams, joint: bool) -> Selection:
        """Draw K of the candidates of every source.

        Raises:
            TooFewError: if some sources have no more than K candidates.
        """

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        """Draw K candidates of every source, or keep all of a source that has at most K."""
        _, parents, tokens = candidates.shape
        few: Tensor | None = None
        if parents * tokens > k:
            try:
                return self.draw(candidates, k, streams, joint)
            except TooFewError as error:
                few = error.rows  # this happens mostly in the first steps of a search
        here = min(k, parents * tokens)
        values, index = candidates.chunks.largest(candidates.offset, here)
        kept = _everything(values, index, k, joint)
        if few is None or bool(few.all()):
            return kept
        rows = (~few).nonzero()[:, 0]
        own = streams.select(rows)
        drawn = self.draw(candidates.of(rows), k, own, joint)
        streams.put(rows, own)
        return _with_rows(kept, rows, drawn)


def _everything(values: Tensor, index: Tensor, k: int, joint: bool) -> Selection:
    """Return a selection of all candidates [B, ≤ K], each picked with certainty."""
    missing = (0, k - values.shape[1])
    present = pad(values > -math.inf, missing)
    certain = torch.zeros(present.shape, dtype=torch.float64, device=present.device)
    pairs = certain[..., None] + certain[:, None, :] if joint else None
    return Selection(pad(index, missing), present, certain, pairs)


def _with_rows(kept: Selection, rows: Tensor, drawn: Selection) -> Selection:
    """Return ``kept`` with its rows [b] replaced by those of ``drawn``."""

    def put(old: Tensor | None, new: Tensor | None) -> Tensor | None:
        return None if old is None or new is None else old.index_copy(0, rows, new)

    return Selection(
        index=kept.index.index_copy(0, rows, drawn.index),
        present=kept.present.index_copy(0, rows, drawn.present),
        log_inclusion=put(kept.log_inclusion, drawn.log_inclusion),
        joint_log_inclusion=put(kept.joint_log_inclusion, drawn.joint_log_inclusion),
    )
