"""What the search asks of a model: scores of the next token, for rows of prefixes.

A model holds the prefixes itself, because only it knows what to keep of them (a KV cache, say). It
starts with one row for each source. Each step names, for every new row, which of the previous rows
it extends, and by which token. The model may forget rows that no new row extends.

``SequenceModel`` is all that a model must have. Two more protocols are optional: ``StoppingModel``
for models that end a sequence for another reason than its last token, and ``FixedRowModel`` for
models that are faster when every source always has K rows. ``cpsbs.check_model`` tells whether a
model of your own keeps these contracts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


class SequenceModel(Protocol):
    """A distribution over token sequences for each of some sources.

    Rows stand in the order of their sources. A source starts with one row and may later have
    several, also with the same prefix, or none any more.
    """

    @property
    def sources(self) -> int:
        """The number of sources."""
        ...

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens; the search reads it after ``start``."""
        ...

    @property
    def eos(self) -> int | Sequence[int]:
        """The token, or the tokens, that end a sequence; an empty tuple if no token does."""
        ...

    @property
    def pad(self) -> int:
        """The token that fills up a sequence behind its end."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of the scores."""
        ...

    def start(self) -> Tensor:
        """Return [sources, V] scores of the first token; their softmax is its distribution.

        The search calls it once, first of all. A second call begins anew, or raises a ValueError
        if the model is good for one search only.
        """
        ...

    def advance(self, parent: Tensor, token: Tensor) -> Tensor:
        """Return [rows, V] scores of the next token.

        Args:
            parent: [rows] which of the previous rows each row extends.
            token: [rows] the token by which it extends it.
        """
        ...


@runtime_checkable
class StoppingModel(SequenceModel, Protocol):
    """A model that may end a sequence for another reason than its last token."""

    def stops(self, parent: Tensor, token: Tensor) -> Tensor | None:
        """Return [rows] whether each extension ends there, or None if none does.

        The search asks before ``advance``, which then gets only the rows that go on.
        """
        ...


@runtime_checkable
class FixedRowModel(SequenceModel, Protocol):
    """A model that can keep K rows for every source, also for hypotheses that have ended.

    On a GPU that saves host–device synchronisation: the shapes stay the same, so that a step can be
    recorded as a CUDA graph, and sources of other models can take the places of those that have
    ended (continuous batching).
    """

    def fix_rows(self, k: int, steps: int) -> bool:
        """Give every source K rows, if that is possible, and return whether it was.

        The search asks after ``start``. If the answer is yes, it calls ``step`` instead of
        ``advance``, for at most ``steps`` more tokens.
        """
        ...

    def step(self, parent: Tensor, token: Tensor) -> Tensor:
        """Return [b·K, V] scores of the next token, which the search may overwrite.

        Args:
            parent: [b, K] which of its source's rows, 0 … K − 1, each row extends. At first these
                rows are all alike.
            token: [b, K] the token by which it extends it.
        """
        ...

    def memo(self) -> dict[Any, Any]:
        """Return a dictionary that lives as long as the buffers that ``step`` returns."""
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

    def rest(self, places: list[int]) -> None:
        """Take note that the search needs the sources in these places no more."""
        ...

    def release(self) -> None:
        """Free the buffers for other models, because the search is over."""
        ...


def eos_tokens(model: SequenceModel) -> tuple[int, ...]:
    """Return the tokens that end a sequence of this model, as a tuple."""
    eos = model.eos
    return (eos,) if isinstance(eos, int) else tuple(eos)


def check_scores(scores: object, rows: int, model: SequenceModel, call: str) -> Tensor:
    """Return the scores if they are what a method of the model must return.

    Args:
        scores: [rows, V] in floating point, on the model's device.
        rows: how many rows were asked for.
        model: the model that returned them.
        call: the name of the method that returned them, for the message.
    """
    for fault in score_faults(scores, rows, model, f"model.{call}()"):
        raise ValueError(fault)
    assert isinstance(scores, Tensor)
    return scores


def check_stops(stopped: object, rows: int) -> Tensor | None:
    """Return what ``model.stops()`` returned, if it is what it must return for so many rows."""
    if stopped is None:
        return None
    if not isinstance(stopped, Tensor):
        kind = type(stopped).__name__
        raise ValueError(f"model.stops() returned a {kind}; it must return a tensor, or None")
    if stopped.shape != (rows,) or stopped.dtype != torch.bool:
        raise ValueError(
            f"model.stops() returned {list(stopped.shape)} of {stopped.dtype}; it must return "
            f"truth values [rows] = [{rows}], or None"
        )
    return stopped


def score_faults(scores: object, rows: int, model: SequenceModel, whose: str) -> Iterator[str]:
    """Yield a sentence for everything about the scores that can be told without reading them.

    Reading them would make a host wait for its GPU. ``whose`` names what returned the scores.
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
