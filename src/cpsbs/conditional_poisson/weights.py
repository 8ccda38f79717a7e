"""The N weights of each row: in a tensor, or implied by a model's scores.

The arithmetic needs three things: the largest weights, those of given items, and the power sums
Σ w^j of all the others. A beam's P·V candidates provide that without being materialised: their
log-probabilities are the scores of the model plus a number for each parent, and the
power sums of its chunks come from the one pass over the scores (``cpsbs.scores.reading``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from cpsbs.scores.largest import chunk_length, largest_by_chunks
from cpsbs.scores.memory import block_size, scratch_buffer, shared_arange
from cpsbs.scores.reading import Chunks, Largest

ODDS_EQUAL_PROBABILITY = -38.0
"""log p below which p and p/(1 − p) are the same number."""

TRUNCATION = 1e-13
"""Largest contribution to a logarithm that may be cut off."""

TRUNCATION_32 = 1e-7
"""The same where the power sums are float32 numbers."""

OddsBound = Callable[[Tensor | None, int], Tensor]
"""A bound [R] on the odds of any item of the tail, given the tail's mass [R], or None if it is not
known, and a number of rounds: with more rounds the bound gets closer."""


class Weights(ABC):
    """R rows of N weights, of which a head is kept one by one and a tail as power sums."""

    shape: tuple[int, int]
    """The shape (R, N)."""
    device: torch.device

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """[R, N] all log-weights, materialised."""

    @abstractmethod
    def take(self, row: Tensor, item: Tensor) -> Tensor:
        """Return the float64 log-weights of some items of some rows, whose shapes broadcast."""

    @abstractmethod
    def largest(self, m: int) -> Largest:
        """Return the m largest float64 log-weights of each row, in descending order."""

    @abstractmethod
    def power_sums(
        self, unit: Tensor, head: Largest, k: int, odds: OddsBound
    ) -> tuple[Tensor, Tensor, int]:
        """Return the power sums of all items outside the head, relative to a unit.

        Args:
            unit: [R] a log-weight that no item outside the head exceeds.
            head: what ``largest`` returned.
            k: K.
            odds: a bound on the odds u of every item outside the head.

        Returns:
            [R, J] P_j = Σ e^{j (log w − unit)} for j = 1…J, with J so large that what is cut off,
            Σ_{j > J} P_j u^j/j, does not matter; [R, C] P_1 of each chunk of items; and the length
            of a chunk.
        """

    @abstractmethod
    def members(self, row: Tensor, chunk: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the items [Q, length] of some chunks [Q] of rows [Q], and their log-weights.

        A shorter chunk is filled up with any item of the row, at a log-weight of -inf.
        """


