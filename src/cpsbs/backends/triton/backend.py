"""The Triton backend: what it takes over from the reference, and when.

Kernels work on float32 tables of chunks whose length is a power of two, and hold the largest few
candidates in registers; whatever does not fit is left to the reference.

Steps of the model and of the search are recorded as CUDA graphs: the launches of a step are
recorded once (``graphs.capture``) and replayed as one. What a graph reads and writes lives in
buffers. A replay allocates nothing and does not synchronise.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpsbs.backends.base import MOST_DRAWN, Backend, FixedSteps, OrdinarySteps
from cpsbs.backends.triton import kept
from cpsbs.backends.triton.graphs import GraphMemory, capture
from cpsbs.backends.triton.kernels import MOST_COUNTED, MOST_IN_HEAD, POWER_SUMS
from cpsbs.backends.triton.kernels.extending import close_rows, extend
from cpsbs.backends.triton.kernels.finding import find_head
from cpsbs.backends.triton.kernels.gumbel import select
from cpsbs.backends.triton.kernels.launching import compiling_only
from cpsbs.backends.triton.kernels.noise import uniform
from cpsbs.backends.triton.kernels.poisson import draw
from cpsbs.backends.triton.kernels.reading import normalize, read_into
from cpsbs.backends.triton.kernels.stratified import draw as draw_stratified
from cpsbs.backends.triton.memory import sources_that_fit
from cpsbs.conditional_poisson.weights import CandidateWeights, Weights
from cpsbs.randomness import Counters, Streams
from cpsbs.scores.candidates import Candidates, Selection
from cpsbs.scores.largest import head_size
from cpsbs.scores.reading import Chunks, Largest

if TYPE_CHECKING:
    from cpsbs.search.beams import Hypotheses, StepFunction, StepResult

log = logging.getLogger("cpsbs")

LONGEST = 256
"""Chunks are not made longer than this to have fewer of them: kernels hold some in registers."""


class TritonBackend(Backend):
    """Triton kernels, on a GPU or in Triton's interpreter, and CUDA graphs on a GPU."""

    name = "triton"
    counts_random_numbers = True

    def chunk_length(self, least: int, parents: int, tokens: int, terms: int) -> int:
        """Return a power of two such that the chunks of a source fit into a few blocks.

        Chunks that are longer than ``least``, and so fewer of them, are faster, above all for
        designs with one power sum, which look into K chunks only.
        """
        least = max(least, 64, parents * tokens // 2**16)
        length = 1 << (least - 1).bit_length()
        return max(length, min(length * (4 if terms == 1 else 2), LONGEST))

    def power_sums(self, wanted: int) -> int:
        """Return as many as any distribution needs, because on a GPU they cost no time."""
        return POWER_SUMS if wanted > 1 else wanted

    def read_into(
        self, rows: Tensor, temperature: float, length: int, maxima: Tensor, sums: Tensor
    ) -> bool:
        """Fill maxima and sums in one reading of the scores."""
        if not _fits(sums.dtype, length):
            return False
        read_into(rows, temperature, length, maxima, sums)
        return True

    def normalize(self, chunks: Chunks, log_prob: Tensor) -> tuple[Tensor, Tensor] | None:
        """Add up the chunks of every row in float64."""
        if not _is_readable(chunks):
            return None
        return normalize(chunks.maxima, chunks.sums[0], chunks.temperature, log_prob)

    def find_largest(self, chunks: Chunks, offset: Tensor, m: int) -> Largest | None:
        """Find the largest candidates in the chunks with the largest maxima."""
        if not _is_findable(chunks, m) or m > MOST_IN_HEAD:
            return None
        head = find_head(chunks, offset, m, "log-probability")
        return Largest(head.values, head.index, None)

    def draw_conditional_poisson(
        self, weights: Weights, k: int, streams: Streams
    ) -> Selection | None:
        """Draw a sample for each source; one with too few candidates keeps them all."""
        counters = streams.counters
        if counters is None or not isinstance(weights, CandidateWeights) or k > MOST_DRAWN:
            return None
        if not _is_findable(weights.chunks, head_size(k)):
            return None
        seeds, counts = counters.seeds, counters.counts
        drawn = draw(weights.chunks, weights.offset, weights.odds, k, seeds, counts)
        return Selection(drawn.index, drawn.present, drawn.log_inclusion)

    def select_gumbel_top_k(
        self, candidates: Candidates, k: int, streams: Streams
    ) -> Selection | None:
        """Perturb the masses of chunks, then the candidates in the K + 1 best chunks."""
        chunks = candidates.chunks
        most = max(chunks.maxima[0].numel(), (k + 1) * chunks.length)
        possible = _is_readable(chunks) and most < MOST_COUNTED and k < MOST_IN_HEAD
        if streams.counters is None or not possible:
            return None
        return select(candidates, k, streams.counters)

    def draw_stratified(
        self, candidates: Candidates, k: int, streams: Streams, full_share: float, forbidden: float
    ) -> Selection | None:
        """Draw with the same random numbers as the reference; with too few candidates, keep all."""
        chunks = candidates.chunks
        fits = max(k, chunks.shape[1]) <= MOST_DRAWN
        if streams.counters is None or not _is_findable(chunks, k) or not fits:
            return None
        return draw_stratified(candidates, k, streams.counters, full_share, forbidden)

    def extends(self, candidates: Candidates, selection: Selection) -> bool:
        """Return whether the table of chunks is one that kernels can read."""
        return _is_readable(candidates.chunks)

    def extend(
        self,
        beam: Any,
        candidates: Candidates,
        selection: Selection,
        eos: Tensor,
        pad: int,
        into: Any,
    ) -> None:
        """Write all that a hypothesis holds in one launch."""
        extend(beam, candidates, selection, eos, pad, into)

    def close(self, scores: Tensor, present: Tensor, finished: Tensor) -> bool:
        """Overwrite only the rows of hypotheses that have ended."""
        close_rows(scores, present, finished)
        return True

    def uniform(self, counters: Counters, row: Tensor, size: tuple[int, ...]) -> Tensor:
        """Return the next numbers of each row's Philox stream."""
        numbers = uniform(counters.seeds, counters.counts, row, size)
        counters.counts.index_add_(0, row, torch.ones_like(row))
        return numbers

    def fixed_steps(
        self,
        model: Any,
        inputs: Callable[[], Mapping[str, Any]],
        k: int,
        steps: int,
        reference: Callable[[], OrdinarySteps],
    ) -> FixedSteps | None:
        """Record the model's steps as CUDA graphs; None without CUDA, or if that is impossible."""
        if model.device.type != "cuda":
            return None
        from cpsbs.backends.triton.fixed_steps import begin

        return begin(model, inputs(), k, steps, reference)

    def sources_that_fit(self, model: Any, k: int, prompt: int, steps: int) -> int | None:
        """Return how many sources fit into half of the card, beside the model's weights."""
        if model.device.type != "cuda":
            return None
        return sources_that_fit(model, k, prompt, steps)

    def compute_ahead(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Compute in another thread, on the stream of this one, unless autocast is on here.

        A prefill is hundreds of launches, as many as dozens of recorded steps. From two threads,
        launches of both take turns, and as they share a stream no memory is used too early.
        """
        if not torch.cuda.is_available() or torch.is_autocast_enabled("cuda"):
            return super().compute_ahead(compute)
        stream = torch.cuda.current_stream()

        def run() -> Tensor:
            with torch.cuda.stream(stream), torch.no_grad():
                return compute()

        return _aside().submit(run).result

    def rehearse(
        self, key: Hashable, steps: Sequence[Callable[[], Callable[[], None]]]
    ) -> Callable[[], None]:
        """Call functions for each key, each in a thread and on a stream of its own.

        The first call compiles the kernels and launches none of them, the second one launches them.
        """
        if not torch.cuda.is_available():
            return super().rehearse(key, steps)
        device = torch.cuda.current_device()

        def run(prepare: Callable[[], Callable[[], None]]) -> None:
            make: Any = torch.cuda.Stream
            with torch.cuda.device(device), torch.cuda.stream(make(device)), torch.no_grad():
                try:
                    step = prepare()
                    try:
                        with compiling_only():
                            step()
                    except Exception as error:  # then they are compiled one after another
                        log.debug("kernels are not compiled side by side: %s", error)
                    step()
                except Exception as error:  # it will be raised again, if it is not of this call
                    log.debug("a step could not be rehearsed: %s", error)
                # What was made here is complete before others use it.
                torch.cuda.current_stream().synchronize()

        with _REHEARSING:
            if (threads := _REHEARSED.get(key)) is None:
                threads = [Thread(target=run, args=(step,), daemon=True) for step in steps]
                for thread in threads:
                    thread.start()
                _REHEARSED[key] = threads

        def wait() -> None:
            for thread in threads:
                thread.join()

        return wait

    def release(self) -> int:
        """Free the buffers that no search is using."""
        return kept.release()

    def record(
        self,
        step: Callable[..., Any],
        key: Hashable,
        now: Callable[[], Any],
        scores: Tensor,
        streams: Streams,
        memo: dict[Any, Any],
    ) -> Any | None:
        """Record the search's step as a CUDA graph; None where that is impossible."""
        if scores.device.type != "cuda" or streams.counters is None:
            return None
        full_key = (key, scores.shape, scores.dtype)
        if full_key not in memo:
            memory = memo.setdefault(GraphMemory, GraphMemory())
            try:
                memo[full_key] = GraphedSearchStep(step, now(), scores, streams, memory)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                # A design may do things that cannot be recorded; launch by launch it can do them.
                log.info(
                    "a step of the search is not recorded: %s: %s", type(error).__name__, error
                )
                memo[full_key] = None
        return memo[full_key]


_REHEARSED: dict[Hashable, list[Thread]] = {}
"""The threads in which steps are rehearsed, or were, by key."""
_REHEARSING = Lock()


@functools.cache
def _aside() -> ThreadPoolExecutor:
    """Return the thread in which prefills are launched ahead."""
    return ThreadPoolExecutor(1, "cpsbs-ahead")


def _is_readable(chunks: Chunks) -> bool:
    """Return whether kernels can read this table of chunks."""
    return _fits(chunks.sums.dtype, chunks.length)


def _is_findable(chunks: Chunks, m: int) -> bool:
    """Return whether ``find_head`` can count the chunks, and the members of the m it looks into."""
    count = chunks.maxima[0].numel()
    members = min(m, count) * chunks.length
    return _is_readable(chunks) and max(count, members) < MOST_COUNTED


def _fits(dtype: torch.dtype, length: int) -> bool:
    """Return whether kernels can work on chunks of this length with sums of this dtype."""
    power_of_two = length >= 32 and length & (length - 1) == 0
    return dtype == torch.float32 and power_of_two


class GraphedSearchStep:
    """A step of the search as a CUDA graph: from the model's scores to the next hypotheses."""

    def __init__(
        self,
        step: StepFunction,
        now: StepResult,
        scores: Tensor,
        streams: Streams,
        memory: GraphMemory,
    ) -> None:
        self.now = now
        self.streams = streams.copy()
        self._scores = scores

        def compute() -> None:
            self.now.load(step(self.now.beam, scores, self.streams, self.now))

        self._graph = capture(compute, memory)

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


TRITON = TritonBackend()
"""The Triton backend."""
