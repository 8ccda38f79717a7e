"""A model made of any Python function from prefixes to log-probabilities."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cpsbs.models.base import score_faults


class FunctionModel:
    """A model whose scores of the next token come from a function of the prefix.

    Args:
        next_log_probs: a function from prefixes [rows, t] to log-probabilities [rows, V] of the
            next token, or any scores whose softmax are its probabilities. If it has another
            parameter called ``source``, it is also given the number of each row's source, [rows]. A
            partial that has bound ``source`` keeps what it has bound.
        vocab_size: V, the size of the vocabulary.
        eos: the token, or the tokens, that end a sequence; an empty tuple if no token does.
        sources: the number of sources.
        device: the device of the prefixes and of the scores.
    """

    def __init__(
        self,
        next_log_probs: Callable[..., Tensor],
        vocab_size: int,
        eos: int | Sequence[int],
        sources: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.eos: tuple[int, ...] = (eos,) if isinstance(eos, int) else tuple(eos)
        if any(not 0 <= token < vocab_size for token in self.eos):
            raise ValueError(f"eos is {eos}; it must be in 0 to V - 1 = {vocab_size - 1}")
        self.vocab_size, self.sources = vocab_size, sources
        self.pad = self.eos[0] if self.eos else 0
        self.device = torch.device(device)
        self._function = next_log_probs
        self._takes_source = _takes_source(next_log_probs)
        self._prefix = self._source = torch.empty(0, device=self.device)

    def start(self) -> Tensor:
        """Return the scores after the empty prefix."""
        self._source = torch.arange(self.sources, device=self.device)
        self._prefix = torch.empty((self.sources, 0), dtype=torch.int64, device=self.device)
        return self._scores()

    def advance(self, parent: Tensor, token: Tensor) -> Tensor:
        """Return the scores after these prefixes."""
        self._source = self._source[parent]
        self._prefix = torch.cat([self._prefix[parent], token[:, None]], dim=-1)
        return self._scores()

    def force(self, source: Tensor, tokens: Tensor) -> Tensor:
        """Return [n, T, V] the scores of every token of n sequences; gradients go through it.

        Args:
            source: [n] the source of each sequence.
            tokens: [n, T] the sequences, padded after their end.
        """
        ends = torch.tensor(self.eos, dtype=tokens.dtype, device=tokens.device)
        found = []
        for t in range(tokens.shape[-1]):
            # As in the search, the function is never asked what follows an end.
            goes_on = (~torch.isin(tokens[:, :t], ends).any(-1)).nonzero()[:, 0]
            scores = self._of(tokens[goes_on, :t], source[goes_on])
            nothing = scores.new_zeros((len(tokens), scores.shape[-1]))
            found.append(nothing.index_put((goes_on,), scores))
        return torch.stack(found, dim=1)

    def _scores(self) -> Tensor:
        """Return the checked scores after the current prefixes."""
        return self._of(self._prefix, self._source)

    def _of(self, prefix: Tensor, source: Tensor) -> Tensor:
        """Return the checked scores after these prefixes [n, t]."""
        scores = self._function(prefix, **({"source": source} if self._takes_source else {}))
        for fault in score_faults(scores, len(prefix), self, "next_log_probs"):
            raise ValueError(fault)
        return scores


def _takes_source(function: Callable[..., object]) -> bool:
    """Return whether a function of a prefix has a further parameter called ``source``."""
    if isinstance(function, functools.partial) and "source" in function.keywords:
        return False
    if isinstance(function, torch.nn.Module):
        function = function.forward  # a module's __call__ takes anything
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    # The first parameter, whatever its name, is for the prefix.
    further = list(parameters.values())[1:]
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(p.name == "source" and p.kind in by_name for p in further)
