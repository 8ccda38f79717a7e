"""CUDA graphs: the launches of a step are recorded once and replayed as one.

What a graph reads and writes lives in buffers. A replay allocates nothing and does not synchronise.
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
    from cpsbs.search.beams import Hypotheses, StepFunction, StepResult

_ONE_AT_A_TIME = threading.Lock()


def capture(
    compute: Callable[[], None], pool: Any, guard: AbstractContextManager[object] | None = None
) -> torch.cuda.CUDAGraph:
    """Record what ``compute`` launches on the current device as a CUDA graph.

    Args:
        compute: launches the work. It runs once before it is recorded, inside of ``guard``, for
            what is only done the first time.
        pool: the memory pool of graphs that never run at the same time.
        guard: raises for whatever cannot be recorded.
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
        # before, as torch.cuda.graph does, takes longer than everything else here.
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(aside):
                # "thread_local" lets other threads go on meanwhile.
                graph.capture_begin(pool, capture_error_mode="thread_local")
                try:
                    compute()
                finally:
                    graph.capture_end()
        except Exception as error:
            # A failed capture leaves torch's generator in the middle of one; a clone of it is not.
            generator: Any = torch.cuda.default_generators[current.device.index]
            generator.graphsafe_set_state(generator.clone_state())
            # Ending the capture may have failed too, with an error that hides the first one.
            if isinstance(error.__context__, torch.OutOfMemoryError):
                raise error.__context__ from None
            raise
        finally:
            # After a failed capture torch stays on the other stream.
            torch.cuda.set_stream(current)
            if collects:
                gc.enable()
    return graph


class GraphedSearchStep:
    """A step of the search as a CUDA graph: from the model's scores to the next hypotheses."""

    def __init__(
        self, step: StepFunction, now: StepResult, scores: Tensor, streams: Streams, pool: Any
    ) -> None:
        self.now = now
        self.streams = streams.copy()
        self._scores = scores

        def compute() -> None:
            self.now.load(step(self.now.beam, scores, self.streams, self.now))

        self._graph = capture(compute, pool)

    def load(self, beam: Hypotheses, streams: Streams) -> None:
        """Continue from these hypotheses and random streams."""
        for own, given in zip(self.now.beam.tensors(), beam.tensors(), strict=True):
            own.copy_(given)
        self.streams.load(streams)
        self.now.broken.zero_()

    def run(self, scores: Tensor) -> StepResult:
        """Take one step; the next one overwrites its result."""
        if scores.data_ptr() != self._scores.data_ptr():
            self._scores.copy_(scores)
        self._graph.replay()
        return self.now


@functools.cache
def _stream_beside(stream: Any) -> Any:
    """Return the CUDA stream on which graphs for this one are recorded.

    It is always the same one, because torch keeps scratch memory for each stream.
    """
    make: Any = torch.cuda.Stream
    return make(stream.device)
