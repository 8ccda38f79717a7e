"""Continuous batching: sources of later requests take the places of sources that have ended.

On a GPU the time of a step is the time it takes to launch its kernels, and reading a result back
stalls the device. So every place of the batch, with the K rows of the model that belong to it,
stays occupied: hypotheses that have ended are carried along, steps are recorded and replayed, and
the scheduler synchronises with the device only every ``SYNC_EVERY`` steps. What a source gets does
not depend on any of this: its random numbers are its own.

A place is *running* (it belongs to a request) or *idle* (its source has been collected). After each
synchronisation the scheduler takes one ``Action``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Protocol

import torch
from torch import Tensor

from cpsbs.backends import Backend
from cpsbs.models.base import FixedRowModel, SequenceModel, check_scores, eos_tokens
from cpsbs.randomness import Streams
from cpsbs.search.beams import Hypotheses, StepResult, Trail
from cpsbs.search.path import path_step
from cpsbs.search.recursion import Transition, still_open
from cpsbs.search.requests import Request, RequestQueue
from cpsbs.search.settings import SearchSettings

SYNC_EVERY = 8
"""Steps between two host–device synchronisations."""

CROWDED = 512
"""The number of rows up to which a step on a GPU takes about the same time."""

SPARSE = 0.5
"""The share of running places at which, or below which, a crowded batch is made smaller."""


class Action(Enum):
    """What the scheduler does after a synchronisation."""

    CONTINUE = auto()
    """Take the next step."""
    COLLECT = auto()
    """Hand over the sources that have ended, because some have reached the maximal length."""
    REFILL = auto()
    """Collect, and let the sources of the next requests take idle places."""
    SHRINK = auto()
    """Collect, and go on with fewer places, because few are running and no request fits."""
    FINISH = auto()
    """Collect and stop: no place is running and no request fits."""


@dataclass
class Place:
    """The place of one source in the batch."""

    request: Request | None
    """Whose source runs here; None if the place is idle."""
    began: int
    """How many steps the batch had taken when the source began."""


class RecordedStep(Protocol):
    """A step of the search that a backend has recorded, on buffers of fixed shapes."""

    now: StepResult
    """The buffers that the step reads and writes."""
    streams: Streams
    """The random numbers that it reads."""

    def load(self, beam: Hypotheses, streams: Streams) -> None:
        """Copy hypotheses and streams into the buffers, to go on from there."""
        ...

    def run(self, scores: Tensor) -> StepResult:
        """Take one step."""
        ...


class Scheduler:
    """Searches a batch that begins with the sources of one request, whose model has fixed rows."""

    def __init__(self, request: Request, model: FixedRowModel, settings: SearchSettings) -> None:
        self._settings = settings
        self._transition = Transition.of(model, settings, request.backend)
        self._trail = Trail(model.sources, settings.k, model.pad, model.device, settings.max_length)
        self._slot = torch.arange(model.sources, device=model.device)
        """[b] the trail's slot for each place."""
        self._places = [Place(request, 0) for _ in range(model.sources)]
        self._steps = 0
        # A copy, because the streams of later sources will be put into it.
        self._streams = request.streams.copy()
        self._beam = Hypotheses.roots(settings, self._streams, self._slot)
        scores, roots = request.take_first_scores(), settings.design.roots(settings.k)
        self._rows = FixedRows(model, scores, roots, settings.k, request.backend)
        self._broken = torch.zeros((), dtype=torch.bool, device=model.device)
        self._recorded: RecordedStep | None = None

    def run(self, queue: RequestQueue) -> Iterator[None]:
        """Search until nothing is left; yield whenever sources have been handed over."""
        try:
            yield from self._run(queue)
        finally:
            self._rows.release()

    def _run(self, queue: RequestQueue) -> Iterator[None]:
        oldest = 0
        while True:
            parent = self._step()
            at_limit = self._steps - oldest == self._settings.max_length
            if at_limit or self._steps % SYNC_EVERY == 0:
                if not self._settings.path:
                    # The next request is prefilled while the device is busy.
                    queue.peek()
                ended = self._synchronise()
                action = self._next_action(ended, queue, at_limit)
                if action is not Action.CONTINUE:
                    self._collect(ended)
                    # The caller may change the model before it asks for more.
                    queue.settle()
                    yield
                if action is Action.FINISH:
                    return
                if action is Action.SHRINK:
                    parent = self._shrink(parent)
                if action is Action.REFILL:
                    parent = self._refill(queue, parent)
                oldest = min(place.began for place in self._places if place.request is not None)
            self._rows.advance(parent, self._beam)

    def _step(self) -> Tensor:
        """Take one step, recorded if that is possible; return the parents [b, K]."""
        transition = self._transition
        if self._recorded is None and self._steps and transition.recordable:
            self._recorded = self._rows.recorded(transition, self._beam, self._streams)
            if self._recorded is not None:
                self._recorded.now.broken.logical_or_(self._broken)
        if self._recorded is not None:
            result = self._recorded.run(self._rows.latest)
            self._streams, self._broken = self._recorded.streams, result.broken
        else:
            scores = self._rows.scores(self._beam)
            offered, selection, result = transition.selecting(
                self._beam, scores, None, self._streams
            )
            self._broken = self._broken | result.broken
            request = self._places[0].request
            if self._settings.path and request is not None:
                request.path.append(
                    path_step(self._settings, offered, selection, result.beam, result.parent)
                )
        self._beam = result.beam
        self._steps += 1
        trace = result.beam.traced(self._settings.design.trace)
        self._trail.append(self._slot, result.parent, result.beam.token, trace)
        return result.parent

    def _age(self, place: int) -> int:
        """Return how many tokens the source in a place has."""
        return self._steps - self._places[place].began

    def _synchronise(self) -> list[int]:
        """Return the running places whose sources have ended or reached the maximal length."""
        goes_on = still_open(self._beam, self._broken)
        return [
            i
            for i, place in enumerate(self._places)
            if place.request is not None
            and (not goes_on[i] or self._age(i) == self._settings.max_length)
        ]

    def _next_action(self, ended: list[int], queue: RequestQueue, at_limit: bool) -> Action:
        """Return what to do, given the places that have ended."""
        running = sum(place.request is not None for place in self._places) - len(ended)
        if self._next_fits(queue, len(self._places) - running):
            return Action.REFILL
        if running == 0:
            return Action.FINISH
        few = running <= SPARSE * len(self._places)
        if few and len(self._places) * self._settings.k > CROWDED:
            return Action.SHRINK
        return Action.COLLECT if at_limit else Action.CONTINUE

    def _collect(self, ended: list[int]) -> None:
        """Hand the sources in these places over to their requests; the places become idle."""
        for request in {id(r): r for r in (self._places[i].request for i in ended)}.values():
            assert request is not None
            own = [i for i in ended if self._places[i].request is request]
            at = self._tensor(own)
            ages = [self._age(i) for i in own]
            request.found.append(self._trail.found(self._beam.of(at), self._slot[at], ages))
        for i in ended:
            self._places[i].request = None
        # Hypotheses cut off at the maximal length are still open; close them, so that the places
        # do not go on extending them.
        closed = self._beam.finished.index_fill(0, self._tensor(ended), True)
        self._set_beam(replace(self._beam, finished=closed))
        self._rows.retire(ended)

    def _shrink(self, parent: Tensor) -> Tensor:
        """Go on with the running places alone; return their parents."""
        running = [i for i, place in enumerate(self._places) if place.request is not None]
        kept = self._tensor(running)
        self._beam, self._streams = self._beam.of(kept), self._streams.select(kept)
        self._slot = self._slot[kept]
        self._places = [self._places[i] for i in running]
        self._rows.keep(kept)
        self._recorded = None
        return parent[kept]

    def _refill(self, queue: RequestQueue, parent: Tensor) -> Tensor:
        """Let requests take idle places as long as they fit; return the parents [b, K]."""
        idle = [i for i, place in enumerate(self._places) if place.request is None]
        while self._next_fits(queue, len(idle)):
            request = queue.begin()
            count = request.model.sources
            parent, idle = self._admit(request, idle[:count], parent), idle[count:]
        return parent

    def _next_fits(self, queue: RequestQueue, idle: int) -> bool:
        """Return whether the sources of the next request can take so many idle places.

        Its prefill is waited for only where there is room. Where a path is kept no request may
        join, because a path belongs to one request.
        """
        waiting = None if self._settings.path else queue.peek()
        if waiting is None or waiting.model.sources > idle:
            return False
        waiting = queue.started()
        return waiting is not None and self._rows.admits(waiting.model)

    def _admit(self, request: Request, places: list[int], parent: Tensor) -> Tensor:
        """Put the sources of a request, after their first step, into these places."""
        settings, at = self._settings, self._tensor(places)
        first = request.take_first_scores()
        scores = first[:, None].expand(-1, settings.design.roots(settings.k), -1)
        streams = request.streams.copy()
        source = torch.arange(request.model.sources, device=self._slot.device)
        result = self._transition(Hypotheses.roots(settings, streams, source), scores, streams)
        pairs = zip(self._beam.tensors(), result.beam.tensors(), strict=True)
        self._streams.put(places, streams)
        self._set_beam(self._beam.rebuilt([mine.index_copy(0, at, its) for mine, its in pairs]))
        self._broken.logical_or_(result.broken)
        trace = result.beam.traced(settings.design.trace)
        self._trail.begin(self._slot[at], result.parent, result.beam.token, trace)
        self._rows.join(places, request.model)
        for i in places:
            self._places[i] = Place(request, self._steps - 1)
        # The rows of a source that begins are all alike, so that any of them may be the parent.
        return parent.index_fill(0, at, 0)

    def _set_beam(self, beam: Hypotheses) -> None:
        """Go on with these hypotheses, in the recorded step's buffers if there are any."""
        if self._recorded is None:
            self._beam = beam
        else:
            broken = self._broken.clone()
            self._recorded.load(beam, self._streams)
            self._broken.logical_or_(broken)

    def _tensor(self, places: list[int]) -> Tensor:
        return torch.tensor(places, dtype=torch.int64, device=self._slot.device)


