"""Requests: models whose sources are to be searched, in their order, and what was found."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from cpsbs.backends import Backend
from cpsbs.models.base import ConcurrentModel, SequenceModel, check_scores
from cpsbs.randomness import Streams
from cpsbs.search.beams import Beams, Found, collected
from cpsbs.search.path import Step
from cpsbs.search.settings import SearchSettings


@dataclass(eq=False)
class Request:
    """A model whose sources are to be searched, and what has been found for them so far."""

    model: SequenceModel
    streams: Streams
    """The random numbers of the sources."""
    backend: Backend
    label: Mapping[str, Any]
    """How the beams are made; it becomes ``Beams.settings``."""
    found: list[Found] = field(default_factory=list)
    """What was found for the sources that have ended."""
    path: list[Step] = field(default_factory=list)
    _first_scores: Tensor | None = None
    _begun: Callable[[], Tensor] | None = None
    """Returns the scores of the first token, once they are being computed ahead."""

    def prefill(self) -> None:
        """Start the model, unless it has started, and keep its scores of the first token."""
        if self._first_scores is None:
            begun, self._begun = self._begun, None
            self._first_scores = self._start() if begun is None else begun()

    @property
    def is_starting_ahead(self) -> bool:
        """Whether the model is being started in another thread."""
        return self._begun is not None

    def prefill_ahead(self) -> None:
        """Begin with ``prefill``, in another thread if the backend has one and the model allows."""
        shared = isinstance(self.model, ConcurrentModel) and self.model.concurrent
        if not shared:
            self.prefill()
        elif self._first_scores is None and self._begun is None:
            self._begun = self.backend.compute_ahead(self._start)

    def _start(self) -> Tensor:
        return check_scores(self.model.start(), self.model.sources, self.model, "start")

    def take_first_scores(self) -> Tensor:
        """Return the scores [sources, V] of the first token, and drop them here to free memory."""
        self.prefill()
        scores, self._first_scores = self._first_scores, None
        assert scores is not None
        return scores

    def forget(self) -> None:
        """Forget what was found so far, to search the sources again from the beginning."""
        if self._begun is not None:
            with suppress(Exception):  # unless it was about memory, it will be raised again
                self._begun()
            self._begun = None
        self.found.clear()
        self.path.clear()
        self._first_scores = None

    @property
    def done(self) -> bool:
        """Whether all sources have ended."""
        return sum(len(part.beam.source) for part in self.found) == self.model.sources

    def beams(self, settings: SearchSettings) -> Beams:
        """Return what was found, once the request is done."""
        path = tuple(self.path) if settings.path else None
        return collected(self.found, settings.design, self.model.pad, path, self.label)


class RequestQueue:
    """Requests in their order: those that are still to come, and those that have begun."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._coming: Iterator[Request] = iter(requests)
        self._waiting: Request | None = None
        self._next: Request | None = None
        """The request after the waiting one, if ``several`` has asked for it."""
        self._postponed = False
        """Whether there was too little memory to start the waiting one beside the running ones."""
        self._begun = deque[Request]()
        self._error: Exception | None = None

    def peek(self) -> Request | None:
        """Return the next request without beginning it, or None if there is none.

        If others have begun, its model is started, while the device is busy with them. If that
        fails, the error is raised only when those that have begun are done.
        """
        if self._waiting is None and self._error is None:
            try:
                self._waiting = self._ahead()
                if self._begun and self._waiting is not None:
                    self._waiting.prefill_ahead()
            except Exception as error:
                self._failed(error)
        if self._error is not None and self._waiting is None and not self._begun:
            raise self._error
        return self._waiting

    def started(self) -> Request | None:
        """Return what ``peek`` returns, once its model has started.

        None also if there is too little memory for it beside those that have begun. It is then
        started when they are done.
        """
        request = self.peek()
        if request is None or self._postponed:
            return None
        try:
            request.prefill()
        except Exception as error:
            self._failed(error)
            return None if self._postponed else self.peek()
        return request

    def settle(self) -> None:
        """Wait until no model is being started in another thread."""
        if self._waiting is not None and self._waiting.is_starting_ahead:
            self.started()

    def abandon(self) -> None:
        """Wait until no model is being started in another thread, and forget what it found."""
        for request in (self._waiting, self._next):
            if request is not None:
                request.forget()

    @property
    def sources(self) -> int:
        """The number of sources of the largest model that has begun and is not done."""
        return max((request.model.sources for request in self._begun), default=0)

    def _failed(self, error: Exception) -> None:
        """Record that the waiting request could not be started, or the next one not be made."""
        if isinstance(error, torch.OutOfMemoryError) and self._waiting is not None and self._begun:
            self._waiting.forget()
            self._postponed = True
        else:
            self._waiting, self._error = None, error

    def begin(self) -> Request:
        """Return the next request, which counts as begun from now on."""
        request = self.peek()
        assert request is not None
        self._waiting, self._postponed = None, False
        self._begun.append(request)
        return request

    def begin_again(self) -> None:
        """Put requests that have begun, and those that wait, back to search them from the start."""
        waiting = [request for request in (self._waiting, self._next) if request is not None]
        again = [*self._begun, *waiting]
        for request in again:
            request.forget()
        self._coming = chain(again, self._coming)
        self._begun.clear()
        self._waiting, self._next, self._postponed = None, None, False

    def several(self) -> bool:
        """Return whether at least two requests are still to come."""
        if self.peek() is None or self._error is not None:
            return False
        if self._next is None:
            try:
                self._next = next(self._coming, None)
            except Exception as error:  # raised when the first one is done
                self._error = error
        return self._next is not None

    def take(self) -> Request | None:
        """Remove the next request from the queue and return it; None if there is none."""
        request = self._ahead()
        if request is None and self._error is not None:
            raise self._error
        return request

    def _ahead(self) -> Request | None:
        """Return the next request and forget it."""
        for name in ("_waiting", "_next"):
            request: Request | None = getattr(self, name)
            if request is not None:
                setattr(self, name, None)
                return request
        return None if self._error is not None else next(self._coming, None)

    def done(self) -> Iterator[Request]:
        """Yield the requests that are done, up to the first one that is not."""
        while self._begun and self._begun[0].done:
            yield self._begun.popleft()
