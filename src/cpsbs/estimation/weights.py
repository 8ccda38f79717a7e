"""The weights of the sequences of a beam, and a warning where they are not to be trusted.

Unbiased weights sum to one in expectation. ``stratified``, ``sum-and-sample`` and samples with
replacement keep that sum in every beam; for the other designs it varies. Where it varies widely,
unbiasedness is of no use: nearly all of the weight lies with sequences that are hardly ever drawn,
and the beams that are drawn miss it.

``WeightTables`` adds up what the distinct sequences of a source weigh in all of its beams.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cpsbs.search.beams import Beams

FAR = 3.0
"""A sum of weights above this, or below its reciprocal, is far from one."""

FAR_SHARE = 0.1
"""The share of sources with such sums above which ``estimate`` warns. On the first 50 sentences of
newstest2014 with the embedded model and K = 10, at the temperatures 0.3, 0.5 and 1, it was at most
0.02 for ``calibrated`` and 0 for ``gumbel-top-k``. For ``conditional-poisson`` it was 0.18, 0.42 to
0.50 and 0.98, and the mean of the expected lengths was too small by a factor of 1.6, of 1.5 to 3
and of 70."""

Weighted = dict[tuple[int, ...], tuple[float, float]]
"""The relative weight and log p of each distinct sequence of a source, by its tokens."""

COMPLETE = 1e-5
"""By how much Σp may differ from one in a beam that holds all sequences: log-probabilities are sums
of up to some hundred float32 numbers."""

SAME = 1e-9
"""By how much Σ |w − p| may differ from zero in a beam whose weights are the probabilities. Where
mass is missing, unbiased weights exceed the probabilities by as much in expectation, so that this
bounds what is missing far more tightly than Σp does."""


class WeightWarning(UserWarning):
    """The weights of the beams sum to something far from one: the estimate is not to be trusted."""


def log_weights_of(beams: Beams, log_inclusion: Tensor | None) -> Tensor:
    """Return [B, K] the logarithms of the weights, -inf in empty places.

    They are those that the design gave, or p / π with the inclusion probabilities [B, K] given.
    """
    if log_inclusion is None:
        if beams.log_weight is None:
            raise ValueError(
                f"the design {beams.design!r} has no inclusion probabilities, so its beams cannot "
                "estimate an expectation; search with a design that has, such as 'stratified'"
            )
        return beams.log_weight
    if log_inclusion.shape != beams.log_prob.shape:
        raise ValueError(
            f"log_inclusion has the shape {list(log_inclusion.shape)}; "
            f"it must be [B, K] = {list(beams.log_prob.shape)}"
        )
    missing = beams.present & ~(log_inclusion.isfinite() & (log_inclusion <= 1e-9))
    if bool(missing.any()):
        b, i = missing.nonzero()[0].tolist()
        raise ValueError(
            f"log_inclusion is {float(log_inclusion[b, i])} for sequence {i} of source {b}, which "
            "cannot be weighted: the logarithm of an inclusion probability is finite and at most 0"
        )
    return torch.where(beams.present, beams.log_prob - log_inclusion, -math.inf)


def warn_of_far_sums(sums: Tensor, design: str, normalize: bool, level: int = 3) -> None:
    """Warn once if the sums of weights [B] are far from one, on average or in many sources.

    The warning points to the caller of the function that calls this, or to a higher ``level``.
    """
    mean = float(sums.mean())
    far = (sums > FAR) | (sums < 1 / FAR)
    if 1 / FAR <= mean <= FAR and float(far.double().mean()) <= FAR_SHARE:
        return
    found = f"sum to {mean:.3g}"
    if len(sums) > 1:
        found += f" on average over {len(sums)} sources (far from 1 in {int(far.sum())} of them)"
    remedy = "" if normalize else ". normalize=True makes the error smaller, but does not remove it"
    warnings.warn(
        f"the weights of {design} {found}, where 1 is expected: the beams miss much of the "
        "distribution or exaggerate it, and the error bar does not show that. Search with the "
        f"design 'stratified', whose weights always sum to 1, or with a larger k{remedy}",
        WeightWarning,
        stacklevel=level,
    )


@dataclass(frozen=True)
class WeightTables:
    """The weights of the distinct sequences of each source, in each of R beams and in all."""

    each: list[list[Weighted]]
    """For each source, a table for each beam; weights are relative to the source's largest."""
    merged: list[Weighted]
    """For each source, the sums over its beams."""
    unit: list[float]
    """For each source, its largest weight."""

    @staticmethod
    def of(several: Sequence[Beams], log_weights: Tensor, largest: Tensor) -> WeightTables:
        """Return the tables of beams with log-weights [R, B, K], of which the largest is [B]."""
        relative = (log_weights - largest[:, None]).exp()
        each = [
            [_by_sequence(b, w[i], i) for b, w in zip(several, relative, strict=True)]
            for i in range(len(largest))
        ]
        return WeightTables(each, [_merged(tables) for tables in each], largest.exp().tolist())

    def exact(self, normalized: bool) -> Tensor:
        """Return [B] whether all beams hold all sequences and weight each by its probability."""
        return _on_cpu(
            [
                all(_is_exact(table, None if normalized else unit) for table in tables)
                for tables, unit in zip(self.each, self.unit, strict=True)
            ]
        )

    @property
    def probabilities(self) -> list[dict[tuple[int, ...], float]]:
        """The probabilities of the distinct sequences of each source."""
        return [{y: math.exp(log_p) for y, (_, log_p) in m.items()} for m in self.merged]

    @property
    def distinct(self) -> Tensor:
        """[B] the number of distinct sequences."""
        return _on_cpu([len(m) for m in self.merged])

    @property
    def captured(self) -> Tensor:
        """[B] Σ p over the distinct sequences."""
        return _on_cpu([sum(own.values()) for own in self.probabilities])

    @property
    def effective_size(self) -> Tensor:
        """[B] (Σ w)² / Σ w² over the distinct sequences."""
        return _on_cpu([_effective_size([w for w, _ in m.values()]) for m in self.merged])


