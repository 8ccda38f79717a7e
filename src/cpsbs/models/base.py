"""The contract between the search and a model: scores of the next token, for rows of prefixes.

A model holds the prefixes itself, because only it knows what to keep of them (a KV cache, say). It
starts with one row for each source. Each step names, for every new row, which of the previous rows
it extends, and by which token. The model may forget rows that no new row extends.

Every model must be a ``SequenceModel``. Six more protocols are optional: ``StoppingModel`` for
models that end a sequence for another reason than its last token, ``FixedRowModel`` for models that
are faster when every source always has K rows, ``TypedRowModel`` for those that tell the dtype of
their scores in advance, ``ForcedModel`` for models that tell the scores of whole sequences at once,
``CompiledModel`` for models whose steps a backend can take, and ``ConcurrentModel`` for models that
several threads may search.
``cpsbs.check_model`` checks whether a model of your own keeps these contracts;
``examples/own_model.py`` is a complete one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cpsbs.backends import Backend
    from cpsbs.backends.base import CompiledDecoder


class SequenceModel(Protocol):
    """A distribution over token sequences for each of one or more sources.

    A source is one input, such as a sentence to translate or a prompt to continue. Rows are in
    the order of their sources. A source starts with one row. Later it may have several, some with
    the same prefix, or none.
    """

    @property
    def sources(self) -> int:
        """The number of sources."""
        ...

    @property
    def vocab_size(self) -> int:
        """V, the size of the vocabulary; the search reads it after ``start``."""
        ...

    @property
    def eos(self) -> int | Sequence[int]:
        """The token, or the tokens, that end a sequence; an empty tuple if no token does."""
        ...

    @property
    def pad(self) -> int:
        """The token that fills up a sequence after its end."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of the scores."""
        ...

    def start(self) -> Tensor:
        """Return [sources, V] scores of the first token; their softmax is its distribution.

        The search calls it once, before any other method. A second call begins anew, or raises a
        ValueError if the model can be searched only once.
        """
        ...

    def advance(self, parent: Tensor, token: Tensor) -> Tensor:
        """Return [rows, V] scores of the next token.

        Args:
            parent: [rows] the previous row that each row extends.
            token: [rows] the token by which each row extends it.
        """
        ...


@runtime_checkable
class StoppingModel(SequenceModel, Protocol):
    """A model that may end a sequence for another reason than its last token."""

    def stops(self, parent: Tensor, token: Tensor) -> Tensor | None:
        """Return [rows] whether each extension ends its sequence, or None if none does.

        The arguments are those of ``advance``, which the search then calls with only the rows that
        go on.
        """
        ...


@runtime_checkable
class ForcedModel(SequenceModel, Protocol):
    """A model that tells the scores of whole sequences at once, through which gradients can go."""

    def force(self, source: Tensor, tokens: Tensor) -> Tensor:
        """Return [n, T, V] the scores of every token of n sequences, given the tokens before it.

        It neither needs ``start`` nor disturbs a search. Scores after the end of a sequence may be
        anything.

        Args:
            source: [n] the source of each sequence, ascending.
            tokens: [n, T] the sequences, padded after their end.
        """
        ...


@runtime_checkable
class FixedRowModel(SequenceModel, Protocol):
    """A model that can keep K rows for every source, even when hypotheses have ended.

    On a GPU that saves host–device synchronisation: the shapes stay the same, so that a step can be
    recorded as a CUDA graph, and sources of other models can take the places of those that have
    ended (continuous batching).
    """

    def fix_rows(self, k: int, steps: int, backend: Backend) -> bool:
        """Give every source K rows, if that is possible, and return whether it was.

        The search asks after ``start``. If the answer is yes, it calls ``step`` instead of
        ``advance``, for at most ``steps`` more tokens. ``backend`` is the one that the search has
        chosen; a model may ask it for ``fixed_steps``.
        """
        ...

    def step(self, parent: Tensor, token: Tensor) -> Tensor:
        """Return [b·K, V] scores of the next token, which the search may overwrite.

        Args:
            parent: [b, K] the row of its source, 0 … K − 1, that each row extends. Before the first
                step these rows are all the same.
            token: [b, K] the token by which each row extends it.
        """
        ...

    def memo(self) -> dict[Any, Any]:
        """Return a dictionary that lives as long as the buffers of ``step``, for recorded steps."""
        ...

    def keep_sources(self, sources: Tensor) -> None:
        """Drop all sources but these [b'], which are given in ascending order."""
        ...

    def admits(self, other: Any) -> bool:
        """Return whether the sources of another model, which has started, can take places here."""
        ...

    def join(self, places: list[int], other: Any) -> None:
        """Let the sources of a model that ``admits`` has accepted take these places."""
        ...

    def retire(self, places: list[int]) -> None:
        """Note that the search no longer needs the sources in these places."""
        ...

    def release(self) -> None:
        """Free the buffers for other models, because the search is over."""
        ...


