"""Launches recorded as a CUDA graph: some hundred small ones become one.

What a graph reads and writes lives in buffers; between two replays nothing is allocated and nothing
is waited for.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpsbs.randomness import Streams

if TYPE_CHECKING:
    from cpsbs.search.state import Hypotheses, Outcome, Step

_ONE_AT_A_TIME = threading.Lock()


def captured(
    compute: Callable[[], None], pool: Any, guard: AbstractContextManager[object] | None = None
) -> torch.cuda.CUDAGraph:
    """What ``compute`` launches on the current device, as a graph.

    Before it is recorded it runs once, inside of ``guard``, for what is only done the first time.
    ``pool`` is memory that several graphs may share which never run at once.
    """
    current = torch.cuda.current_stream()
    aside = _stream_beside(current)
    with _ONE_AT_A_TIME:
        aside.wait_stream(current)
        with torch.cuda.stream(aside), guard or nullcontext():
            compute()
        current.wait_stream(aside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Garbage must not be collected meanwhile: what is freed may be another graph. To collect it
        # before, as torch.cuda.graph does, takes longer than all else here.
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(aside):
                # Other threads may go on meanwhile.
                graph.capture_begin(pool, capture_error_mode="thread_local")
                try:
                    compute()
                finally:
                    graph.capture_end()
        except Exception as error:
            # A recording that has failed leaves torch's generator in its middle; a copy is not.
            generator: Any = torch.cuda.default_generators[current.device.index]
            generator.graphsafe_set_state(generator.clone_state())
            # Its end may fail too, with another error.
            if isinstance(error.__context__, torch.OutOfMemoryError):
                raise error.__context__ from None
            raise
        finally:
            # Where recording fails, torch stays on the other stream.
            torch.cuda.set_stream(current)
            if collects:
                gc.enable()
    return graph


class RecordedStep:
    """A step of the search on buffers of fixed shapes."""

    def __init__(
        self, step: Step, now: Outcome, scores: Tensor, streams: Streams, pool: Any
    ) -> None:
        self.now = now
        self.streams = streams.copy()
        self._scores = scores

        def compute() -> None:
            self.now.load(step(self.now.beam, scores, self.streams, self.now))

        self._graph = captured(compute, pool)

    def load(self, beam: Hypotheses, streams: Streams) -> None:
        """Go on from here."""
        for own, given in zip(self.now.beam.tensors(), beam.tensors(), strict=True):
            own.copy_(given)
        self.streams.load(streams)
        self.now.broken.zero_()

    def run(self, scores: Tensor) -> Outcome:
        """One step."""
        if scores.data_ptr() != self._scores.data_ptr():
            self._scores.copy_(scores)
        self._graph.replay()
        return self.now


@functools.cache
def _stream_beside(stream: Any) -> Any:
    """The stream on which graphs for this one are recorded, with the scratch memory it keeps."""
    make: Any = torch.cuda.Stream
    return make(stream.device)