def _by_sequence(beams: Beams, weight: Tensor, source: int) -> Weighted:
    """Return the weights [K] of a source's beam by sequence; those of repeats are added up."""
    here = beams.present[source]
    table: Weighted = {}
    rows = (beams.tokens(source), weight[here].tolist(), beams.log_prob[source][here].tolist())
    for y, w, log_p in zip(*rows, strict=True):
        before = table.get(tuple(y), (0.0, log_p))[0]
        table[tuple(y)] = (before + w, log_p)
    return table


def _merged(tables: Sequence[Weighted]) -> Weighted:
    """Return the sums of the weights over several beams of a source."""
    merged: Weighted = {}
    for table in tables:
        for y, (w, log_p) in table.items():
            merged[y] = (merged.get(y, (0.0, log_p))[0] + w, log_p)
    return merged


def _is_exact(table: Weighted, unit: float | None) -> bool:
    """Return whether a beam holds all sequences and weights each by its probability.

    The weights in the table are to be multiplied by ``unit``, or, if it is None, normalised.
    """
    if unit is None:
        total = sum(w for w, _ in table.values())
        unit = 1 / total if total > 0 else math.nan
    pairs = [(w * unit, math.exp(log_p)) for w, log_p in table.values()]
    captured = sum(p for _, p in pairs)
    return abs(captured - 1) <= COMPLETE and sum(abs(w - p) for w, p in pairs) <= SAME


def _effective_size(weights: Sequence[float]) -> float:
    """Return (Σ w)² / Σ w²."""
    square = sum(w * w for w in weights)
    return sum(weights) ** 2 / square if square > 0 else 0.0


def _on_cpu(values: Sequence[float]) -> Tensor:
    """Return [n] the numbers as a tensor on the CPU, whatever torch's default device is."""
    return torch.tensor(values, device="cpu")
