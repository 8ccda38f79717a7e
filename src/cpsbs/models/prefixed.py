"""A model that goes on from a given prefix: what it says after tokens that are already decided.

    p(y | x) = Π_t p(y_t | x y_<t)

It is a model like any other, so that every search and every design works below a prefix. The
probability of the prefix itself is noted, so that p(x y) = p(x) p(y | x) is known as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cpsbs.models.base import SequenceModel, check_scores, eos_tokens
from cpsbs.models.residual import Process
from cpsbs.models.wrapped import WrappedModel


class PrefixedModel(WrappedModel):
    """What a model says after a prefix, the same one for all of its sources.

    Args:
        model: the model.
        prefix: the tokens that every sequence begins with; none of them ends a sequence.
        process: maps the model's scores to those of the distribution that is searched, by
            temperature and nucleus.
    """

    def __init__(self, model: SequenceModel, prefix: Sequence[int], process: Process) -> None:
        super().__init__(model)
        self._prefix, self._process = list(prefix), process
        self.log_prefix: Tensor | None = None
        """[sources] log p of the prefix, known after ``start``."""

    def start(self) -> Tensor:
        """Return the scores [sources, V] of the first token after the prefix.

        Raises:
            ValueError: if a token is not in the vocabulary, ends a sequence, or cannot occur.
        """
        scores = check_scores(super().start(), self.sources, self._model, "start")
        row = torch.arange(self.sources, device=scores.device)
        log_prefix = torch.zeros(self.sources, dtype=torch.float64, device=scores.device)
        for place, token in enumerate(self._prefix):
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"prefix[{place}] is {token}; it must be a token from 0 to "
                    f"{self.vocab_size - 1}"
                )
            log_prefix += self._process(scores).double().log_softmax(-1)[:, token]
            chosen = torch.full_like(row, token)
            stopped = self.stops(row, chosen)
            if token in eos_tokens(self._model) or (stopped is not None and bool(stopped.any())):
                raise ValueError(
                    f"prefix[{place}] is {token}, which ends the sequence; nothing can follow it"
                )
            if bool((log_prefix == -math.inf).any()):
                raise ValueError(
                    f"prefix[{place}] is {token}, which has no probability there; choose a token "
                    "that the model, its temperature and its nucleus allow"
                )
            scores = self._model.advance(row, chosen)
            scores = check_scores(scores, self.sources, self._model, "advance")
        self.log_prefix = log_prefix
        return scores
