"""CUDA graphs: the launches of a step, recorded once and replayed as one."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from cpsbs.backends.triton.kept import CAPTURE


class GraphMemory:
    """The memory of graphs that never run at the same time, which they share.

    What a graph leaves behind must lie elsewhere, because the next one overwrites this memory.
    """

    def __init__(self) -> None:
        self.pool: Any = torch.cuda.graph_pool_handle()
        self.bytes = 0
        """Its size so far."""


def capture(
    compute: Callable[[], None],
    memory: GraphMemory,
    guard: AbstractContextManager[object] | None = None,
) -> torch.cuda.CUDAGraph:
    """Record what ``compute`` launches on the current device as a CUDA graph.

    Args:
        compute: launches the work. It runs once before it is recorded, inside of ``guard``, for
            what is only done the first time.
        memory: where the graph's intermediate results lie.
        guard: raises for whatever cannot be recorded.
    """
    current = torch.cuda.current_stream()
    aside = _stream_beside(current)
    with CAPTURE:
        aside.wait_stream(current)
        with torch.cuda.stream(aside), guard or nullcontext():
            compute()
        current.wait_stream(aside)
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        # Garbage must not be collected meanwhile: what is freed may be another graph. To collect it
        # before, as torch.cuda.graph does, takes longer than everything else here.
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(aside):
                # "thread_local" lets other threads go on meanwhile.
                graph.capture_begin(memory.pool, capture_error_mode="thread_local")
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
            memory.bytes += max(0, torch.cuda.memory_reserved() - before)
            # After a failed capture torch stays on the other stream.
            torch.cuda.set_stream(current)
            if collects:
                gc.enable()
    return graph


@functools.cache
def _stream_beside(stream: Any) -> Any:
    """Return the CUDA stream on which graphs for this one are recorded.

    It is always the same one, because torch keeps scratch memory for each stream.
    """
    make: Any = torch.cuda.Stream
    return make(stream.device)
