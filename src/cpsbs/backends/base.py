"""The one seam for the GPU: what a backend may do in the place of the reference.

The arithmetic of a search is written in torch, where it belongs: reading in ``scores``, drawing in
``conditional_poisson`` and ``designs``, extending in ``search``. That is the reference, and it runs
on every device. A backend may do a part of it by kernels of its own. Every method below is asked
before the reference is, and answers None (or False) if the reference is to do it; ``Backend``
itself always answers so. A backend is chosen once for a search (``backend_for``) and passed along
with the scores that were read; nobody else asks what device it is for the sake of kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import Tensor

    from cpsbs.conditional_poisson.weights import Weights
    from cpsbs.randomness import Counters, Streams
    from cpsbs.scores.candidates import Candidates, Selection
    from cpsbs.scores.reading import Chunks, Largest


MOST_DRAWN = 256
"""Largest K for which a backend draws a conditional Poisson sample without a look at it: a kernel
holds the 8 K + 40 largest candidates in registers."""


class Backend:
    """The reference: it leaves everything to torch."""

    name = "torch"
    counts_random_numbers = False
    """Whether random numbers come from counters on the device, which a recorded step can read."""

    def chunk_length(self, least: int, parents: int, tokens: int) -> int:
        """Return how many tokens of a row are read as one chunk, at least as many as ``least``.

        A multiple of 64 suits torch's softmax.
        """
        return min(tokens, 64 * -(-least // 64))

    def power_sums(self, wanted: int) -> int:
        """Return how many power sums to collect where a design wants so many."""
        return wanted

    def read_into(
        self, rows: Tensor, temperature: float, length: int, maxima: Tensor, sums: Tensor
    ) -> bool:
        """Fill the maxima [n, C] and the sums [J, n, C] of chunks of the scores [n, V]."""
        return False

    def normalize(self, chunks: Chunks, log_prob: Tensor) -> tuple[Tensor, Tensor] | None:
        """[R, P] log Σ exp(score), and the log-probabilities [R, P] of the parents less that."""
        return None

    def find_largest(self, chunks: Chunks, offset: Tensor, m: int) -> Largest | None:
        """The m candidates with the largest score + offset [R, P]."""
        return None

    def draw_conditional_poisson(
        self, weights: Weights, k: int, streams: Streams
    ) -> Selection | None:
        """A conditional Poisson sample with its inclusion probabilities."""
        return None

    def select_gumbel_top_k(
        self, candidates: Candidates, k: int, streams: Streams
    ) -> Selection | None:
        """The K candidates with the largest perturbed log-probabilities."""
        return None

    def extend(
        self,
        beam: Any,
        candidates: Candidates,
        selection: Selection,
        eos: Tensor,
        pad: int,
        into: Any,
    ) -> None:
        """Write the hypotheses that were picked into ``into``, which may be ``beam`` itself."""

    def extends(self, candidates: Candidates) -> bool:
        """Return whether ``extend`` will do it."""
        return False

    def close(self, scores: Tensor, present: Tensor, finished: Tensor) -> bool:
        """Let rows of hypotheses that have ended offer token 0 alone, in place."""
        return False

    def uniform(self, counters: Counters, row: Tensor, size: tuple[int, ...]) -> Tensor:
        """[A, *size] float64 in [0, 1) for the rows [A], if random numbers are counted."""
        raise NotImplementedError(f"the backend {self.name} does not count random numbers")

    def record(
        self,
        step: Callable[..., Any],
        key: Hashable,
        now: Callable[[], Any],
        scores: Tensor,
        streams: Streams,
        memo: dict[Any, Any],
    ) -> Any | None:
        """Return a step of the search that was recorded under this key, now or earlier.

        ``now`` makes the buffers that the step reads and writes, and ``memo`` keeps what was
        recorded as long as the buffers of the model.
        """
        return None


TORCH = Backend()
"""The reference backend."""
