"""Where the N weights of a row come from: a tensor, or a model's scores as they are.

The arithmetic needs three things of them: the largest few, some at given places, and power sums of
all the others. A beam's K·V candidates can give that without ever being written down: their
log-probabilities are the scores of the model plus a number for each parent, and one reading of the
scores (``chunks``) is enough for the sums.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from cpsbs.scores.largest import chunk_length, largest_by_chunks
from cpsbs.scores.memory import block_size, numbers, working_memory
from cpsbs.scores.reading import Chunks, Largest

NO_DIFFERENCE = -38.0
"""log p below which p and p/(1 − p) are the same number."""

TRUNCATION = 1e-13
"""Largest contribution to a logarithm that may be cut off."""

TRUNCATION_32 = 1e-7
"""The same where the sums are of float32 numbers."""

Bound = Callable[[Tensor | None, int], Tensor]
"""[R] the largest odds that an item of the tail may have, given its mass [R] or nothing; a bound
that gets closer with the number of rounds."""


class Weights(ABC):
    """R rows of N weights."""

    shape: tuple[int, int]
    """(R, N)."""
    device: torch.device

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """[R, N] all log-weights, written down."""

    @abstractmethod
    def take(self, row: Tensor, item: Tensor) -> Tensor:
        """Log-weights in float64 of these places, given by tensors of one (broadcast) shape."""

    @abstractmethod
    def largest(self, m: int) -> tuple[Tensor, Tensor]:
        """[R, m] the largest log-weights in float64, descending, and their places."""

    @abstractmethod
    def power_sums(
        self, unit: Tensor, excluded: Tensor, k: int, odds: Bound, own_head: bool = True
    ) -> tuple[Tensor, Tensor, int]:
        """[R, J] Σ e^{j (log w − unit)} for j = 1…J, and for j = 1 by chunks [R, C] of some length.

        ``unit`` is [R]. The items ``excluded`` [R, M], ascending, do not count; all others are at
        most the unit. With ``own_head`` they are what ``largest`` returned last. J is so large that
        Σ_{j > J} P_j u^j / j does not matter.
        """

    @abstractmethod
    def members(self, row: Tensor, chunk: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """[Q, length] items of the chunks [Q] of rows [Q], with their float64 log-weights.

        Beyond the end of a chunk that is shorter, an item of the row and -inf.
        """


class PlainWeights(Weights):
    """Log-weights [R, N] in a tensor."""

    def __init__(self, log_weights: Tensor) -> None:
        self._x = log_weights
        self.shape = (log_weights.shape[0], log_weights.shape[1])
        self.device = log_weights.device

    @property
    def values(self) -> Tensor:
        """The tensor."""
        return self._x

    def take(self, row: Tensor, item: Tensor) -> Tensor:
        """By indexing."""
        return self._x[row, item].to(torch.float64)

    def largest(self, m: int) -> tuple[Tensor, Tensor]:
        """By ``largest_by_chunks``."""
        values, index = largest_by_chunks(self._x, m)
        return values.to(torch.float64), index

    def power_sums(
        self, unit: Tensor, excluded: Tensor, k: int, odds: Bound, own_head: bool = True
    ) -> tuple[Tensor, Tensor, int]:
        """In float64, in blocks that stay in the processor's cache: the weights are read once and
        nothing of their size is written.

        A block's first power sum P may lower the bound on the odds: the block expects at most
        K + ½ heads, so that u P/(1 + u) ≤ K + ½.
        """
        chunk = chunk_length(self.shape[1], excluded.shape[-1])
        largest = float(odds(None, 2).max())
        terms, used = terms_needed(k, largest), 1
        rows, n = self.shape
        block = block_size(self.device)
        columns = -(-n // -(-n // block))  # blocks of equal width, of whole chunks
        columns += -columns % chunk
        height = max(1, min(rows, block // columns))
        # One column more than needed, to write what is excluded from other blocks to.
        memory = working_memory(height * (2 * columns + 1), unit.device)
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
                place = excluded[row] - left
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
        """By indexing."""
        n = self.shape[1]
        item = (chunk * length)[:, None] + numbers(length, chunk.device)
        inside = item < n
        item = item.clamp_(max=n - 1)
        return item, self.take(row[:, None], item).masked_fill_(~inside, -math.inf)


class CandidateWeights(Weights):
    """Weights of the candidates parent·V + token, with log p = score + offset of the parent.

    Args:
        chunks: scores [R, P, V].
        offset: [R, P] float64.
        odds: weights are p/(1 − p), otherwise p.
    """

    def __init__(self, chunks: Chunks, offset: Tensor, odds: bool) -> None:
        self.chunks, self.offset, self.odds = chunks, offset, odds
        self._head: Largest | None = None
        rows, parents, tokens = chunks.shape
        self.shape = (rows, parents * tokens)
        self.device = chunks.rows.device

    @cached_property
    def values(self) -> Tensor:
        """All of them, in float64."""
        scores = self.chunks.scores.to(torch.float64) / self.chunks.temperature
        return self._weight((scores + self.offset[..., None]).flatten(1))

    def take(self, row: Tensor, item: Tensor) -> Tensor:
        """By indexing both parts."""
        parent = item // self.chunks.shape[-1]
        return self._weight(self.chunks.take(row, item) + self.offset[row, parent])

    def largest(self, m: int) -> tuple[Tensor, Tensor]:
        """The weights are in the order of the probabilities."""
        self._head = self.chunks.find_largest(self.offset, m)
        return self._weight(self._head.values), self._head.index

    def power_sums(
        self, unit: Tensor, excluded: Tensor, k: int, odds: Bound, own_head: bool = True
    ) -> tuple[Tensor, Tensor, int]:
        """From the sums of the chunks, which are of powers of p.

        With r = p/(1 − p), r^j = Σ_{m ≥ j} C(m − 1, j − 1) p^m. Cut off after p^J, log Π (1 + r z)
        = Σ log(1 + (z − 1) p) − log(1 − p) lacks at most Σ_{m > J} P_m (u + U)^m / m, where
        U = e^unit and P_m ≤ P_J.
        """
        chunks = self.chunks
        enough = TRUNCATION_32 if chunks.sums.dtype == torch.float32 else TRUNCATION
        differ = self.odds and float(unit.max()) > NO_DIFFERENCE
        while True:
            terms = len(chunks.sums)
            if own_head and self._head is not None:
                table = chunks.masses_beside(self.offset, unit, self._head, terms)
            else:
                table = chunks.masses(self.offset - unit[:, None], excluded, terms)
            sums = table.sum(-1).to(torch.float64)

            def lacking(rounds: int, sums: Tensor = sums, terms: int = terms) -> float:
                bound = odds(sums[0], rounds)
                if differ:
                    bound += unit.exp()
                return float((sums[-1] * bound ** (terms + 1) / (1 - bound)).max()) / (terms + 1)

            if lacking(1) <= enough or lacking(4) <= enough:
                break
            chunks = chunks.with_terms(2 * terms)
        sums, masses = sums.T, table[0]
        if differ:
            sums, masses = _odds_from_probabilities(sums, table, unit.exp())
        return sums, masses, self.chunks.length

    def members(self, row: Tensor, chunk: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """As the chunks have them."""
        start, below = self.chunks.members(row, chunk)
        parent = start // self.chunks.shape[-1]
        top = self.chunks.peaks.flatten(1)[row, chunk] + self.offset[row, parent]
        item = start[:, None] + numbers(below.shape[-1], row.device)
        return item, self._weight(below + top[:, None])

    def _weight(self, log_p: Tensor) -> Tensor:
        log_p = log_p.clamp(max=0.0)
        # Without regard to gradients: inf where p = 1.
        return log_p - torch.expm1(log_p).neg_().log_() if self.odds else log_p


class WithForcedItem(Weights):
    """Other weights, with one item of every row made certain: the design given that it is in.

    Args:
        weights: the others.
        item: [R, 1]
    """

    def __init__(self, weights: Weights, item: Tensor) -> None:
        self._weights, self._item = weights, item
        self.shape, self.device = weights.shape, weights.device

    @property
    def values(self) -> Tensor:
        """All of them, in float64."""
        return self._weights.values.to(torch.float64).scatter(-1, self._item, math.inf)

    def take(self, row: Tensor, item: Tensor) -> Tensor:
        """As the others have them, but for the item."""
        value = self._weights.take(row, item)
        return torch.where(item == self._item[row, 0], math.inf, value)

    def largest(self, m: int) -> tuple[Tensor, Tensor]:
        """The item comes first; so it is always in the head."""
        values, index = self._weights.largest(m)
        here = index == self._item
        # It leaves its place, or drives out the last one.
        place = torch.where(here.any(-1), here.int().argmax(-1), m - 1)[:, None]
        order = torch.arange(m, device=index.device).expand_as(index)
        order = torch.where(order <= place, (order - 1).clamp(min=0), order)
        values, index = values.gather(-1, order), index.gather(-1, order)
        index[:, :1] = self._item
        return values.index_fill_(-1, order.new_zeros(1), math.inf), index

    def power_sums(
        self, unit: Tensor, excluded: Tensor, k: int, odds: Bound, own_head: bool = True
    ) -> tuple[Tensor, Tensor, int]:
        """As the others have them, outside this head, which has the item in it."""
        return self._weights.power_sums(unit, excluded, k, odds, own_head=False)

    def members(self, row: Tensor, chunk: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """As the others have them: the item is in the head."""
        return self._weights.members(row, chunk, length)


def log_odds(log_p: Tensor) -> Tensor:
    """Log p/(1 − p), accurate at both ends: −expm1(log p) = 1 − p; inf for p = 1.

    p = 1 is set apart so that no gradient meets the infinity.
    """
    certain = log_p == 0
    uncertain = log_p.masked_fill(certain, -1.0)
    return (uncertain - (-torch.expm1(uncertain)).log()).masked_fill(certain, math.inf)


def terms_needed(k: int, odds: float) -> int:
    """J, how many power sums a tail needs whose largest odds are at most this.

    At least two: the second one also measures the spread of the tail.
    """
    terms = 2
    while (k + 0.5) * (1 + odds) * odds**terms > TRUNCATION * (terms + 1) * (1 - odds):
        terms += 1
    return terms


def _odds_from_probabilities(sums: Tensor, table: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """[R, J] Σ (r/U)^j of the odds r from Σ (p/U)^j [R, J], U = ``unit`` [R].

    And for j = 1 by chunks [R, C] from those of p by chunks, ``table`` [J, R, C].
    """
    power = unit[:, None] ** numbers(len(table), unit.device)
    mixed = _mixing(len(table), unit.device) * power[:, _distance(len(table), unit.device)]
    by_chunk, largest = table[-1], unit.to(table.dtype)[:, None]
    for mass in reversed(table[:-1].unbind()):
        by_chunk = torch.addcmul(mass, by_chunk, largest)
    return (mixed @ sums[..., None])[..., 0], by_chunk


@lru_cache(maxsize=64)
def _mixing(terms: int, device: torch.device) -> Tensor:
    """[J, J] C(m − 1, j − 1) for j down and m across."""
    rows = [[math.comb(m, j) for m in range(terms)] for j in range(terms)]
    return torch.tensor(rows, dtype=torch.float64, device=device)


@lru_cache(maxsize=64)
def _distance(terms: int, device: torch.device) -> Tensor:
    """[J, J] m − j, where it is not negative."""
    order = torch.arange(terms, device=device)
    return (order - order[:, None]).clamp_(min=0)
