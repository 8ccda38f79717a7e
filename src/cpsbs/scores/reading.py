"""Reads a model's scores once per step, and keeps what every design starts from.

The tokens are cut into chunks. One pass over the scores x keeps, for each chunk c, its maximum m_c
and the power sums

    S_{j,c} = Σ_{v ∈ c} e^{j (x_v − m_c)/τ} ,      j = 1…J ,      τ the temperature.

Whatever a design asks is first answered for chunks, from a table much smaller than the scores, and
then by scanning the members of the few chunks that matter: which candidates are the most probable
(they lie in the chunks with the largest maxima), what all of them weigh together
(Σ_c e^{m_c/τ} S_{1,c}), where a sample falls (first in a chunk, then on a token of it).

The sums have the precision of the scores, but at least that of float32, whose seven digits are as
many as a model's scores are good for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cpsbs.backends.base import TORCH, Backend
from cpsbs.scores.largest import chunk_length, head_size, places_of_largest
from cpsbs.scores.memory import block_size, scratch_buffer, shared_arange

FLOAT32_RANGE = 1000.0
"""Largest difference of log-probabilities for which float32 is precise enough. It is exceeded by
models that forbid tokens with a large negative score."""


def beam_chunk_length(parents: int, tokens: int, k: int, terms: int, backend: Backend) -> int:
    """Return the chunk length for a beam of K, whose ``head_size`` largest are kept one by one.

    ``terms`` is the number of power sums that the design wants.
    """
    least = chunk_length(parents * tokens, head_size(k))
    return backend.chunk_length(least, parents, tokens, terms)


@dataclass(frozen=True)
class ScannedChunks:
    """The members of those chunks of R sources in which the largest candidates were found."""

    chunk: Tensor
    """[R, m] the numbers of the chunks, parent·C + chunk."""
    members: Tensor
    """[R, m, width] log-probabilities of the members, relative to the level."""
    level: Tensor
    """[R, 1] float64, what was subtracted from the log-probabilities."""
    place: Tensor
    """[R, m] the positions of the largest candidates among the m · width members."""


@dataclass(frozen=True)
class Largest:
    """The m largest candidates of R sources."""

    values: Tensor
    """[R, m] score + offset in descending order, but for rounding."""
    index: Tensor
    """[R, m] the candidates, parent·V + token."""
    scanned: ScannedChunks | None = None
    """The chunks that were scanned to find them; None if the members were not kept."""


@dataclass(frozen=True)
class Chunks:
    """Scores [R, P, V] of R sources with P parents each, whose tokens are cut into C chunks.

    In the formulas of the methods, "score" means the score divided by the temperature.
    """

    rows: Tensor
    """[n, V] the scores as the model gives them."""
    row: Tensor | None
    """[R, P] the row of each parent; n stands for a parent without a row, whose one candidate is
    token 0 with score 0. None if the rows are those of all parents, in their order."""
    temperature: float
    """What the scores are divided by."""
    length: int
    """The number of tokens in a chunk; the last chunk may be shorter."""
    maxima: Tensor
    """[R, P, C] the largest score of each chunk, not divided by the temperature."""
    sums: Tensor
    """[J, R, P, C] Σ e^{j (score − maximum) / temperature} over each chunk, for j = 1…J."""
    backend: Backend = TORCH
    """The backend that may take over some of the arithmetic here."""

    @cached_property
    def memo(self) -> dict[str, Any]:
        """A dictionary in which a backend keeps what it derives from these chunks."""
        return {}

    @property
    def shape(self) -> torch.Size:
        """The shape (R, P, V)."""
        return torch.Size((*self.maxima.shape[:2], self.rows.shape[-1]))

    @property
    def width(self) -> int:
        """The number of tokens in the longest chunk."""
        return min(self.length, self.shape[-1])

    @cached_property
    def scores(self) -> Tensor:
        """[R, P, V] the scores of all parents; a copy where the parents do not have all rows."""
        if self.row is None:
            return self.rows.view(self.shape)
        return _of_parents(self.rows, self.row, 0.0, -math.inf)

    def scaled_scores(self) -> Tensor:
        """Return a new tensor [R, P, V] of float64 score / temperature."""
        return self.scores.to(torch.float64) / self.temperature

    @cached_property
    def peaks(self) -> Tensor:
        """[R, P, C] float64, the maximum of each chunk / temperature."""
        return self._scaled(self.maxima)

    @cached_property
    def log_masses(self) -> Tensor:
        """[R, P, C] float64 log Σ exp(score / temperature) over each chunk."""
        return self.peaks + self.sums[0].to(torch.float64).log()

    @cached_property
    def log_total(self) -> Tensor:
        """[R, P] float64 log Σ exp(score / temperature) over all tokens."""
        top = self.peaks.amax(-1, keepdim=True)
        top = top.masked_fill_(top.isinf(), 0.0)
        total = (self.peaks - top).exp_().mul_(self.sums[0]).sum(-1)
        return total.log_().add_(top[..., 0])

    def normalize(self, log_prob: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``log_total`` [R, P], and the parents' log-probabilities [R, P] minus it."""
        fused = self.backend.normalize(self, log_prob)
        return (self.log_total, log_prob - self.log_total) if fused is None else fused

    def of(self, rows: Tensor | slice, parents: slice = slice(None)) -> Chunks:
        """Return the chunks of some parents of some sources."""
        row = self.row
        if row is None:
            row = torch.arange(len(self.rows), device=self.rows.device).view(self.shape[:2])
        return replace(
            self,
            row=row[rows][:, parents],
            maxima=self.maxima[rows][:, parents],
            sums=self.sums[:, rows][:, :, parents],
        )

    def with_terms(self, terms: int) -> Chunks:
        """Return the same chunks with ``terms`` power sums, by reading the scores again."""
        rows = self.scores if self.row is None else self.rows
        return read(rows, self.temperature, self.length, terms, self.row, self.backend)

    def take(self, source: Tensor, candidate: Tensor) -> Tensor:
        """Return float64 score / temperature of some candidates (parent·V + token) of some sources.

        Both arguments have the same shape, or shapes that broadcast.
        """
        _, parents, tokens = self.shape
        if self.row is None:
            return self._scaled(self.rows.view(-1)[source * (parents * tokens) + candidate])
        parent, token = candidate // tokens, candidate % tokens
        place, rowless = self._existing_row(self.row[source, parent])
        score = self._scaled(self.rows[place, token])
        return score.masked_fill_(rowless, -math.inf).masked_fill_(rowless & (token == 0), 0.0)

    def take_along(self, candidate: Tensor) -> Tensor:
        """Return ``take`` of the candidates [R, m] of all sources."""
        return self.take(self._source, candidate)

    def members(
        self, source: Tensor, chunk: Tensor, dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor, Tensor]:
        """Return the members of chunks [...], numbered parent·C + chunk, of the sources [...].

        These are, for each chunk, the candidate with which it begins [...], and (score − the
        chunk's maximum) / temperature [..., width] from there on. Where the tokens do not divide
        into chunks, the last one of a parent begins early enough to be as long as the others, and
        what belongs to the chunk before it counts as -inf.
        """
        _, parents, tokens = self.shape
        chunks = self.maxima.shape[-1]
        number = source * (parents * chunks) + chunk
        start, early, rowless = chunk * self.length, None, None
        if chunks * self.length > tokens:
            parent = chunk // chunks
            nominal = start - parent * (chunks * self.length - tokens)
            start = torch.minimum(nominal, parent * tokens + (tokens - self.width))
            early = nominal - start
        if self.row is None:
            first = source * (parents * tokens) + start
        else:
            place, rowless = self._existing_row(self.row.flatten()[number // chunks])
            first = place * tokens + start % tokens
        # Copying chunk by chunk is many times faster than copying element by element.
        windows = self.rows.view(-1).unfold(0, self.width, 1)
        score = windows.index_select(0, first.flatten()).view(*chunk.shape, self.width).to(dtype)
        # In a chunk of nothing but -inf a finite maximum makes the differences -inf, not NaN.
        top = self.maxima.flatten()[number].clamp_(min=torch.finfo(self.maxima.dtype).min)
        if rowless is not None:
            top.masked_fill_(rowless, math.inf)
        score -= top[..., None]
        if self.temperature != 1.0:
            score /= self.temperature
        if early is not None:
            step = shared_arange(self.width, chunk.device)
            score.masked_fill_(step < early[..., None], -math.inf)
        if rowless is not None:
            score[..., 0].masked_fill_(rowless & (chunk % chunks == 0), 0.0)
        return start, score

    def candidate_at(self, start: Tensor, place: Tensor) -> Tensor:
        """Return the candidates [R, n] at the positions [R, n] among the members of m chunks.

        ``start`` [R, m] are the candidates with which the chunks begin; the positions count through
        their m · width members.
        """
        return start.gather(-1, place // self.width) + place % self.width

    def largest(self, offset: Tensor, m: int) -> tuple[Tensor, Tensor]:
        """Return the m largest scores + offset [R, P] of each source, and their candidates."""
        found = self.find_largest(offset, m)
        return found.values, found.index

    def find_largest(self, offset: Tensor, m: int) -> Largest:
        """Return the m candidates of each source with the largest score + offset [R, P].

        They lie in the m chunks with the largest maxima (see ``cpsbs.scores.largest``), and only
        those are scanned. Scores may be compared in the precision of the sums: candidates that
        differ by less may change places.
        """
        fused = self.backend.find_largest(self, offset, m)
        if fused is not None:
            return fused
        parents, chunks = self.maxima.shape[1:]
        if parents * chunks <= m:
            everything = self.scaled_scores() + offset[..., None]
            values, index = everything.flatten(1).topk(m, dim=-1)
            return Largest(values, index)
        tops, chosen = self._levels(offset).topk(m, dim=-1, sorted=False)
        # Relative to the lowest maximum, so that candidates which hardly differ are small numbers.
        lowest, highest = tops.aminmax(dim=-1, keepdim=True)
        dtype = self.sums.dtype
        if tops.device.type != "cpu" or not bool((highest - lowest <= FLOAT32_RANGE).all()):
            lowest, dtype = torch.zeros_like(lowest), torch.float64
        start, members = self.members(self._source, chosen, dtype)
        members += (tops - lowest).to(dtype)[..., None]
        place = places_of_largest(members.flatten(1), m)
        index = self.candidate_at(start, place)
        values = self.take_along(index) + offset.gather(-1, index // self.shape[-1])
        return Largest(values, index, ScannedChunks(chosen, members, lowest, place))

    def masses_outside(self, head: Largest, offset: Tensor, unit: Tensor, terms: int) -> Tensor:
        """Return [J, R, P·C] Σ e^{j (score + offset − unit)} over each chunk outside the head.

        For j = 1…J. The head is what ``find_largest`` found with this offset [R, P], and no
        candidate outside it exceeds the unit [R].
        """
        shift, scanned = offset - unit[:, None], head.scanned
        if scanned is None:
            return self.masses(shift, head.index.sort(dim=-1).values, terms)
        # The chunks that were scanned are added up again, without the head.
        level = (scanned.level - unit[:, None]).to(scanned.members.dtype)
        weight = (scanned.members + level[..., None]).exp_()
        weight.flatten(1).scatter_(-1, scanned.place, 0.0)
        again = _sums_of_powers(weight, terms).to(self.sums.dtype)
        table = self._whole_masses(self._levels(shift), terms)
        return table.scatter_(-1, scanned.chunk.expand_as(again), again)

    def masses(self, shift: Tensor, excluded: Tensor, terms: int) -> Tensor:
        """Return [J, R, P·C] Σ e^{j (score + shift)} over the candidates of each chunk.

        For j = 1…J and a float64 shift [R, P]. The candidates ``excluded`` [R, M], in ascending
        order, do not count; all candidates with score + shift > 0 must be among them.
        """
        chunks, tokens = self.maxima.shape[-1], self.shape[-1]
        parent = excluded // tokens
        touched = parent * chunks + excluded % tokens // self.length
        # The excluded candidates of a chunk are neighbours; ``first`` maps each of them to the slot
        # of the first.
        slot = shared_arange(touched.shape[-1], touched.device)
        new = torch.ones_like(touched, dtype=torch.bool)
        new[:, 1:] = touched[:, 1:] != touched[:, :-1]
        first = torch.where(new, slot, 0).cummax(-1).values
        level = self._levels(shift)
        # Chunks with an excluded candidate are added up again, without it.
        start, weight = self.members(self._source, touched)
        weight += level.gather(-1, touched)[..., None]
        weight.exp_().flatten(1).scatter_(-1, first * self.width + excluded - start, 0.0)
        again = _sums_of_powers(weight, terms).to(self.sums.dtype)
        again = again.gather(-1, first.expand_as(again))
        return self._whole_masses(level, terms).scatter_(-1, touched.expand_as(again), again)

    @property
    def _source(self) -> Tensor:
        """[R, 1] the numbers of the sources."""
        return shared_arange(len(self.maxima), self.rows.device)[:, None]

    def _scaled(self, scores: Tensor) -> Tensor:
        scores = scores.to(torch.float64)
        return scores if self.temperature == 1.0 else scores / self.temperature

    def _existing_row(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows [...] clamped to those that exist, and [...] which ones did not exist."""
        return row.clamp(max=len(self.rows) - 1), row == len(self.rows)

    def _levels(self, shift: Tensor) -> Tensor:
        """Return [R, P·C] float64 peaks + shift [R, P]."""
        return (self.peaks + shift[..., None]).flatten(1)

    def _whole_masses(self, level: Tensor, terms: int) -> Tensor:
        """Return [J, R, P·C] the masses of whole chunks; wrong where their level is above 0."""
        weight = level.clamp(max=0.0).to(self.sums.dtype).exp_()
        table = self.sums[:terms].flatten(2).clone()
        table[0].mul_(weight)
        weight = _without_negligible(weight)
        power = weight
        for mass in table[1:]:
            power = power * weight
            mass.mul_(power)
        return table


def read(
    scores: Tensor,
    temperature: float,
    length: int,
    terms: int,
    row: Tensor | None = None,
    backend: Backend = TORCH,
) -> Chunks:
    """Read a model's scores once, and return the maximum and the power sums of each chunk.

    Args:
        scores: [R, P, V]; or [n, V] together with ``row``.
        temperature: what the scores are divided by.
        length: the number of tokens in a chunk.
        terms: J, the number of power sums.
        row: [R, P] the row of each parent; see ``Chunks.row``.
        backend: the backend that may take over some of the arithmetic.
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
    """Return [..., R, P, C] the values [..., n, C] of the parents' rows [R, P].

    Parents without a row get ``first`` in the first place and ``others`` in all other places.
    """
    n = values.shape[-2]
    values = values[..., row.clamp(max=n - 1), :]
    rowless = (row == n)[..., None]
    values.masked_fill_(rowless, others)[..., :1].masked_fill_(rowless, first)
    return values


def _sums_of_powers(weight: Tensor, terms: int) -> Tensor:
    """Return [J, ...] Σ w^j over the last dimension of w [..., n], j = 1…J; w is overwritten."""
    sums = [weight.sum(-1)]
    weight = _without_negligible(weight)
    power = weight.clone() if terms > 1 else weight
    sums += [power.mul_(weight).sum(-1) for _ in range(1, terms)]
    return torch.stack(sums)


def _without_negligible(weight: Tensor) -> Tensor:
    """Set to zero, in place, the weights whose fourth power is a subnormal number.

    Weights are at most 1, and the squares of such small ones do not count beside 1. Processors are
    slow with subnormal numbers.
    """
    return torch.threshold_(weight, torch.finfo(weight.dtype).tiny ** 0.25, 0.0)


def _read_by_blocks(
    rows: Tensor, temperature: float, length: int, maxima: Tensor, sums: Tensor
) -> None:
    """Fill maxima [n, C] and sums [J, n, C] from scores [n, V], block by block.

    A block stays in the processor's cache. Torch's softmax is its fastest exponential, several
    times faster than ``exp``. Within a chunk it is e^{score − maximum} / Σ, so that its own maximum
    is 1/Σ.
    """
    terms, tokens, dtype = len(sums), rows.shape[-1], maxima.dtype
    height = max(1, min(len(rows), 2 * block_size(rows.device) // tokens))
    memory = scratch_buffer(2 * height * tokens, rows.device).view(dtype)
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
                # The difference comes first: it is small where it matters, so no digit is lost.
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
