"""What the search needs of a model: scores of the next token, for rows of prefixes.

A model holds the prefixes itself, because only it knows what to keep of them (a key-value cache,
say). It starts with one row for each source; each step names, for every new row, which of the rows
before it extends, and by which token. Rows that nobody extends are forgotten.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class SequenceModel(Protocol):
    """A distribution over token sequences for each of some sources.

    A model may also have

    - ``stops(parent, token)``, which says [rows] which extensions end there for another reason than
      their token, or returns None;
    - ``fix_rows(k, steps)``: whether after ``start`` every source can have K rows, whose
      hypotheses may have ended, for so many more tokens. Then ``step(parent, token)`` takes the
      place of ``advance``, ``keep_sources(sources)`` drops the others, ``memo`` is a dictionary
      that is kept as long as the buffers that ``step`` returns, and, if there are such methods,
      ``admits(model)`` says whether the sources of another model can take places of its sources,
      which ``join(places, model)`` does, ``rest(places)`` tells that sources are not asked for any
      more, and ``release()`` that none are. See ``TransformersModel``.
    """

    sources: int
    """How many."""
    vocab_size: int
    """V."""
    eos: tuple[int, ...]
    """The tokens that end a sequence."""
    pad: int
    """What stands behind the end of a sequence."""
    device: torch.device
    """Where the scores are."""

    def start(self) -> Tensor:
        """[sources, V] scores of the first token; their softmax is its distribution."""
        ...

    def advance(self, parent: Tensor, token: Tensor) -> Tensor:
        """[rows, V] scores of the next token, for row ``parent[i]`` extended by ``token[i]``."""
        ...


def check_scores(scores: object, rows: int, model: SequenceModel, call: str) -> Tensor:
    """Return the scores if they are what ``model.start()`` or ``model.advance()`` must return.

    Args:
        scores: [rows, V] in floating point, on the model's device.
        rows: how many rows were asked for.
        model: whose they are.
        call: the method that returned them, for the message.
    """
    if not isinstance(scores, Tensor):
        raise ValueError(
            f"model.{call}() returned a {type(scores).__name__}; it must return a tensor of scores"
        )
    if scores.shape != (rows, model.vocab_size):
        raise ValueError(
            f"model.{call}() returned the shape {list(scores.shape)}; "
            f"it must be [rows, V] = {[rows, model.vocab_size]}"
        )
    if not scores.is_floating_point():
        raise ValueError(
            f"model.{call}() returned scores of {scores.dtype}; they must be floating-point numbers"
        )
    expected = torch.device(model.device)
    if scores.device.type != expected.type or expected.index not in (None, scores.device.index):
        raise ValueError(
            f"model.{call}() returned scores on {scores.device}; model.device is {expected}"
        )
    return scores