class PlainWeights(Weights):
    """Log-weights [R, N] in a tensor."""

    def __init__(self, log_weights: Tensor) -> None:
        self._x = log_weights
        self.shape = (log_weights.shape[0], log_weights.shape[1])
        self.device = log_weights.device

    @property
    def values(self) -> Tensor:
        """[R, N] the tensor itself."""
        return self._x

    def take(self, row: Tensor, item: Tensor) -> Tensor:
        """Return the float64 log-weights of some items of some rows, whose shapes broadcast."""
        return self._x[row, item].to(torch.float64)

    def largest(self, m: int) -> Largest:
        """Return the m largest, found from the maxima of chunks."""
        values, index = largest_by_chunks(self._x, m)
        return Largest(values.to(torch.float64), index)

    def power_sums(
        self, unit: Tensor, head: Largest, k: int, odds: OddsBound
    ) -> tuple[Tensor, Tensor, int]:
        """Return float64 power sums, from one pass over the weights.

        It goes through blocks that stay in the processor's cache, and writes nothing of the size of
        the weights. A block's first power sum P may lower the bound on the odds: the block expects
        at most K + ½ heads, so that u P/(1 + u) ≤ K + ½.
        """
        chunk = chunk_length(self.shape[1], head.index.shape[-1])
        largest = float(odds(None, 2).max())
        terms, used = terms_needed(k, largest), 1
        rows, n = self.shape
        block = block_size(self.device)
        columns = -(-n // -(-n // block))  # blocks of equal width, of whole chunks
        columns += -columns % chunk
        height = max(1, min(rows, block // columns))
        # One more column takes the zeros for the head's items that are in other blocks.
        memory = scratch_buffer(height * (2 * columns + 1), unit.device)
        power = memory[: height * columns].view(height, columns)
        weight = memory[height * columns :].view(height, columns + 1)
        sums, chunk_sums = [], []
        for top in range(0, rows, height):
            row = slice(top, top + height)
            row_sums, row_chunk_sums = [], []
            for left in range(0, n, columns):
                width = min(columns, n - left)
                padded = width + -width % chunk
                here = unit[row, None]
                w = weight[: len(here)]
                w[:, :width].copy_(self._x[row, left : left + width]).sub_(here).exp_()
                w[:, width:padded] = 0.0
                place = head.index[row] - left
                outside = (place < 0) | (place >= width)
                w.scatter_(-1, place.masked_fill_(outside, columns), 0.0)
                w, p = w[:, :padded], power[: len(here), :padded]
                by_chunk = w.view(len(here), -1, chunk).sum(-1)
                total = by_chunk.sum(-1)
                powers = total.new_zeros((len(here), terms))
                powers[:, 0] = total
                share = (k + 0.5) / max(float(total.min()), k + 1.0)
                here_needed = terms_needed(k, min(largest, share / (1 - share)))
                used = max(used, here_needed)
                for j in range(1, here_needed):
                    torch.mul(w if j == 1 else p, w, out=p)
                    torch.sum(p, -1, out=powers[:, j])
                row_sums.append(powers)
                row_chunk_sums.append(by_chunk)
            sums.append(torch.stack(row_sums).sum(0))
            chunk_sums.append(torch.cat(row_chunk_sums, dim=-1))
        return torch.cat(sums)[:, :used], torch.cat(chunk_sums), chunk

    def members(self, row: Tensor, chunk: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the items [Q, length] of some chunks [Q] of rows [Q], and their log-weights."""
        n = self.shape[1]
        item = (chunk * length)[:, None] + shared_arange(length, chunk.device)
        inside = item < n
        item = item.clamp_(max=n - 1)
        return item, self.take(row[:, None], item).masked_fill_(~inside, -math.inf)


class CandidateWeights(Weights):
    """Weights of the candidates parent·V + token, with log p = score + offset of the parent.

    Args:
        chunks: the scores [R, P, V], as they were read.
        offset: [R, P] float64.
        odds: whether the weights are the odds p/(1 − p); otherwise they are p.
    """

    def __init__(self, chunks: Chunks, offset: Tensor, odds: bool) -> None:
        self.chunks, self.offset, self.odds = chunks, offset, odds
        rows, parents, tokens = chunks.shape
        self.shape = (rows, parents * tokens)
        self.device = chunks.rows.device

    @cached_property
    def values(self) -> Tensor:
        """[R, N] float64, all log-weights."""
        return self._weight((self.chunks.scaled_scores() + self.offset[..., None]).flatten(1))

    def take(self, row: Tensor, item: Tensor) -> Tensor:
        """Return the float64 log-weights of some items of some rows, whose shapes broadcast."""
        parent = item // self.chunks.shape[-1]
        return self._weight(self.chunks.take(row, item) + self.offset[row, parent])

    def largest(self, m: int) -> Largest:
        """Return the m largest, which are the most probable: odds grow with the probability."""
        found = self.chunks.find_largest(self.offset, m)
        return replace(found, values=self._weight(found.values))

    def power_sums(
        self, unit: Tensor, head: Largest, k: int, odds: OddsBound
    ) -> tuple[Tensor, Tensor, int]:
        """Return the power sums, from those of the chunks, which are sums of powers of p.

        With r = p/(1 − p), r^j = Σ_{m ≥ j} C(m − 1, j − 1) p^m. Cut off after p^J, log Π (1 + r z)
        = Σ log(1 + (z − 1) p) − log(1 − p) lacks at most Σ_{m > J} P_m (u + U)^m / m, where
        U = e^unit and P_m ≤ P_J. The scores are read again, for twice as many power sums, until
        that does not matter.
        """
        chunks = self.chunks
        enough = TRUNCATION_32 if chunks.sums.dtype == torch.float32 else TRUNCATION
        differ = self.odds and float(unit.max()) > ODDS_EQUAL_PROBABILITY
        while True:
            terms = len(chunks.sums)
            table = chunks.masses_outside(head, self.offset, unit, terms)
            sums = table.sum(-1).to(torch.float64)

            def lacking(rounds: int, sums: Tensor = sums, terms: int = terms) -> float:
                bound = odds(sums[0], rounds)
                if differ:
                    bound += unit.exp()
                return float((sums[-1] * bound ** (terms + 1) / (1 - bound)).max()) / (terms + 1)

            if lacking(1) <= enough or lacking(4) <= enough:
                break
            if not bool(sums.isfinite().all()):
                raise ValueError(
                    f"the scores reach {float(chunks.maxima.max()):.2g}, beside which float64 "
                    "cannot tell candidates apart; they must be within 1e15 of each other, or -inf"
                )
            chunks = chunks.with_terms(2 * terms)
        sums, masses = sums.T, table[0]
        if differ:
            sums, masses = _odds_from_probabilities(sums, table, unit.exp())
        return sums, masses, self.chunks.length

    def members(self, row: Tensor, chunk: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the items of some chunks [Q] of rows [Q], and their log-weights.

        The chunks, and hence the ``length``, are those in which the scores were read.
        """
        start, below = self.chunks.members(row, chunk)
        parent = start // self.chunks.shape[-1]
        top = self.chunks.peaks.flatten(1)[row, chunk] + self.offset[row, parent]
        item = start[:, None] + shared_arange(below.shape[-1], row.device)
        return item, self._weight(below + top[:, None])

    def _weight(self, log_p: Tensor) -> Tensor:
        log_p = log_p.clamp(max=0.0)
        # No gradient flows here, so p = 1 may simply become inf.
        return log_p - torch.expm1(log_p).neg_().log_() if self.odds else log_p


class WithForcedItem(Weights):
    """Other weights with one item of every row made certain: the design given that it is taken.

    Args:
        weights: the other weights.
        item: [R, 1] the item.
    """

    def __init__(self, weights: Weights, item: Tensor) -> None:
        self._weights, self._item = weights, item
        self.shape, self.device = weights.shape, weights.device

    @property
    def values(self) -> Tensor:
        """[R, N] float64, all log-weights."""
        return self._weights.values.to(torch.float64).scatter(-1, self._item, math.inf)

    def take(self, row: Tensor, item: Tensor) -> Tensor:
        """Return the other weights, and inf for the certain item."""
        value = self._weights.take(row, item)
        return torch.where(item == self._item[row, 0], math.inf, value)

    def largest(self, m: int) -> Largest:
        """Return the certain item, which is always in the head, and the m − 1 largest others."""
        found = self._weights.largest(m)
        here = found.index == self._item
        # The item moves to the front; if it is not among the m largest, the last one drops out.
        place = torch.where(here.any(-1), here.int().argmax(-1), m - 1)[:, None]
        order = torch.arange(m, device=found.index.device).expand_as(found.index)
        order = torch.where(order <= place, (order - 1).clamp(min=0), order)
        values, index = found.values.gather(-1, order), found.index.gather(-1, order)
        index[:, :1] = self._item
        return Largest(values.index_fill_(-1, order.new_zeros(1), math.inf), index)

    def power_sums(
        self, unit: Tensor, head: Largest, k: int, odds: OddsBound
    ) -> tuple[Tensor, Tensor, int]:
        """Return the power sums of the other weights outside this head, which has the item."""
        return self._weights.power_sums(unit, head, k, odds)

    def members(self, row: Tensor, chunk: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the members of the other weights: the certain item is never drawn from a chunk."""
        return self._weights.members(row, chunk, length)


def log_odds(log_p: Tensor) -> Tensor:
    """Return log p/(1 − p), accurate at both ends, as −expm1(log p) = 1 − p; inf for p = 1.

    p = 1 is set apart so that no gradient meets the infinity.
    """
    certain = log_p == 0
    uncertain = log_p.masked_fill(certain, -1.0)
    return (uncertain - (-torch.expm1(uncertain)).log()).masked_fill(certain, math.inf)


def terms_needed(k: int, odds: float) -> int:
    """Return J, the number of power sums for a tail whose largest odds are at most ``odds``.

    There are at least two of them: the second one also measures the spread of the tail.
    """
    terms = 2
    while (k + 0.5) * (1 + odds) * odds**terms > TRUNCATION * (terms + 1) * (1 - odds):
        terms += 1
    return terms


def binomials(terms: int) -> list[list[int]]:
    """Return C(m − 1, j − 1) for j = 1…J down and m = 1…J across.

    These are the coefficients of r^j = Σ_m C(m − 1, j − 1) p^m for the odds r = p/(1 − p).
    """
    return [[math.comb(m, j) for m in range(terms)] for j in range(terms)]


def _odds_from_probabilities(sums: Tensor, table: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Return the power sums of the odds r from those of the probabilities p.

    With U = ``unit`` [R]: [R, J] Σ (r/U)^j from ``sums`` [R, J], which are Σ (p/U)^j; and [R, C]
    Σ r/U of each chunk from ``table`` [J, R, C], which are Σ (p/U)^j of each chunk.
    """
    power = unit[:, None] ** shared_arange(len(table), unit.device)
    mixed = _mixing(len(table), unit.device) * power[:, _distance(len(table), unit.device)]
    by_chunk, largest = table[-1], unit.to(table.dtype)[:, None]
    for mass in reversed(table[:-1].unbind()):
        by_chunk = torch.addcmul(mass, by_chunk, largest)
    return (mixed @ sums[..., None])[..., 0], by_chunk


@lru_cache(maxsize=64)
def _mixing(terms: int, device: torch.device) -> Tensor:
    """Return the binomials [J, J] as a tensor."""
    return torch.tensor(binomials(terms), dtype=torch.float64, device=device)


@lru_cache(maxsize=64)
def _distance(terms: int, device: torch.device) -> Tensor:
    """Return [J, J] m − j for j down and m across, or 0 where that is negative."""
    order = torch.arange(terms, device=device)
    return (order - order[:, None]).clamp_(min=0)
