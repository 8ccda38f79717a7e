"""One step of the recursion, from the model's scores to the hypotheses that go on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cpsbs.backends import Backend
from cpsbs.designs import Design
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Candidates, Selection
from cpsbs.scores.reading import beam_chunk_length, read
from cpsbs.search.extension import extended
from cpsbs.search.rows import Rows
from cpsbs.search.state import Hypotheses, Outcome

NOT_NUMBERS = "the model's scores of a prefix are NaN, inf, or all -inf"


@dataclass(frozen=True)
class Step:
    """One step of the recursion, from scores to hypotheses."""

    design: Design
    k: int
    temperature: float
    nucleus: float | None
    joint: bool
    rows: Rows
    eos: tuple[int, ...]
    pad: int
    backend: Backend

    @property
    def recordable(self) -> bool:
        """Whether it never looks at what it computes."""
        return self.design.recordable(self.k) and not self.joint and self.nucleus is None

    @property
    def key(self) -> tuple[object, ...]:
        """What a recording of it depends on."""
        return self.design, self.k, self.temperature, self.eos, self.pad

    def __call__(
        self, beam: Hypotheses, scores: Tensor, streams: Streams, into: Outcome | None = None
    ) -> Outcome:
        """What comes of the hypotheses, maybe written into ``into``."""
        return self.with_selection(beam, scores, streams, into)[1]

    def with_selection(
        self,
        beam: Hypotheses,
        scores: Tensor,
        streams: Streams,
        into: Outcome | None = None,
        row: Tensor | None = None,
    ) -> tuple[Selection, Outcome]:
        """The same, and what the design returned; with ``row`` [b, P] the scores are [n, V]."""
        candidates = self._candidates(beam, scores, row)
        # On a CPU it is told at once; elsewhere that would be to wait.
        if scores.device.type == "cpu" and not bool(candidates.log_total.isfinite().all()):
            raise ValueError(NOT_NUMBERS)
        selection = self.design.select(candidates, self.k, streams, self.joint)
        after = extended(beam, candidates, selection, self.eos, self.pad, into)
        stopped = self.rows.stops(after.parent, after.beam)
        if stopped is not None:
            finished = after.beam.finished.masked_scatter(after.beam.open, stopped)
            after = replace(after, beam=replace(after.beam, finished=finished))
        return selection, after

    def _candidates(self, beam: Hypotheses, scores: Tensor, row: Tensor | None) -> Candidates:
        """What the open hypotheses can be extended to, and the others as they are."""
        temperature = self.temperature
        if self.nucleus is not None:
            scores, temperature = processed(scores, temperature, self.nucleus), 1.0
        parents, tokens = beam.token.shape[-1], scores.shape[-1]
        length = beam_chunk_length(parents, tokens, self.k, self.backend)
        terms = self.backend.power_sums(self.design.power_sums)
        chunks = read(scores, temperature, length, terms, row, self.backend)
        return Candidates(beam.log_prob, chunks, beam.finished, beam.state, beam.log_inclusion)


def processed(scores: Tensor, temperature: float, nucleus: float | None) -> Tensor:
    """A model's scores [..., V], in float32 or float64, scaled and truncated.

    With ``nucleus``, -inf for all but the most probable tokens that make up this mass.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) / temperature
    if nucleus is None or nucleus == 1:
        return scores
    ordered, order = scores.softmax(-1).sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    inside = before < nucleus
    inside[..., 0] = True  # the most probable token, also where the mass rounds to zero
    keep = torch.empty_like(inside).scatter_(-1, order, inside)
    return scores.masked_fill(~keep, -math.inf)
