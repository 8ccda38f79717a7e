"""Bounds of an expectation that are certain, because the probability of every sequence is exact.

If every value of f lies in [a, b], then whatever the sequences that were not found,

    Σ_{y ∈ Y} p(y) f(y) + (1 − Σ_{y ∈ Y} p(y)) · [a, b]

contains E f, where Y are the distinct sequences that were found, by any design, with weights or
without. For the probability of an event A that is [Σ_{y ∈ Y ∩ A} p(y), 1 − Σ_{y ∈ Y ∖ A} p(y)].
There is no error rate: the bounds hold to the rounding of the probabilities, about 1e-6 with a
model in float32. Independent samples alone cannot say as much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cpsbs.search.beams import Beams

Bounds = tuple[float | Sequence[float], float | Sequence[float]]
"""The least and the largest value of f, for each component if f is vector-valued."""

Limits = tuple[Tensor, Tensor]
"""[B, d] the least and the largest value of f for each source."""

OUTSIDE = 1e-9
"""By how much a value may lie outside the bounds, relative to the larger of them and one: metrics
round."""


def stated_bounds(
    f: Any, given: Bounds | None, boolean: bool, beams: Beams, size: int
) -> Limits | None:
    """Return the bounds that the caller gave, or that f states; None if nobody knows any.

    Args:
        f: what ``estimate`` was given.
        given: the argument ``bounds`` of ``estimate``.
        boolean: whether f returned only true and false.
        beams: the beams, for functions whose bounds depend on how they were made.
        size: d.
    """
    if given is None and boolean:
        given = (0.0, 1.0)
    functions = list(f) if isinstance(f, list | tuple) else [f] * len(beams)
    rows = []
    for g in functions:
        own = getattr(g, "bounds", None) if given is None else given
        own = own(beams) if callable(own) else own
        if own is None:
            return None
        rows.append(_pair(own, size))
    low, high = (torch.stack(end) for end in zip(*rows, strict=True))
    return low, high


def _pair(bounds: Any, size: int) -> tuple[Tensor, Tensor]:
    """Return [d] both ends of the bounds, checked."""
    try:
        low, high = (torch.tensor(end, dtype=torch.float64, device="cpu") for end in bounds)
        low, high = low.expand(size), high.expand(size)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"bounds is {bounds!r}; it must be two numbers (a, b)"
            + (f", or two lists of {size} numbers" if size > 1 else "")
        ) from error
    if not bool((low <= high).all()):
        raise ValueError(f"bounds is {bounds!r}; the first must not be larger than the second")
    return low, high


def check_within(limits: Limits, several: Sequence[Beams], values: Tensor) -> None:
    """Raise a ValueError that names a sequence whose value [R, B, K, d] lies outside the limits."""
    low, high = (end[:, None] for end in limits)
    finite = [torch.where(end.isfinite(), end.abs(), 1.0) for end in (low, high)]
    slack = OUTSIDE * torch.maximum(*finite).clamp(min=1.0)
    for beams, own in zip(several, values.cpu(), strict=True):
        outside = ((own < low - slack) | (own > high + slack)) & beams.present.cpu()[..., None]
        if bool(outside.any()):
            b, i, j = outside.nonzero()[0].tolist()
            tokens = beams.sequences[b, i, : int(beams.lengths[b, i])].tolist()
            raise ValueError(
                f"f is {float(own[b, i, j])} on the sequence {tokens} of source {b}; its bounds "
                f"say that it lies in [{float(limits[0][b, j]):g}, {float(limits[1][b, j]):g}]"
            )


def certified(
    limits: Limits,
    probabilities: Sequence[Mapping[tuple[int, ...], float]],
    known: Sequence[Mapping[tuple[int, ...], Tensor]],
    size: int,
) -> tuple[Tensor, Tensor]:
    """Return [B, d] the lower and the upper bound of the expectation, on the CPU.

    Args:
        limits: the bounds of f.
        probabilities: p of the distinct sequences of each source.
        known: f of these sequences.
        size: d.
    """
    seen = torch.zeros(len(probabilities), size, dtype=torch.float64, device="cpu")
    rest = torch.zeros(len(probabilities), 1, dtype=torch.float64, device="cpu")
    for b, (own, values) in enumerate(zip(probabilities, known, strict=True)):
        for y, p in own.items():
            seen[b] += p * values[y].reshape(-1).cpu()
        rest[b] = max(0.0, 1 - math.fsum(own.values()))
    low, high = (torch.where(rest > 0, seen + rest * end, seen) for end in limits)
    return low, high
