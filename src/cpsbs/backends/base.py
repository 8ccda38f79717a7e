"""The one seam for devices: what a backend may do in place of the reference.

The arithmetic of a search is written in torch, where it belongs: reading the scores in ``scores``,
sampling in ``conditional_poisson`` and ``designs``, extending hypotheses in ``search``. That is the
reference, and it runs on every device. A backend may do some of it with kernels of its own. The
search asks the backend first, and falls back on the reference where the answer is None or False;
``Backend`` itself always answers so. A backend is chosen once for a search (``backend_for``) and
passed along; no other code asks for the device to decide on kernels or CUDA graphs. Only the steps
that run a model's layers on a CPU (``models.transformers.direct``) call its compiled functions
themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from torch import Tensor

    from cpsbs.conditional_poisson.weights import Weights
    from cpsbs.randomness import Counters, Streams
    from cpsbs.scores.candidates import Candidates, Selection
    from cpsbs.scores.reading import Chunks, Largest


MOST_DRAWN = 256
"""Largest K for which a backend draws a sample without host–device synchronisation: a kernel holds
the ``head_size(K)`` largest candidates in registers, for conditional Poisson sampling."""


class FixedSteps(Protocol):
    """Decoding steps of a transformers model on buffers of fixed shapes, K rows for every source.

    ``inputs`` are always what the model has after the prefill, with one row for each source: its
    KV cache, masks and encoder states, by the names that the model's ``forward`` gives them.
    """

    k: int
    """K, the number of rows of each source."""

    def step(self, parent: Tensor, token: Tensor) -> Tensor:
        """Return the logits [b·K, V] after one more token; the next step overwrites them.

        Args:
            parent: [b, K] which of its source's rows, 0 … K − 1, each row extends.
            token: [b, K] the token by which it extends it.
        """
        ...

    @property
    def memo(self) -> dict[Any, Any]:
        """A dictionary that lives as long as the buffers do, for recordings on them."""
        ...

    def keep_sources(self, sources: Tensor) -> None:
        """Drop all sources but these [b'], which are given in ascending order."""
        ...

    def retire(self, places: list[int]) -> None:
        """Note that the rows of the sources in these places are no longer read."""
        ...

    def admits(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether other sources of the same model can take places here."""
        ...

    def join(self, places: list[int], inputs: Mapping[str, Any]) -> None:
        """Let other sources, which ``admits`` has accepted, take these places."""
        ...


class OrdinarySteps(Protocol):
    """The model's own steps, with which fixed steps are compared before they are used."""

    vocab_size: int

    def advance(self, parent: Tensor, token: Tensor) -> Tensor:
        """Return the scores [rows, V] of rows ``parent`` [rows] extended by ``token`` [rows]."""
        ...


@dataclass(frozen=True)
class Rule:
    """How a design selects, told to a backend that takes several steps in one call."""

    kind: Literal["largest", "conditional-poisson", "stratified"]
    odds: bool = True
    """For conditional Poisson sampling: whether weights are odds rather than probabilities."""
    full_share: float = 0.0
    """For stratified sampling: a number that the design's arithmetic rests on."""


@dataclass(frozen=True)
class StepPlan:
    """What is the same in all steps of a search, for a backend that takes several in one call."""

    rule: Rule
    k: int
    temperature: float
    vocab_size: int
    chunk_length: int
    """The number of tokens in a chunk of the scores."""
    power_sums: int
    """The number of power sums of the scores."""
    ends: Tensor
    """The tokens that end a sequence."""
    pad: int


@dataclass(frozen=True)
class StepsTaken:
    """What steps in one call of a backend leave behind: m steps that are done, and one that is not.

    The one is either still to be selected, because it is not an ordinary one, or it is selected and
    the search is to do what comes after that.
    """

    parents: Tensor
    """[m, b, K] which of the previous hypotheses each one extends."""
    tokens: Tensor
    """[m, b, K] the tokens by which they do."""
    trace: Tensor | None
    """[m, b, K, n] what the design keeps for every step."""
    beam: Any
    """The hypotheses after the last step that was selected."""
    parent: Tensor | None
    """[b, K] the parents in the step that is selected; None if it is still to be selected."""
    scores: Tensor
    """[n, V] of the model's rows."""
    row: Tensor
    """[b, K] the row of each hypothesis that was offered last, n for one that has ended."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """How long each part of the steps took, by its name; benchmarks read it."""


class CompiledDecoder(Protocol):
    """A decoder with its KV cache, which compiled functions can run by themselves."""

    @property
    def multiplications(self) -> int:
        """How many multiplications a row takes in the next step."""
        ...

    def suits(self, rows: int) -> bool:
        """Return whether one thread is the best for steps of so many rows."""
        ...

    def begin(self, rows: int, steps: int) -> tuple[int, int, int]:
        """Make room for steps of at most so many rows.

        Returns:
            The addresses of the decoder, the cache and scratch memory, for compiled functions.
        """
        ...

    def room_for_scores(self, rows: int) -> Tensor:
        """Return [rows, V] memory for scores, which the next call may reuse."""
        ...

    def end(self, rows: int) -> None:
        """Take over the cache as compiled functions have left it, with this many rows."""
        ...


class Backend:
    """The reference backend, which leaves everything to torch."""

    name = "torch"
    counts_random_numbers = False
    """Whether random numbers come from counters on the device, which a CUDA graph can advance."""

    def chunk_length(self, least: int, parents: int, tokens: int, terms: int) -> int:
        """Return the number of tokens in a chunk: at least ``least``, unless a row has fewer.

        A multiple of 64 suits torch's softmax. ``terms`` is the number of power sums.
        """
        return min(tokens, 64 * -(-least // 64))

    def power_sums(self, wanted: int) -> int:
        """Return how many power sums to collect where a design wants ``wanted``."""
        return wanted

    def read_into(
        self, rows: Tensor, temperature: float, length: int, maxima: Tensor, sums: Tensor
    ) -> bool:
        """Fill the maxima [n, C] and power sums [J, n, C] of the chunks of scores [n, V]."""
        return False

    def normalize(self, chunks: Chunks, log_prob: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return log Σ exp(score) [R, P], and the parents' log-probabilities [R, P] minus it."""
        return None

    def find_largest(self, chunks: Chunks, offset: Tensor, m: int) -> Largest | None:
        """Return the m candidates of each source with the largest score + offset [R, P]."""
        return None

    def draw_conditional_poisson(
        self, weights: Weights, k: int, streams: Streams
    ) -> Selection | None:
        """Draw a conditional Poisson sample for each source, with its inclusion probabilities."""
        return None

    def select_gumbel_top_k(
        self, candidates: Candidates, k: int, streams: Streams
    ) -> Selection | None:
        """Select the K candidates of each source with the largest perturbed log-probabilities."""
        return None

    def draw_stratified(
        self, candidates: Candidates, k: int, streams: Streams, full_share: float, forbidden: float
    ) -> Selection | None:
        """Draw K candidates of each source by ``stratified``, which has more than K in all.

        ``full_share`` and ``forbidden`` are numbers that the design's arithmetic rests on.
        """
        return None

    def extends(self, candidates: Candidates, selection: Selection) -> bool:
        """Return whether ``extend`` can extend these candidates' parents by what was selected."""
        return False

    def extend(
        self,
        beam: Any,
        candidates: Candidates,
        selection: Selection,
        eos: Tensor,
        pad: int,
        into: Any,
    ) -> None:
        """Write the selected hypotheses into ``into``.

        On a GPU, where steps are recorded on fixed buffers, ``into`` may hold ``beam`` itself.
        """

    def take_steps(
        self,
        plan: StepPlan,
        decoder: CompiledDecoder,
        beam: Any,
        scores: Tensor,
        streams: Streams,
        most: int,
    ) -> StepsTaken | None:
        """Take up to ``most`` steps of a search, in which no source ends, and begin another one.

        Args:
            plan: what is the same in all steps.
            decoder: computes the scores of the next tokens.
            beam: the hypotheses to extend.
            scores: [n, V] those of the first step, for the hypotheses that are open.
            streams: the random numbers of the sources.
            most: the most steps.
        """
        return None

    def close(self, scores: Tensor, present: Tensor, finished: Tensor) -> bool:
        """Overwrite the scores of hypotheses that have ended, so that they offer token 0 alone."""
        return False

    def uniform(self, counters: Counters, row: Tensor, size: tuple[int, ...]) -> Tensor:
        """Return float64 numbers [A, *size] in [0, 1) for the rows [A], and advance the counters.

        Only backends that count random numbers are asked.
        """
        raise NotImplementedError(f"the backend {self.name!r} does not count random numbers")

    def fixed_steps(
        self,
        model: Any,
        inputs: Callable[[], Mapping[str, Any]],
        k: int,
        steps: int,
        reference: Callable[[], OrdinarySteps],
    ) -> FixedSteps | None:
        """Return steps of fixed shape that continue the prefill of a transformers model.

        Args:
            model: the transformers model.
            inputs: returns what ``FixedSteps`` describes, which may take a prefill. It is left as
                it is.
            k: K, the rows of each source from here on.
            steps: the most tokens that will be added.
            reference: returns the model's ordinary steps, which start from the same inputs.
        """
        return None

    def sources_that_fit(self, model: Any, k: int, prompt: int, steps: int) -> int | None:
        """Return how many sources a device's memory has room for, or None if that is not known.

        Args:
            model: the transformers model.
            k: K.
            prompt: the most tokens of a prompt, or of a source to translate.
            steps: the most tokens that will be added.
        """
        return None

    def compute_ahead(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Begin to compute something, and return a function that returns it, or raises its error.

        A backend may do so in another thread, while this one keeps the device busy. This one
        computes it now.
        """
        found = compute()
        return lambda: found

    def rehearse(
        self, key: Hashable, steps: Sequence[Callable[[], Callable[[], None]]]
    ) -> Callable[[], None]:
        """Call functions in threads of their own, so that what they need is compiled.

        Args:
            key: identifies what the functions do; a backend calls them once for each key.
            steps: functions that make preparations and return the functions to call, which touch
                nothing that others use and may be called several times.

        Returns:
            A function that waits until all have returned. This backend compiles nothing, and calls
            none of them.
        """
        return lambda: None

    def release(self) -> int:
        """Free the memory that is kept for later searches; return how many bytes that were."""
        return 0

    def record(
        self,
        step: Callable[..., Any],
        key: Hashable,
        now: Callable[[], Any],
        scores: Tensor,
        streams: Streams,
        memo: dict[Any, Any],
    ) -> Any | None:
        """Return the search's step as a graph that was recorded under this key, now or earlier.

        Args:
            step: maps hypotheses, scores, random streams and a result to write into to the result.
            key: identifies what the step does, so that only equal steps share a recording.
            now: makes the result, whose buffers the graph reads and writes.
            scores: [rows, V] the buffer that the model's steps leave their scores in.
            streams: the random streams, of which the graph advances a copy.
            memo: where recordings are kept as long as the model's buffers live.
        """
        return None


TORCH = Backend()
"""The reference backend."""
