"""Where the N weights of a row come from: a tensor, or a model's scores as they are.

The arithmetic needs three things of them: the largest few, some at given places, and all of them
once, block by block. A beam's K·V candidates can give that without ever being written down: their
log-probabilities are the scores of the model plus a number for each parent, and their odds follow
from these on the way.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from functools import cached_property

import torch
from torch import Tensor

NO_DIFFERENCE = -38.0
"""log p below which p and p/(1 − p) are the same number."""


class _Buffers(threading.local):
    """Memory that a thread works in, by device."""

    def __init__(self) -> None:
        self.of: dict[torch.device, Tensor] = {}


_BUFFERS = _Buffers()


def working_memory(size: int, device: torch.device) -> Tensor:
    """[size] float64 to scribble on until the next call in this thread.

    On a CPU it is kept: memory that is asked for anew is mapped page by page when it is first
    written to, which takes as long as the arithmetic that is done in it.
    """
    buffer = _BUFFERS.of.get(device)
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(False):
            buffer = torch.empty(size, dtype=torch.float64, device=device)
        if device.type == "cpu":
            _BUFFERS.of[device] = buffer
    return buffer[:size]


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
    def fill(self, rows: slice, left: int, unit: Tensor, out: Tensor, scratch: Tensor) -> None:
        """Write e^{log w − unit} of these rows, from column ``left`` on, into ``out`` [r, c].

        ``unit`` [r, 1]; ``scratch`` has the shape of ``out`` and may be overwritten.
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
        values, index = largest_by_chunks(self._x[:, None, :], None, m)
        return values.to(torch.float64), index

    def fill(self, rows: slice, left: int, unit: Tensor, out: Tensor, scratch: Tensor) -> None:
        """exp(x − unit)."""
        out.copy_(self._x[rows, left : left + out.shape[1]]).sub_(unit).exp_()


