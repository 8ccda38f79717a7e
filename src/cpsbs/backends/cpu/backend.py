"""The backend for CPUs: compiled loops take over what would take torch many calls.

They read float32 scores; whatever else there is, or where there is no C compiler, is left to torch.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpsbs.backends.base import MOST_DRAWN, Backend, CompiledDecoder, StepPlan, StepsTaken
from cpsbs.backends.cpu.compiled import MOST_SORTED, MOST_TERMS, address, library

if TYPE_CHECKING:
    from cpsbs.conditional_poisson.weights import Weights
    from cpsbs.randomness import Streams
    from cpsbs.scores.candidates import Candidates, Selection
    from cpsbs.scores.reading import Chunks, Largest


class CompiledBackend(Backend):
    """Does in compiled loops what would take torch many calls, and leaves the rest to torch."""

    name = "cpu"

    def read_into(
        self, rows: Tensor, temperature: float, length: int, maxima: Tensor, sums: Tensor
    ) -> bool:
        """Fill the maxima [n, C] and power sums [J, n, C] of the chunks of scores [n, V]."""
        compiled = library()
        fits = rows.dtype == torch.float32 and len(sums) <= MOST_TERMS
        if compiled is None or not fits:
            return False
        sizes = (*rows.shape, length, len(sums))
        compiled.read_scores(address(rows), *sizes, 1 / temperature, address(maxima), address(sums))
        return True

    def normalize(self, chunks: Chunks, log_prob: Tensor) -> tuple[Tensor, Tensor] | None:
        """Add up the chunks of every row in float64."""
        from cpsbs.backends.cpu.tables import scores_of

        compiled = library()
        scores = None if compiled is None else scores_of(chunks, None)
        if compiled is None or scores is None:
            return None
        total, offset = torch.empty((2, *log_prob.shape), dtype=torch.float64, device="cpu")
        log_prob = log_prob.contiguous()  # under a name, so that a copy lives until it is read
        given = [address(x) for x in (log_prob, total, offset)]
        compiled.normalize(ctypes.addressof(scores), *given)
        return total, offset

    def find_largest(self, chunks: Chunks, offset: Tensor, m: int) -> Largest | None:
        """Find the largest candidates in the chunks with the largest maxima."""
        from cpsbs.backends.cpu.tables import scores_of
        from cpsbs.scores.reading import Largest

        compiled = library()
        # The offset may come from a design of the user's.
        fits = offset.dtype == torch.float64 and offset.shape == chunks.shape[:2]
        scores = scores_of(chunks, offset) if compiled is not None and fits else None
        if compiled is None or scores is None or m > MOST_SORTED:
            return None
        shape = (chunks.shape[0], m)
        value, index = (
            torch.empty(shape, dtype=torch.float64, device="cpu"),
            torch.empty(shape, dtype=torch.int64, device="cpu"),
        )
        found = compiled.find_largest(ctypes.addressof(scores), m, address(value), address(index))
        return Largest(value, index) if found else None

    def draw_conditional_poisson(
        self, weights: Weights, k: int, streams: Streams
    ) -> Selection | None:
        """Draw a sample for each source, if all sources are ordinary ones."""
        from cpsbs.backends.cpu import poisson
        from cpsbs.conditional_poisson.weights import CandidateWeights

        compiled = library()
        if compiled is None or not isinstance(weights, CandidateWeights):
            return None
        return poisson.draw(compiled, weights, k, streams)

    def draw_stratified(
        self, candidates: Candidates, k: int, streams: Streams, full_share: float, forbidden: float
    ) -> Selection | None:
        """Draw with the random numbers of the reference, if all sources are ordinary ones."""
        from cpsbs.backends.cpu import stratified

        compiled = library()
        if compiled is None or k > MOST_DRAWN:
            return None
        return stratified.draw(compiled, candidates, k, streams, full_share)

    def extends(self, candidates: Candidates, selection: Selection) -> bool:
        """Return whether compiled functions can read these scores and what a design returned."""
        from cpsbs.backends.cpu.extending import readable
        from cpsbs.backends.cpu.tables import scores_of

        if library() is None or scores_of(candidates.chunks, None) is None:
            return False
        return readable(candidates, selection)

    def extend(
        self,
        beam: Any,
        candidates: Candidates,
        selection: Selection,
        eos: Tensor,
        pad: int,
        into: Any,
    ) -> None:
        """Write all that a hypothesis holds in one call."""
        from cpsbs.backends.cpu.extending import extend

        extend(library(), beam, candidates, selection, eos, pad, into)

    def take_steps(
        self,
        plan: StepPlan,
        decoder: CompiledDecoder,
        beam: Any,
        scores: Tensor,
        streams: Streams,
        most: int,
    ) -> StepsTaken | None:
        """Take steps in one call, if the random numbers are those of torch's generators."""
        from cpsbs.backends.cpu import steps

        compiled = library()
        if compiled is None or not steps.can_take(plan, beam.token.shape[0], streams):
            return None
        return steps.take(compiled, plan, decoder, beam, scores, streams, most)


COMPILED = CompiledBackend()
"""The backend for CPUs."""
