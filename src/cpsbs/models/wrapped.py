"""A model around another one, which it asks for everything that it does not do itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cpsbs.models.base import SequenceModel, StoppingModel, check_stops


class WrappedModel:
    """The base of models that change what another model says, and nothing else.

    Args:
        model: the model inside.
    """

    def __init__(self, model: SequenceModel) -> None:
        self._model = model
        self._stopping = model if isinstance(model, StoppingModel) else None

    @property
    def name(self) -> str:
        """The name of the model inside, for the labels of results."""
        return getattr(self._model, "name", type(self._model).__name__)

    @property
    def sources(self) -> int:
        """The number of sources."""
        return self._model.sources

    @property
    def vocab_size(self) -> int:
        """V, the size of the vocabulary."""
        return self._model.vocab_size

    @property
    def eos(self) -> int | Sequence[int]:
        """The token, or the tokens, that end a sequence."""
        return self._model.eos

    @property
    def pad(self) -> int:
        """The token that fills up a sequence after its end."""
        return self._model.pad

    @property
    def device(self) -> torch.device:
        """The device of the scores."""
        return self._model.device

    def start(self) -> Tensor:
        """Return the scores [sources, V] of the first token."""
        return self._model.start()

    def stops(self, parent: Tensor, token: Tensor) -> Tensor | None:
        """Return [rows] whether each extension ends its sequence, or None if none does."""
        if self._stopping is None:
            return None
        return check_stops(self._stopping.stops(parent, token), len(parent))

    def advance(self, parent: Tensor, token: Tensor) -> Tensor:
        """Return the scores [rows, V] of the next token."""
        return self._model.advance(parent, token)
