"""One reading of a model's scores: for each chunk of tokens its maximum, and sums of exponentials.

That is the floor that every design stands on. Which tokens are the most probable, what all of them
weigh together, where a sample falls: each is first answered for chunks, in a table some 50 times
smaller than the scores, and then within the few chunks that matter.

The sums are in the precision of the scores, or float32 where that is less: seven digits, of numbers
that a model knows to no more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from cpsbs.backends.base import TORCH, Backend
from cpsbs.scores.largest import chunk_length, places_of_largest
from cpsbs.scores.memory import block_size, numbers, working_memory

FLOAT32_RANGE = 1000.0
"""Largest difference of log-probabilities for which float32 is good enough. Models that forbid
tokens by a large negative number have larger ones."""


def beam_chunk_length(parents: int, tokens: int, k: int, backend: Backend) -> int:
    """Return how long chunks are for the candidates of a beam of K, of which a head is kept."""
    least = chunk_length(parents * tokens, 8 * k + 40)
    return backend.chunk_length(least, parents, tokens)


@dataclass(frozen=True)
class Largest:
    """The m largest candidates of R sources."""

    values: Tensor
    """[R, m] descending, but for rounding"""
    index: Tensor
    """[R, m]"""
    looked_at: tuple[Tensor, Tensor, Tensor, Tensor] | None
    """The chunks [R, m] that were looked at, their members [R, m, width] relative to a level
    [R, 1], that level, and the places [R, m] of the largest among the m · width members; None if
    it was another set of chunks."""


@dataclass(frozen=True)
class Chunks:
    """Scores [R, P, V] of R sources with P parents each, the tokens cut into C chunks."""

    rows: Tensor
    """[n, V] as the model gives them."""
    row: Tensor | None
    """[R, P] which of the rows is whose; n for a parent with no other candidate than token 0, whose
    score is 0. None where the rows are those of all parents in their order."""
    temperature: float
    """What they are divided by."""
    length: int
    """Tokens in a chunk; the last one may be shorter."""
    maxima: Tensor
    """[R, P, C] the largest score, as it is."""
    sums: Tensor
    """[J, R, P, C] Σ e^{j (score − maximum) / temperature} for j = 1…J."""
    backend: Backend = TORCH
    """What is asked before the reference."""

    @property
    def shape(self) -> torch.Size:
        """R, P, V."""
        return torch.Size((*self.maxima.shape[:2], self.rows.shape[-1]))

    @cached_property
    def scores(self) -> Tensor:
        """[R, P, V] all of them, written down if they are not."""
        if self.row is None:
            return self.rows.view(self.shape)
        return _of_parents(self.rows, self.row, 0.0, -math.inf)

    def _found(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """[...] rows that there are, and which of the ``row`` [...] are not there."""
        return row.clamp(max=len(self.rows) - 1), row == len(self.rows)

    @property
    def width(self) -> int:
        """The most tokens that a chunk has."""
        return min(self.length, self.shape[-1])

    @cached_property
    def peaks(self) -> Tensor:
        """[R, P, C] float64, the largest score / temperature."""
        return self._scaled(self.maxima)

    @cached_property
    def log_masses(self) -> Tensor:
        """[R, P, C] float64 log Σ exp(score / temperature) over a chunk."""
        return self.peaks + self.sums[0].to(torch.float64).log()

    @cached_property
    def log_total(self) -> Tensor:
        """[R, P] float64 log Σ exp(score / temperature)."""
        top = self.peaks.amax(-1, keepdim=True)
        top = top.masked_fill_(top.isinf(), 0.0)
        total = (self.peaks - top).exp_().mul_(self.sums[0]).sum(-1)
        return total.log_().add_(top[..., 0])

    def normalize(self, log_prob: Tensor) -> tuple[Tensor, Tensor]:
        """[R, P] the same, and the log-probabilities [R, P] of the parents less that."""
        fused = self.backend.normalize(self, log_prob)
        return (self.log_total, log_prob - self.log_total) if fused is None else fused

    def of(self, rows: Tensor | slice, parents: slice = slice(None)) -> Chunks:
        """Some parents of some sources."""
        row = self.row
        if row is None:
            row = torch.arange(len(self.rows), device=self.rows.device).view(self.shape[:2])
        return replace(
            self,
            row=row[rows][:, parents],
            maxima=self.maxima[rows][:, parents],
            sums=self.sums[:, rows][:, :, parents],
        )

    def take(self, row: Tensor, item: Tensor) -> Tensor:
        """Float64 scores of candidates parent·V + token, by tensors of one (broadcast) shape."""
        _, parents, tokens = self.shape
        if self.row is None:
            return self._scaled(self.rows.view(-1)[row * (parents * tokens) + item])
        parent, token = item // tokens, item % tokens
        place, alone = self._found(self.row[row, parent])
        score = self._scaled(self.rows[place, token])
        return score.masked_fill_(alone, -math.inf).masked_fill_(alone & (token == 0), 0.0)

    def take_along(self, item: Tensor) -> Tensor:
        """[R, m] the same of the candidates [R, m] of each source."""
        return self.take(self._source, item)

    def _scaled(self, scores: Tensor) -> Tensor:
        scores = scores.to(torch.float64)
        return scores if self.temperature == 1.0 else scores / self.temperature

    def members(
        self, row: Tensor, chunk: Tensor, dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor, Tensor]:
        """Look into chunks [...], numbered parent·C + chunk, of the sources ``row`` [...].

        Returns [...] the candidate with which each begins, and [..., width] (score − the chunk's
        maximum) / temperature from there on. Where the tokens do not divide into chunks, the last
        one of a parent begins earlier, so that it is as long as the others; what is in the chunk
        before it counts as -inf.
        """
        _, parents, tokens = self.shape
        chunks = self.maxima.shape[-1]
        number = row * (parents * chunks) + chunk
        start, early, alone = chunk * self.length, None, None
        if chunks * self.length > tokens:
            parent = chunk // chunks
            nominal = start - parent * (chunks * self.length - tokens)
            start = torch.minimum(nominal, parent * tokens + (tokens - self.width))
            early = nominal - start
        if self.row is None:
            first = row * (parents * tokens) + start
        else:
            place, alone = self._found(self.row.flatten()[number // chunks])
            first = place * tokens + start % tokens
        # Copied chunk by chunk, which is many times faster than number by number.
        windows = self.rows.view(-1).unfold(0, self.width, 1)
        score = windows.index_select(0, first.flatten()).view(*chunk.shape, self.width).to(dtype)
        # Where there is nothing but -inf, that less any number is -inf.
        top = self.maxima.flatten()[number].clamp_(min=torch.finfo(self.maxima.dtype).min)
        if alone is not None:
            top.masked_fill_(alone, math.inf)
        score -= top[..., None]
        if self.temperature != 1.0:
            score /= self.temperature
        if early is not None:
            step = numbers(self.width, chunk.device)
            score.masked_fill_(step < early[..., None], -math.inf)
        if alone is not None:
            score[..., 0].masked_fill_(alone & (chunk % chunks == 0), 0.0)
        return start, score

    def at(self, start: Tensor, place: Tensor) -> Tensor:
        """[R, n] the candidates in the places [R, n] of m · width members of chunks that begin with
        the candidates ``start`` [R, m].
        """
        return start.gather(-1, place // self.width) + place % self.width

    def largest(self, offset: Tensor, m: int) -> tuple[Tensor, Tensor]:
        """[R, m] the largest scores + offset [R, P] of each source, descending, and where."""
        found = self.find_largest(offset, m)
        return found.values, found.index

    def find_largest(self, offset: Tensor, m: int) -> Largest:
        """The same, with what was looked at on the way.

        They lie in the m chunks with the largest maxima (any other chunk has m entries elsewhere
        that are at least as large), so that no more than those are looked at one by one. They may
        be compared in the precision of the sums: items that differ by less may change places.
        """
        fused = self.backend.find_largest(self, offset, m)
        if fused is not None:
            return fused
        parents, chunks = self.maxima.shape[1:]
        if parents * chunks <= m:
            everything = self.scores.to(torch.float64) / self.temperature + offset[..., None]
            values, index = everything.flatten(1).topk(m, dim=-1)
            return Largest(values, index, None)
        tops, chosen = self._levels(offset).topk(m, dim=-1, sorted=False)
        # Relative to the lowest, so that those which hardly differ are small numbers.
        lowest, highest = tops.aminmax(dim=-1, keepdim=True)
        dtype = self.sums.dtype
        if tops.device.type != "cpu" or not bool((highest - lowest <= FLOAT32_RANGE).all()):
            lowest, dtype = torch.zeros_like(lowest), torch.float64
        start, inside = self.members(self._source, chosen, dtype)
        inside += (tops - lowest).to(dtype)[..., None]
        place = places_of_largest(inside.flatten(1), m)
        index = self.at(start, place)
        values = self.take_along(index) + offset.gather(-1, index // self.shape[-1])
        return Largest(values, index, (chosen, inside, lowest, place))

    def masses_beside(self, offset: Tensor, unit: Tensor, head: Largest, terms: int) -> Tensor:
        """[J, R, P·C] Σ e^{j (score + offset − unit)} over candidates of a chunk outside the head,
        which are at most the unit [R], for j = 1…J.
        """
        shift = offset - unit[:, None]
        if head.looked_at is None:
            return self.masses(shift, head.index.sort(dim=-1).values, terms)
        chosen, inside, lowest, place = head.looked_at
        # The chunks that were looked at are added up again, without the head.
        weight = (inside + (lowest - unit[:, None]).to(inside.dtype)[..., None]).exp_()
        weight.flatten(1).scatter_(-1, place, 0.0)
        again = _sums_of_powers(weight, terms).to(self.sums.dtype)
        table = self._whole_masses(self._levels(shift), terms)
        return table.scatter_(-1, chosen.expand_as(again), again)

    def masses(self, shift: Tensor, excluded: Tensor, terms: int) -> Tensor:
        """[J, R, P·C] Σ e^{j (score + shift)} over the candidates of a chunk, for j = 1…J.

        ``shift`` is [R, P] float64. The candidates ``excluded`` [R, M], ascending, do not count;
        they must be all those with score + shift > 0.
        """
        chunks, tokens = self.maxima.shape[-1], self.shape[-1]
        parent = excluded // tokens
        touched = parent * chunks + excluded % tokens // self.length
        # The excluded items of a chunk stand side by side; the first one's place is for all.
        slot = numbers(touched.shape[-1], touched.device)
        new = torch.ones_like(touched, dtype=torch.bool)
        new[:, 1:] = touched[:, 1:] != touched[:, :-1]
        first = torch.where(new, slot, 0).cummax(-1).values
        level = self._levels(shift)
        # Chunks with something excluded are added up again, without it.
        start, weight = self.members(self._source, touched)
        weight += level.gather(-1, touched)[..., None]
        weight.exp_().flatten(1).scatter_(-1, first * self.width + excluded - start, 0.0)
        again = _sums_of_powers(weight, terms).to(self.sums.dtype)
        again = again.gather(-1, first.expand_as(again))
        return self._whole_masses(level, terms).scatter_(-1, touched.expand_as(again), again)

    @property
    def _source(self) -> Tensor:
        """[R, 1] the numbers of the sources."""
        return numbers(len(self.maxima), self.rows.device)[:, None]

    def _levels(self, shift: Tensor) -> Tensor:
        """[R, P·C] float64 the largest score / temperature + shift [R, P] of the chunks."""
        return (self.peaks + shift[..., None]).flatten(1)

    def _whole_masses(self, level: Tensor, terms: int) -> Tensor:
        """[J, R, P·C] of whole chunks, right for those whose level [R, P·C] is at most 0."""
        weight = level.clamp(max=0.0).to(self.sums.dtype).exp_()
        table = self.sums[:terms].flatten(2).clone()
        table[0].mul_(weight)
        weight = _worth_a_power(weight)
        power = weight
        for mass in table[1:]:
            power = power * weight
            mass.mul_(power)
        return table

    def with_terms(self, terms: int) -> Chunks:
        """The same with more power sums, by reading the scores again."""
        rows = self.scores if self.row is None else self.rows
        return read(rows, self.temperature, self.length, terms, self.row, self.backend)


def read(
    scores: Tensor,
    temperature: float,
    length: int,
    terms: int,
    row: Tensor | None = None,
    backend: Backend = TORCH,
) -> Chunks:
    """Read scores [R, P, V] once, for sums of ``terms`` powers in chunks of this length.

    With ``row`` [R, P] the scores are [n, V]: see ``Chunks``.
    """
    tokens = scores.shape[-1]
    rows = scores.reshape(-1, tokens).contiguous()
    dtype = torch.promote_types(scores.dtype, torch.float32)
    chunks = -(-tokens // length)
    maxima = torch.empty((len(rows), chunks), dtype=dtype, device=scores.device)
    sums = torch.empty((terms, len(rows), chunks), dtype=dtype, device=scores.device)
    if not backend.read_into(rows, temperature, length, maxima, sums):
        _read_by_blocks(rows, temperature, length, maxima, sums)
    if row is None:
        table = (*scores.shape[:2], chunks)
        maxima, sums = maxima.view(table), sums.view(-1, *table)
    else:
        maxima, sums = _of_parents(maxima, row, 0.0, -math.inf), _of_parents(sums, row, 1.0, 0.0)
    return Chunks(rows, row, temperature, length, maxima, sums, backend)


def _of_parents(values: Tensor, row: Tensor, first: float, others: float) -> Tensor:
    """[..., R, P, C] of values [..., n, C] for the rows; ``first`` and then ``others`` for parents
    that have none.
    """
    n = values.shape[-2]
    values = values[..., row.clamp(max=n - 1), :]
    alone = (row == n)[..., None]
    values.masked_fill_(alone, others)[..., :1].masked_fill_(alone, first)
    return values


def _sums_of_powers(weight: Tensor, terms: int) -> Tensor:
    """[J, ...] Σ w^j over the last dimension of w [..., n], for j = 1…J; w is overwritten."""
    sums = [weight.sum(-1)]
    weight = _worth_a_power(weight)
    power = weight.clone() if terms > 1 else weight
    sums += [power.mul_(weight).sum(-1) for _ in range(1, terms)]
    return torch.stack(sums)


def _worth_a_power(weight: Tensor) -> Tensor:
    """Weights of at most 1, in place, without those whose fourth power is no normal number: their
    squares do not count beside 1, and with subnormal numbers processors are slow.
    """
    return torch.threshold_(weight, torch.finfo(weight.dtype).tiny ** 0.25, 0.0)


def _read_by_blocks(
    rows: Tensor, temperature: float, length: int, maxima: Tensor, sums: Tensor
) -> None:
    """Fill maxima [rows, C] and sums [J, rows, C] from scores [rows, V].

    In blocks that stay in the processor's cache. torch's softmax is its fastest exponential,
    several times faster than exp. Within a chunk it is e^{score − maximum} / Σ, so that its own
    maximum is 1/Σ.
    """
    terms, tokens, dtype = len(sums), rows.shape[-1], maxima.dtype
    height = max(1, min(len(rows), 2 * block_size(rows.device) // tokens))
    memory = working_memory(2 * height * tokens, rows.device).view(dtype)
    whole = tokens - tokens % length
    for top in range(0, len(rows), height):
        part = slice(top, top + height)
        for left, right in ((0, whole), (whole, tokens)):
            if left == right:
                continue
            x = rows[part, left:right]
            size = min(length, right - left)
            p, power = memory[: 2 * x.numel()].view(2, -1)
            if x.dtype != dtype:
                x = power.view(x.shape).copy_(x)
            x, p, power = (y.view(-1, (right - left) // size, size) for y in (x, p, power))
            place = slice(left // length, left // length + x.shape[1])
            maxima[part, place] = x.amax(-1)
            if temperature != 1.0:
                # First the difference, which is small where it matters, so that no digit is lost.
                x = torch.sub(x, maxima[part, place, None], out=power).div_(temperature)
            torch.softmax(x, -1, out=p)
            torch.amax(p, -1, out=sums[0, part, place])
            for j in range(1, terms):
                torch.mul(p if j == 1 else power, p, out=power)
                torch.sum(power, -1, out=sums[j, part, place])
    largest = sums[0].reciprocal()
    for j in range(1, terms):
        sums[j].mul_(largest ** (j + 1))
    sums[0] = largest
    sums.masked_fill_(maxima == -math.inf, 0.0)
