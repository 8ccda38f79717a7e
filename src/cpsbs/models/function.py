"""Any Python function from prefixes to log-probabilities, as a model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class FunctionModel:
    """A function that scores the next token.

    Args:
        next_log_probs: maps prefixes [rows, t] to log-probabilities [rows, V] of the next token (or
            any scores whose softmax is meant). If it takes a second argument by the name of
            ``source``, it also gets the number of each row's source, [rows].
        vocab_size: V.
        eos: the token, or the tokens, that end a sequence.
        sources: how many inputs there are.
        device: where the prefixes are put.
    """

    def __init__(
        self,
        next_log_probs: Callable[..., Tensor],
        vocab_size: int,
        eos: int | tuple[int, ...],
        sources: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.eos = (eos,) if isinstance(eos, int) else tuple(eos)
        wrong = [token for token in self.eos if not 0 <= token < vocab_size]
        if wrong or not self.eos:
            raise ValueError(f"eos is {eos}; allowed are 0 to V - 1 = {vocab_size - 1}")
        self.vocab_size, self.sources, self.pad = vocab_size, sources, self.eos[0]
        self.device = torch.device(device)
        self._function = next_log_probs
        code = getattr(next_log_probs, "__code__", None)
        self._wants_source = code is not None and "source" in code.co_varnames[: code.co_argcount]
        self._prefix = self._source = torch.empty(0, device=self.device)

    def start(self) -> Tensor:
        """The scores after the empty prefix."""
        self._source = torch.arange(self.sources, device=self.device)
        self._prefix = torch.empty((self.sources, 0), dtype=torch.int64, device=self.device)
        return self._scores()

    def advance(self, parent: Tensor, token: Tensor) -> Tensor:
        """The scores after these prefixes."""
        self._source = self._source[parent]
        self._prefix = torch.cat([self._prefix[parent], token[:, None]], dim=-1)
        return self._scores()

    def _scores(self) -> Tensor:
        extra = {"source": self._source} if self._wants_source else {}
        scores = self._function(self._prefix, **extra)
        wanted = (len(self._prefix), self.vocab_size)
        if scores.shape != wanted:
            raise ValueError(
                f"next_log_probs returned the shape {list(scores.shape)}; "
                f"it must be [rows, V] = {list(wanted)}"
            )
        return scores