class CandidateWeights(Weights):
    """Weights of the candidates parent·V + token, with log p = score + offset of the parent.

    Args:
        scores: [R, P, V] in float32 or float64.
        offset: [R, P] float64.
        odds: weights are p/(1 − p), otherwise p.
    """

    def __init__(self, scores: Tensor, offset: Tensor, odds: bool) -> None:
        self._scores, self._offset, self._odds = scores, offset, odds
        rows, parents, tokens = scores.shape
        self.shape = (rows, parents * tokens)
        self.device = scores.device

    @cached_property
    def values(self) -> Tensor:
        """All of them, in float64."""
        return self._weight((self._scores + self._offset[..., None]).flatten(1))

    def take(self, row: Tensor, item: Tensor) -> Tensor:
        """By indexing both parts."""
        parent = item // self._scores.shape[-1]
        score = self._scores.flatten(1)[row, item].to(torch.float64)
        return self._weight(score + self._offset[row, parent])

    def largest(self, m: int) -> tuple[Tensor, Tensor]:
        """The weights are in the order of the probabilities."""
        values, index = largest_by_chunks(self._scores, self._offset, m)
        return self._weight(values), index

    def fill(self, rows: slice, left: int, unit: Tensor, out: Tensor, scratch: Tensor) -> None:
        """exp(score + (offset − unit)), parent by parent; p/(1 − p) of it, W = e^unit apart."""
        tokens = self._scores.shape[-1]
        width, right = out.shape[1], left + out.shape[1]
        shift = self._offset[rows] - unit
        # Whole parents at once, and what is cut at either end by itself.
        first, last = -(-left // tokens), right // tokens
        if first < last:
            whole = out[:, first * tokens - left : last * tokens - left]
            whole = whole.view(len(out), last - first, tokens)
            whole.copy_(self._scores[rows, first:last]).add_(shift[:, first:last, None])
        ends = [(left, min(first * tokens, right)), (max(last * tokens, left), right)]
        if first > last:
            ends = [(left, right)]
        for start, stop in ends:
            if start < stop:
                parent, column = start // tokens, start % tokens
                part = out[:, start - left : stop - left]
                part.copy_(self._scores[rows, parent, column : column + stop - start])
                part.add_(shift[:, parent, None])
        out.exp_()
        if self._odds and float(unit.max()) > NO_DIFFERENCE:
            torch.mul(out, -unit.exp(), out=scratch[:, :width]).add_(1.0)
            out.div_(scratch[:, :width])

    def _weight(self, log_p: Tensor) -> Tensor:
        log_p = log_p.clamp(max=0.0)
        return log_odds(log_p) if self._odds else log_p


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
        """The item comes first; so it is always in the head, and never in what ``fill`` is for."""
        values, index = self._weights.largest(m)
        here = index == self._item
        # It leaves its place, or drives out the last one.
        place = torch.where(here.any(-1), here.int().argmax(-1), m - 1)[:, None]
        order = torch.arange(m, device=index.device).expand_as(index)
        order = torch.where(order <= place, (order - 1).clamp(min=0), order)
        values, index = values.gather(-1, order), index.gather(-1, order)
        index[:, :1] = self._item
        return values.index_fill_(-1, order.new_zeros(1), math.inf), index

    def fill(self, rows: slice, left: int, unit: Tensor, out: Tensor, scratch: Tensor) -> None:
        """As the others do."""
        self._weights.fill(rows, left, unit, out, scratch)


def log_odds(log_p: Tensor) -> Tensor:
    """Log p/(1 − p), accurate at both ends: −expm1(log p) = 1 − p; inf for p = 1.

    p = 1 is set apart so that no gradient meets the infinity.
    """
    certain = log_p == 0
    uncertain = log_p.masked_fill(certain, -1.0)
    return (uncertain - (-torch.expm1(uncertain)).log()).masked_fill(certain, math.inf)


def chunk_length(n: int, m: int) -> int:
    """About √(n/m), which balances the number of chunks with the size of m of them.

    A multiple of 32, four vectors of float32: torch takes maxima over such chunks several times
    faster than over others.
    """
    return 32 * max(1, round(math.sqrt(n / max(m, 1)) / 32))


def largest_by_chunks(x: Tensor, offset: Tensor | None, m: int) -> tuple[Tensor, Tensor]:
    """The m largest of x [R, P, V] + offset [R, P] in each row, descending, with places in P·V.

    They lie in the m chunks with the largest maxima (any other chunk has m entries elsewhere that
    are at least as large), so one fast pass that takes maxima replaces the slow one that torch.topk
    makes over all of x.
    """
    rows, parents, tokens = x.shape
    n = parents * tokens
    chunk = chunk_length(n, m)
    if m == n or parents * (tokens // chunk) < m:
        total = x.flatten(1) if offset is None else (x + offset[..., None]).flatten(1)
        values, index = total.topk(m, dim=-1)
        return values, index
    whole = tokens - tokens % chunk
    chunks = whole // chunk
    maxima = x[..., :whole].reshape(rows, parents, chunks, chunk).amax(-1)
    if offset is not None:
        maxima = maxima + offset[..., None]
    maxima = maxima.flatten(1)
    chosen = maxima.topk(m, dim=-1, sorted=False).indices
    parent = chosen // chunks
    start = chosen * chunk + parent * (tokens - whole)
    place = (start[..., None] + torch.arange(chunk, device=x.device)).flatten(1)
    found = x.flatten(1).gather(-1, place)
    if offset is not None:
        found = (found.view(rows, m, chunk) + offset.gather(-1, parent)[..., None]).flatten(1)
    if whole < tokens:
        rest = x[..., whole:] if offset is None else x[..., whole:] + offset[..., None]
        found = torch.cat([found, rest.flatten(1)], dim=-1)
        rest = torch.arange(parents, device=x.device)[:, None] * tokens
        rest = rest + torch.arange(whole, tokens, device=x.device)
        place = torch.cat([place, rest.flatten().expand(rows, -1)], dim=-1)
    values, position = found.topk(m, dim=-1)
    return values, place.gather(-1, position)
