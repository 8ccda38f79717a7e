"""A step of the search as a CUDA graph: some hundred small launches become one.

The hypotheses live in buffers that the graph reads and writes; between two replays nothing is
allocated and nothing is waited for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cpsbs.hypotheses import Hypotheses
from cpsbs.randomness import Streams

log = logging.getLogger("cpsbs")

_ONE_AT_A_TIME = threading.Lock()

Step = Callable[[Hypotheses, Tensor, Streams], tuple[Hypotheses, Tensor, Tensor]]
"""From hypotheses [b, K], scores [b, K, V] (or [b·K, V]) and random streams: new hypotheses, their
parents [b, K], and whether something was no number."""


class RecordedStep:
    """A step on buffers of fixed shapes.

    ``pool`` is memory that several recordings may share which never run at once.
    """

    def __init__(
        self, step: Step, beam: Hypotheses, scores: Tensor, streams: Streams, pool: Any
    ) -> None:
        self.beam = beam.rebuilt([x.clone() for x in beam.tensors()])
        self.streams = streams.copy()
        self._scores = scores
        self.broken = torch.zeros((), dtype=torch.bool, device=scores.device)
        current = torch.cuda.current_stream()
        make: Any = torch.cuda.Stream
        aside = make()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            step(self.beam, scores, self.streams)  # what is only done the first time
        current.wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph would do the same, but it also collects garbage, which takes longer than
        # all that is recorded here.
        torch.cuda.synchronize()
        with _ONE_AT_A_TIME, torch.cuda.stream(aside):
            self._graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                after, self.parent, broken = step(self.beam, scores, self.streams)
                self.broken |= broken
                for old, new in zip(self.beam.tensors(), after.tensors(), strict=True):
                    if new is not old:
                        old.copy_(new)
            finally:
                self._graph.capture_end()

    def load(self, beam: Hypotheses, streams: Streams) -> None:
        """Go on from here."""
        for own, given in zip(self.beam.tensors(), beam.tensors(), strict=True):
            own.copy_(given)
        self.streams.load(streams)
        self.broken.zero_()

    def run(self, scores: Tensor) -> Tensor:
        """One step; [b, K] the parents of the hypotheses that ``beam`` now holds."""
        if scores.data_ptr() != self._scores.data_ptr():
            self._scores.copy_(scores)
        self._graph.replay()
        return self.parent