@runtime_checkable
class CompiledModel(SequenceModel, Protocol):
    """A model whose steps a backend can take by compiled functions, after the first ``advance``."""

    def compiled_steps(self) -> CompiledDecoder | None:
        """Return what a backend needs to take steps by itself; None if it cannot."""
        ...


@runtime_checkable
class TypedRowModel(FixedRowModel, Protocol):
    """A model that tells the dtype of the scores of ``step`` before rows are fixed."""

    @property
    def step_dtype(self) -> torch.dtype:
        """The dtype of the scores that ``step`` will return."""
        ...


@runtime_checkable
class ConcurrentModel(SequenceModel, Protocol):
    """A model that may be searched while other threads search models that share its weights."""

    @property
    def concurrent(self) -> bool:
        """Whether this model may be searched like that."""
        ...


def eos_tokens(model: SequenceModel) -> tuple[int, ...]:
    """Return the tokens that end a sequence of this model, as a tuple."""
    eos = model.eos
    return (eos,) if isinstance(eos, int) else tuple(eos)


def check_model_starts(model: object) -> None:
    """Raise a ValueError that says what to pass instead, if an object is not a model to search."""
    if hasattr(model, "start"):
        return
    instead = "wrap a transformers model as TransformersModel(model, **inputs)"
    if hasattr(model, "sequence_model"):
        instead = "call model.beams(texts), or pass model.sequence_model(texts)"
    raise ValueError(f"model is a {type(model).__name__}, which has no start(); {instead}")


def check_scores(scores: object, rows: int, model: SequenceModel, call: str) -> Tensor:
    """Return the scores, or raise a ValueError if a method of the model must not return them.

    Args:
        scores: what must be [rows, V] floating-point numbers on the model's device.
        rows: the number of rows that were asked for.
        model: the model that returned the scores.
        call: the name of the method that returned them, for the message.
    """
    for fault in score_faults(scores, rows, model, f"model.{call}()"):
        raise ValueError(fault)
    assert isinstance(scores, Tensor)
    return scores


def check_stops(stopped: object, rows: int) -> Tensor | None:
    """Return what ``model.stops()`` returned, or raise a ValueError if it must not return that."""
    if stopped is None:
        return None
    if not isinstance(stopped, Tensor):
        kind = type(stopped).__name__
        raise ValueError(f"model.stops() returned a {kind}; it must return a tensor, or None")
    if stopped.shape != (rows,) or stopped.dtype != torch.bool:
        raise ValueError(
            f"model.stops() returned {list(stopped.shape)} of {stopped.dtype}; it must return "
            f"booleans [rows] = [{rows}], or None"
        )
    return stopped


def score_faults(scores: object, rows: int, model: SequenceModel, whose: str) -> Iterator[str]:
    """Yield a sentence for every fault of the scores that shows without reading their values.

    Reading those would synchronise the host with the GPU. ``whose`` names what returned the scores.
    """
    if not isinstance(scores, Tensor):
        kind = type(scores).__name__
        yield f"{whose} returned a {kind}; it must return a tensor of scores"
        return
    if scores.shape != (rows, model.vocab_size):
        yield (
            f"{whose} returned the shape {list(scores.shape)}; "
            f"it must be [rows, V] = {[rows, model.vocab_size]}"
        )
    if not scores.is_floating_point():
        yield f"{whose} returned scores of {scores.dtype}; they must be floating-point numbers"
    expected = torch.device(model.device)
    if scores.device.type != expected.type or expected.index not in (None, scores.device.index):
        yield f"{whose} returned scores on {scores.device}; model.device is {expected}"
