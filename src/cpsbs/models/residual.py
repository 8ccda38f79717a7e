"""A model without the sequences that are held already: what is left of its distribution.

With S the sequences held, and u(x) the share of the mass below the prefix x that S does not hold
(``trie``), the *residual* distribution is p given that the sequence is not in S:

    q(v | x) = p(v | x) u(xv) / u(x) ,      q(y) = p(y) / u(root)  for y not in S, 0 for y in S.

It is a model like any other, so that every search and every design works on it. It never runs into
a dead end: a prefix below which everything is held has no probability.

While it is used, the model notes what u will depend on once more sequences are held: after every
prefix that was evaluated, the probabilities of the tokens that were taken, of the end tokens and of
those that S takes; and the probability of all others together. ``hold`` then adds sequences whose
prefixes were all evaluated, without asking the underlying model again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cpsbs.models.base import SequenceModel, check_scores, eos_tokens
from cpsbs.models.trie import Trie, add_exp
from cpsbs.models.wrapped import WrappedModel

Process = Callable[[Tensor], Tensor]
"""From a model's scores [rows, V] to those of the distribution that is searched, by temperature and
nucleus."""


@dataclass(frozen=True)
class Evaluated:
    """What was noted of the rows of one step."""

    parent: Tensor
    """[rows] the row of the step before that each row extends; empty for the first step."""
    token: Tensor
    """[rows] the token by which it extends it; empty for the first step."""
    keys: Tensor
    """[m] row·V + token of the tokens that are noted one by one, ascending."""
    log_p: Tensor
    """[m] their log-probabilities."""
    log_others: Tensor
    """[rows] the log of the probability of all other tokens together."""
    entropy: Tensor
    """[rows] the entropy of the next token; 0 unless it was asked for."""


class ResidualModel(WrappedModel):
    """What is left of a model's distribution when the sequences of a trie are taken out.

    Args:
        model: the model, which can be started more than once.
        trie: the sequences that are held.
        process: maps the model's scores to those of the distribution that is searched.
        resting: [sources] sources that are not to be searched; they end at once, with one token
            that means nothing. All sources of which nothing is left must rest.
        entropy: whether to note the entropy of the next token.
    """

    def __init__(
        self,
        model: SequenceModel,
        trie: Trie,
        process: Process,
        resting: Tensor | None = None,
        entropy: bool = False,
    ) -> None:
        super().__init__(model)
        self._trie, self._process = trie, process
        self._eos = torch.empty(0, dtype=torch.int64, device=model.device)
        self._resting, self._keeps_entropy = resting, entropy
        self._steps = list[Evaluated]()
        self._node = self._parent = self._token = self._eos
        self._log_p = torch.empty(0, device=model.device)

    def start(self) -> Tensor:
        """Return the scores [sources, V] of the first token."""
        self._steps.clear()
        scores = check_scores(self._model.start(), self.sources, self._model, "start")
        self._trie.vocab_size = scores.shape[-1]
        self._eos = torch.tensor(eos_tokens(self._model), dtype=torch.int64, device=scores.device)
        self._parent = self._token = torch.empty(0, dtype=torch.int64, device=scores.device)
        self._node = torch.arange(self.sources, device=scores.device)
        found = self._residual(scores)
        if self._resting is not None:
            found = found.masked_fill(self._resting[:, None], -math.inf)
            found[:, 0].masked_fill_(self._resting, 0.0)
        return found

    def stops(self, parent: Tensor, token: Tensor) -> Tensor | None:
        """Return [rows] whether each extension ends its sequence, or None if none does.

        This is called once in every step, with all extensions that do not end by their token.
        """
        self._note(parent, token)
        stops = super().stops(parent, token)
        if self._resting is not None and len(self._steps) == 1:
            rests = self._resting[parent]
            stops = rests if stops is None else stops | rests
        return stops

    def advance(self, parent: Tensor, token: Tensor) -> Tensor:
        """Return the scores [rows, V] of the next token."""
        self._parent, self._token = parent, token
        self._node = self._trie.children(self._node[parent], token)
        scores = self._model.advance(parent, token)
        return self._residual(check_scores(scores, len(parent), self._model, "advance"))

    def follow(self, source: Tensor, sequences: Tensor, lengths: Tensor) -> None:
        """Evaluate all prefixes of given sequences, one row for each (teacher forcing).

        The model must have started, and not have advanced.

        Args:
            source: [s] the source of each sequence, ascending.
            sequences: [s, T] their tokens.
            lengths: [s] their numbers of tokens, at least 1.
        """
        row = source
        for t in range(sequences.shape[-1]):
            on = lengths > t
            self._note(row[on], sequences[on, t])
            on = lengths > t + 1
            if not bool(on.any()):
                return
            # One row for each prefix; parents ascend, so that the rows stay in source order.
            key, place = torch.unique(
                row[on] * self.vocab_size + sequences[on, t], return_inverse=True
            )
            self.advance(key // self.vocab_size, key % self.vocab_size)
            row = torch.full_like(row, -1).masked_scatter(on, place)

    def hold(self, source: Tensor, sequences: Tensor, lengths: Tensor) -> Tensor:
        """Add sequences to the trie, and return [s, T] the node of every prefix, -1 after the end.

        All of their prefixes must have been evaluated since ``start``, by a search that has found
        them or by ``follow``.

        Args:
            source: [s] the source of each sequence.
            sequences: [s, T] their tokens.
            lengths: [s] their numbers of tokens, at least 1.
        """
        trie = self._trie
        path = trie.insert(source, sequences, lengths)
        node = torch.arange(self.sources, device=path.device)
        for step in self._steps:
            if len(step.parent):
                node = trie.children(node[step.parent], step.token)
            self._learn(step, node)
        trie.settle(path)
        return path

    def _residual(self, scores: Tensor) -> Tensor:
        """Return the scores [rows, V] of the residual distribution, and keep those of p."""
        self._log_p = self._process(scores)
        place, child = self._trie.edges(self._node)
        if not len(place):
            return self._log_p
        found = self._log_p.to(torch.float64, copy=True)
        found[place, self._trie.token[child]] += self._trie.log_left[child]
        return found

    def _note(self, parent: Tensor, token: Tensor) -> None:
        """Note what u may depend on, given the extensions that were selected in this step."""
        rows, tokens = self._log_p.shape
        log_p = self._log_p.to(torch.float64).log_softmax(-1)
        place, child = self._trie.edges(self._node)
        every = torch.arange(rows, device=log_p.device)[:, None]
        keys = torch.unique(
            torch.cat(
                [
                    parent * tokens + token,
                    (every * tokens + self._eos).flatten(),
                    place * tokens + self._trie.token[child],
                ]
            )
        )
        entropy = log_p.new_zeros(rows)
        if self._keeps_entropy:
            entropy = torch.special.entr(log_p.exp()).sum(-1)
        flat = log_p.view(-1)
        known = flat[keys]
        flat[keys] = -math.inf
        self._steps.append(
            Evaluated(self._parent, self._token, keys, known, log_p.logsumexp(-1), entropy)
        )

    def _learn(self, step: Evaluated, node: Tensor) -> None:
        """Write into the trie what is known of the nodes [rows] of a step's rows; -1: no node."""
        trie, tokens = self._trie, self._trie.vocab_size
        row, child = trie.edges(node)
        at = torch.searchsorted(step.keys, row * tokens + trie.token[child])
        trie.log_p[child] = step.log_p[at]
        # What was noted by itself and is not in the trie goes back to the others.
        rest = step.log_p.index_fill(0, at, -math.inf)
        log_others = add_exp(step.log_others, step.keys // tokens, rest)
        on = node >= 0
        trie.log_others[node[on]] = log_others[on]
        trie.entropy[node[on]] = step.entropy[on]