class FixedRows:
    """The rows of a model that keeps K for every source, also for hypotheses that have ended.

    Args:
        model: a model whose ``fix_rows`` has returned True.
        scores: [sources, V] of the first token.
        roots: how many copies of the empty sequence each source starts from.
        k: K.
        backend: the backend that records the steps of the search.
    """

    def __init__(
        self, model: FixedRowModel, scores: Tensor, roots: int, k: int, backend: Backend
    ) -> None:
        self._model, self._roots, self._k, self._backend = model, roots, k, backend
        self.latest = scores
        """What the model returned last: [sources, V] at first, then [b·K, V]."""
        self._at_start = True

    def scores(self, beam: Hypotheses) -> Tensor:
        """Return the scores [b, P, V]; hypotheses that have ended offer token 0 alone."""
        if self._at_start:
            return self.latest[:, None].expand(-1, self._roots, -1)
        return self._closed(self.latest, beam)

    def advance(self, parent: Tensor, beam: Hypotheses) -> None:
        """Let all hypotheses [b, K] extend their parents [b, K] by their last token."""
        scores = self._model.step(parent, beam.token)
        self.latest = check_scores(scores, parent.numel(), self._model, "step")
        self._at_start = False

    def keep(self, sources: Tensor) -> None:
        """Keep these sources [b'] alone; the model copies its KV cache."""
        self._model.keep_sources(sources)

    def admits(self, model: SequenceModel) -> bool:
        """Return whether sources of another model, which has started, can take places here."""
        own = self._model
        alike = (own.pad, own.vocab_size) == (model.pad, model.vocab_size)
        return alike and eos_tokens(own) == eos_tokens(model) and own.admits(model)

    def retire(self, places: list[int]) -> None:
        """Tell the model that these places are idle and need not read a growing KV cache."""
        self._model.retire(places)

    def join(self, places: list[int], model: SequenceModel) -> None:
        """Let the sources of a model that ``admits`` has accepted take these places."""
        self._model.join(places, model)

    def release(self) -> None:
        """Free the model's buffers for other searches."""
        self._model.release()

    def recorded(
        self, transition: Transition, beam: Hypotheses, streams: Streams
    ) -> RecordedStep | None:
        """Return the step recorded by the backend, ready to go on from here, or None.

        A recording is kept with the buffers of the model and used again by later searches.
        """

        def step(
            beam: Hypotheses, scores: Tensor, streams: Streams, into: StepResult
        ) -> StepResult:
            return transition(beam, self._closed(scores, beam), streams, into)

        def now() -> StepResult:
            broken = torch.zeros((), dtype=torch.bool, device=self.latest.device)
            own = beam.rebuilt([x.clone() for x in beam.tensors()])
            return StepResult(own, torch.empty_like(beam.token), broken)

        found: RecordedStep | None = self._backend.record(
            step, transition.key, now, self.latest, streams, self._model.memo()
        )
        if found is not None:
            found.load(beam, streams)
        return found

    def _closed(self, scores: Tensor, beam: Hypotheses) -> Tensor:
        """Return the scores [b, P, V]; rows of hypotheses that have ended are overwritten."""
        if not self._backend.close(scores, beam.present, beam.finished):
            closed = ~beam.open.flatten()
            scores.masked_fill_(closed[:, None], -math.inf)
            scores[:, 0].masked_fill_(closed, 0.0)
        return scores.view(*beam.token.shape, -1)
