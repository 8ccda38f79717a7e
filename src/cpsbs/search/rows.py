"""Which of a model's rows belong to which hypotheses; two ways to keep them.

On a CPU a row costs what it computes, so the model is asked only about hypotheses that go on. On a
GPU a step costs what it takes to launch, and to look at a result is to wait for it: there every
source keeps K rows, whose hypotheses may have ended, and the search looks only now and then.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Protocol

import torch
from torch import Tensor

from cpsbs.backends import Backend
from cpsbs.models.base import (
    FixedRowModel,
    SequenceModel,
    StoppingModel,
    check_scores,
    check_stops,
    eos_tokens,
)
from cpsbs.randomness import Streams
from cpsbs.search.state import Hypotheses, Outcome, RecordedStep, Step

LOOK = 8
"""Steps between two looks, where rows are fixed."""

CROWDED = 512
"""Rows up to which a step on a GPU takes the same time."""

SPARSE = 0.5
"""Share of sources that must be left for the others to be dropped, where rows are fixed."""


class Rows(Protocol):
    """The rows of hypotheses [b, P]."""

    def looks(self, step: int) -> bool:
        """Whether the search is to look at the result of this step; the first is 0."""
        ...

    latest: Tensor
    """[rows, V] what the model said last."""
    takes_others: bool
    """Whether sources of other models may be able to take places here."""

    def scores(self, beam: Hypotheses) -> tuple[Tensor, Tensor | None]:
        """[n, V] scores of the next token, and [b, P] whose they are; n for a hypothesis that does
        not go on. Or [b, P, V], with 0 for token 0 and -inf for all others where one does not.
        """
        ...

    def advance(self, parent: Tensor, beam: Hypotheses) -> None:
        """Hypotheses [b, K] extend their parents [b, K] by their last token."""
        ...

    def stops(self, parent: Tensor, beam: Hypotheses) -> Tensor | None:
        """[n] which of the hypotheses [b, K] that go on end for another reason than their token."""
        ...

    def worth_dropping(self, left: int, all_sources: int) -> bool:
        """Whether sources that have ended are to be dropped."""
        ...

    def keep(self, sources: Tensor) -> None:
        """Only these sources [b'] go on."""
        ...

    def admits(self, model: SequenceModel) -> bool:
        """Whether the sources of another model, which has begun, can take places here."""
        ...

    def rest(self, places: list[int]) -> None:
        """Nobody asks for the sources in these places any more."""
        ...

    def join(self, places: list[int], model: SequenceModel) -> None:
        """The sources of another model take these places."""
        ...

    def release(self) -> None:
        """The search is over."""
        ...

    def recorded(
        self, step: Step, key: Hashable, beam: Hypotheses, streams: Streams
    ) -> RecordedStep | None:
        """The step as a graph that goes on from here, if there are graphs; it was recorded now, or
        earlier under the same key.
        """
        ...


def rows_of(
    model: SequenceModel, scores: Tensor, k: int, roots: int, max_length: int, backend: Backend
) -> Rows:
    """The rows of a search that begins, with ``roots`` hypotheses for each source.

    ``scores`` [sources, V] are those of the first token.
    """
    if isinstance(model, FixedRowModel) and max_length > 1 and model.fix_rows(k, max_length - 1):
        return FixedRows(model, scores, roots, k, backend)
    return FreeRows(model, scores, roots)


class FreeRows:
    """The rows are the hypotheses that go on; they change at every step."""

    takes_others = False

    def __init__(self, model: SequenceModel, scores: Tensor, roots: int) -> None:
        self._model, self.latest = model, scores
        self._stopping = model if isinstance(model, StoppingModel) else None
        # All roots of a source share the model's row.
        self._row = torch.arange(model.sources, device=scores.device)[:, None].expand(-1, roots)

    def looks(self, step: int) -> bool:
        """Always."""
        return True

    def scores(self, beam: Hypotheses) -> tuple[Tensor, Tensor | None]:
        """As the model has them."""
        scores, going = self.latest, beam.open
        if going.numel() == len(scores) and bool(going.all()):
            return scores.view(*going.shape, -1), None
        return scores, self._row.masked_fill(~going, len(scores))

    def advance(self, parent: Tensor, beam: Hypotheses) -> None:
        """Only what goes on."""
        going = beam.open
        parents = self._row.gather(-1, parent)[going]
        scores = self._model.advance(parents, beam.token[going])
        self.latest = check_scores(scores, len(parents), self._model, "advance")
        self._row = (going.flatten().cumsum(0) - 1).view(going.shape)

    def stops(self, parent: Tensor, beam: Hypotheses) -> Tensor | None:
        """Ask the model, if it has reasons of its own to stop."""
        if self._stopping is None:
            return None
        going = beam.open
        parents = self._row.gather(-1, parent)[going]
        return check_stops(self._stopping.stops(parents, beam.token[going]), len(parents))

    def worth_dropping(self, left: int, all_sources: int) -> bool:
        """Whenever there are any."""
        return left < all_sources

    def keep(self, sources: Tensor) -> None:
        """The model forgets rows that nobody extends."""
        self._row = self._row[sources]

    def admits(self, model: SequenceModel) -> bool:
        """Nothing waits for rows to be there."""
        return False

    def rest(self, places: list[int]) -> None:
        """There are no rows that could."""

    def join(self, places: list[int], model: SequenceModel) -> None:
        """Is not asked for."""
        raise ValueError("these rows take no others")

    def release(self) -> None:
        """The model holds what it holds."""

    def recorded(
        self, step: Step, key: Hashable, beam: Hypotheses, streams: Streams
    ) -> RecordedStep | None:
        """Rows that change cannot be recorded."""
        return None


class FixedRows:
    """Every source has K rows, whose hypotheses may have ended."""

    takes_others = True

    def __init__(
        self, model: FixedRowModel, scores: Tensor, roots: int, k: int, backend: Backend
    ) -> None:
        self._model, self.latest, self._roots, self._k = model, scores, roots, k
        self._backend = backend
        self._begins = True

    def looks(self, step: int) -> bool:
        """Now and then."""
        return step % LOOK == 0

    def scores(self, beam: Hypotheses) -> tuple[Tensor, Tensor | None]:
        """As the model has them, those that do not go on written over."""
        if self._begins:
            return self.latest[:, None].expand(-1, self._roots, -1), None
        return self._closed(self.latest, beam), None

    def advance(self, parent: Tensor, beam: Hypotheses) -> None:
        """All of them."""
        scores = self._model.step(parent, beam.token)
        self.latest = check_scores(scores, parent.numel(), self._model, "step")
        self._begins = False

    def stops(self, parent: Tensor, beam: Hypotheses) -> Tensor | None:
        """Models with fixed rows have no such reason."""
        return None

    def worth_dropping(self, left: int, all_sources: int) -> bool:
        """When few of many are left: it takes a copy of the cache, and another graph."""
        return 0 < left <= SPARSE * all_sources and all_sources * self._k > CROWDED

    def keep(self, sources: Tensor) -> None:
        """The model moves them together."""
        self._model.keep_sources(sources)

    def admits(self, model: SequenceModel) -> bool:
        """If they are of one kind."""
        own = self._model
        alike = (own.pad, own.vocab_size) == (model.pad, model.vocab_size)
        return alike and eos_tokens(own) == eos_tokens(model) and own.admits(model)

    def rest(self, places: list[int]) -> None:
        """They begin again, so as not to attend to more and more."""
        self._model.rest(places)

    def join(self, places: list[int], model: SequenceModel) -> None:
        """The model copies what they hold."""
        self._model.join(places, model)

    def release(self) -> None:
        """The model's buffers are for others."""
        self._model.release()

    def recorded(
        self, step: Step, key: Hashable, beam: Hypotheses, streams: Streams
    ) -> RecordedStep | None:
        """The step is kept with the buffers of the model."""

        def closing(beam: Hypotheses, scores: Tensor, streams: Streams, into: Outcome) -> Outcome:
            return step(beam, self._closed(scores, beam), streams, into)

        def now() -> Outcome:
            broken = torch.zeros((), dtype=torch.bool, device=self.latest.device)
            own = beam.rebuilt([x.clone() for x in beam.tensors()])
            return Outcome(own, torch.empty_like(beam.token), broken)

        memo = self._model.memo()
        found: RecordedStep | None = self._backend.record(
            closing, key, now, self.latest, streams, memo
        )
        if found is not None:
            found.load(beam, streams)
        return found

    def _closed(self, scores: Tensor, beam: Hypotheses) -> Tensor:
        """[b, P, V] the scores [b·P, V] of hypotheses [b, P]; ended ones written over."""
        if not self._backend.close(scores, beam.present, beam.finished):
            closed = ~beam.open.flatten()
            scores.masked_fill_(closed[:, None], -math.inf)
            scores[:, 0].masked_fill_(closed, 0.0)
        return scores.view(*beam.token.shape, -1)
