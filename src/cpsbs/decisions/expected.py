"""Expected utilities: a weighted mean for every candidate, with its error and certain bounds.

For candidates c and evidence Y with weights w, the expected utility of c is estimated by

    U(c) = Σ_{y ∈ Y} w(y) u(c, y) ,

and so is any other function of y: here the components of f are the utilities of all candidates, or
their differences from those of one candidate. ``cpsbs.estimate`` computes the same from a function
that is called sequence by sequence; this takes a table that is there already.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cpsbs.designs.variance import ROUNDING
from cpsbs.estimation.uncertainty import one_beam_variance, student_quantile
from cpsbs.estimation.weights import COMPLETE, SAME, log_weights_of
from cpsbs.search.beams import Beams


@dataclass(frozen=True)
class Means:
    """Weighted means of d functions for each of B sources."""

    value: Tensor
    """[B, d] the means."""
    variance: Tensor
    """[B, d] their variances; NaN where they are not known."""
    freedom: Tensor
    """[B, d] the degrees of freedom of the variances."""

    def half_width(self, level: float) -> Tensor:
        """Return [B, d] how far the mean may be off at this one-sided level; inf if not known."""
        # To two decimals, so that few different quantiles have to be computed.
        freedom, place = torch.unique(self.freedom.round(decimals=2), return_inverse=True)
        half = student_quantile(level, freedom)[place] * self.variance.clamp(min=0).sqrt()
        return torch.where(half.isnan() | (self.variance < 0), math.inf, half)


@dataclass(frozen=True)
class BeamEvidence:
    """Evidence with the weights of a design: one beam of each source, on the CPU."""

    beams: Beams
    texts: list[list[str]]
    """The text of each sequence of each source."""
    normalize: bool

    @cached_property
    def _log_weight(self) -> Tensor:
        return log_weights_of(self.beams, None)

    @cached_property
    def _log_norm(self) -> Tensor:
        return self._log_weight.logsumexp(-1)

    @cached_property
    def weight(self) -> Tensor:
        """[B, K] the weights, zero in empty places."""
        shift = self._log_norm[:, None] if self.normalize else 0.0
        return (self._log_weight - shift).exp()

    def text_weights(self) -> list[list[float]]:
        """Return the weight of each text of each source."""
        rows = zip(self.weight, self.beams.present, strict=True)
        return [own[here].tolist() for own, here in rows]

    @cached_property
    def probability(self) -> Tensor:
        """[B, K] p of the distinct sequences; zero in empty places and for repetitions."""
        first = torch.zeros_like(self.beams.present)
        for b in range(len(self.beams)):
            seen: set[tuple[int, ...]] = set()
            places = self.beams.present[b].nonzero()[:, 0].tolist()
            for i, y in zip(places, map(tuple, self.beams.tokens(b)), strict=True):
                first[b, i] = y not in seen
                seen.add(y)
        return torch.where(first, self.beams.log_prob.exp(), 0.0).double()

    @cached_property
    def exact(self) -> Tensor:
        """[B] whether all sequences are there, each weighted by its probability."""
        complete = (self.probability.sum(-1) - 1).abs() <= COMPLETE
        return complete & ((self.weight - self.probability).abs().sum(-1) <= SAME)

    def columns(self, tables: Tensor) -> Tensor:
        """Return [B, K, C] the utilities of every place from tables [B, C, n] of the texts."""
        out = tables.new_zeros((*self.beams.present.shape, tables.shape[1]))
        place = self.beams.present.cumsum(-1).sub(1).clamp(min=0)
        found = tables.mT.gather(1, place[..., None].expand_as(out))
        return torch.where(self.beams.present[..., None], found, 0.0)

    def means(self, values: Tensor) -> Means:
        """Return the means of functions with the values [B, K, d]."""
        value = (self.weight[..., None] * values).sum(1)
        centred, log_norm = values, None
        if self.normalize:
            centred = (values - value[:, None]) * self.beams.present[..., None]
            log_norm = self._log_norm
        variance, freedom = one_beam_variance(self.beams, self.weight, centred, log_norm, value)
        if variance is None:
            variance = torch.full_like(value, math.nan)
        variance = torch.where(self.exact[:, None], 0.0, variance)
        return Means(value, variance, freedom[:, None].expand_as(value))

    def some(self, sources: list[int]) -> BeamEvidence:
        """Return the evidence of some of the sources."""
        return BeamEvidence(self.beams[sources], [self.texts[s] for s in sources], self.normalize)

    def bounds(self, values: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
        """Return [B, d] certain bounds of the expectations of functions between two numbers."""
        seen = (self.probability[..., None] * values).sum(1)
        unseen = (1 - self.probability.sum(-1)).clamp(min=0)[:, None]
        unseen = torch.where(self.exact[:, None], 0.0, unseen)

        def end(limit: float) -> Tensor:  # 0 · inf would be NaN
            return torch.where(unseen > 0, seen + unseen * limit, seen)

        return end(low), end(high)

    @property
    def captured(self) -> Tensor:
        """[B] the probability of the sequences found."""
        return self.probability.sum(-1)


@dataclass(frozen=True)
class WeightedTexts:
    """Evidence as texts, with weights that somebody gave; equal ones are independent samples."""

    texts: list[list[str]]
    weights: list[list[float]] | None
    """The weights of the texts of every source; None for equal weights."""

    @cached_property
    def weight(self) -> Tensor:
        """[B, E] the weights, which sum to one."""
        most = max(map(len, self.texts))
        given = self.weights or [[1.0] * len(own) for own in self.texts]
        rows = [own + [0.0] * (most - len(own)) for own in given]
        table = torch.tensor(rows, dtype=torch.float64, device="cpu")
        return table / table.sum(-1, keepdim=True)

    def text_weights(self) -> list[list[float]]:
        """Return the weight of each text of each source."""
        rows = zip(self.weight.tolist(), self.texts, strict=True)
        return [own[: len(texts)] for own, texts in rows]

    def columns(self, tables: Tensor) -> Tensor:
        """Return [B, E, C] the utilities of every text."""
        return tables.mT

    def means(self, values: Tensor) -> Means:
        """Return the means; their errors are known for independent samples, of equal weights."""
        value = (self.weight[..., None] * values).sum(1)
        count = torch.tensor([len(own) for own in self.texts], dtype=torch.float64, device="cpu")
        if self.weights is not None:
            return Means(value, torch.full_like(value, math.nan), torch.ones_like(value))
        here = self.weight[..., None] > 0
        square = torch.where(here, values - value[:, None], 0.0).square().sum(1)
        variance = square / (count * (count - 1))[:, None]
        variance = torch.where(variance > ROUNDING * value.square(), variance, math.nan)
        return Means(value, variance, (count - 1).clamp(min=1)[:, None].expand_as(value))

    def bounds(self, values: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
        """Return what is certain without probabilities: nothing but the two numbers."""
        whole = values.new_zeros((len(values), values.shape[-1]))
        return whole + low, whole + high

    @property
    def captured(self) -> Tensor:
        """[B] NaN, because the probabilities of the texts are not known."""
        return torch.full((len(self.texts),), math.nan, dtype=torch.float64, device="cpu")


Evidence = BeamEvidence | WeightedTexts
