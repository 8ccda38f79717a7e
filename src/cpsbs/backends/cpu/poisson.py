"""Conditional Poisson samples of a beam's candidates by compiled loops (``poisson.c``).

The reference makes some three hundred torch calls for a selection. Here the same formulas run
source by source. The random numbers are drawn by torch, in the order of the reference, so that the
samples are the same.
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cpsbs.backends.cpu.compiled import INTEGER, POINTER, Fields, address
from cpsbs.backends.cpu.tables import scores_of
from cpsbs.conditional_poisson.bernoulli_sum import (
    TAIL_ODDS_LIMIT,
    Circle,
    circle_points,
    grid_cells,
    tail_waves,
    tilt_bounds,
    variance_bound,
)
from cpsbs.conditional_poisson.population import TAIL_SPREAD
from cpsbs.conditional_poisson.sampling import FIRST_TRIES
from cpsbs.conditional_poisson.weights import TRUNCATION_32, CandidateWeights
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Selection
from cpsbs.scores.largest import head_size
from cpsbs.scores.memory import block_size, shared_arange

CPU = torch.device("cpu")


class _Design(Fields):
    """``design`` in C: what depends on K and the number of candidates alone."""

    _fields_ = (
        *((name, INTEGER) for name in ("k", "size", "half", "cells", "odds")),
        *((name, INTEGER) for name in ("tries", "most_tries")),
        *((name, ctypes.c_double) for name in ("low", "high", "limit", "spread", "enough")),
        *((name, POINTER) for name in ("cosine", "sine", "lift", "rotation", "inverse")),
        *((name, POINTER) for name in ("wave", "turn")),
    )


class _Law(Fields):
    """``law`` in C: what is known of each source."""

    _fields_ = tuple(
        (name, POINTER) for name in ("item", "coin", "acceptance", "share", "turned", "number")
    )


@lru_cache(maxsize=64)
def design_fields(k: int, n: int, terms: int, odds: bool) -> Fields:
    """Return what depends on K, the number of candidates and of power sums, and the weights."""
    low, high = tilt_bounds(k, n)
    circle = Circle.of(circle_points(k, n), k, CPU)
    wave, turn = tail_waves(circle_points(k, n), terms, CPU)
    return _Design.of(
        k=k,
        size=head_size(k),
        half=len(circle.theta),
        cells=grid_cells(k, n),
        odds=odds,
        tries=min(FIRST_TRIES, _enough(k)),
        most_tries=_enough(k),
        low=low,
        high=high,
        limit=math.log(TAIL_ODDS_LIMIT),
        spread=TAIL_SPREAD,
        enough=TRUNCATION_32,
        cosine=circle.cos,
        sine=circle.sin,
        lift=circle.lift,
        rotation=torch.view_as_real(circle.rotation),
        inverse=torch.view_as_real(circle.inverse),
        wave=wave,
        turn=turn,
    )


def draws(sources: int, k: int, n: int, terms: int) -> bool:
    """Return whether samples of so many sources, candidates and power sums may be drawn here."""
    budget = 1 + block_size(CPU) // (1 + head_size(k))
    return 0 < 4 * head_size(k) < n and terms >= 2 and k >= 1 and sources <= budget


def _enough(k: int) -> int:
    """Return the most attempts that are made at a time."""
    return 4 * math.ceil(math.sqrt(variance_bound(k, head_size(k))))


def draw(compiled: Any, weights: CandidateWeights, k: int, streams: Streams) -> Selection | None:
    """Draw a sample for each source; None where some source is not an ordinary one.

    Then no random number has been drawn. Ordinary are sources with many candidates, none of which
    is certain or weighs so much that the tail needs more power sums or a larger head.
    """
    n, size, terms = weights.shape[1], head_size(k), weights.chunks.sums.shape[0]
    scores = scores_of(weights.chunks, weights.offset)
    if scores is None or not draws(weights.shape[0], k, n, terms):
        return None
    design = design_fields(k, n, terms, weights.odds)
    law = _empty_law(weights.shape[0], k, size, weights.chunks.maxima[0].numel(), design)
    given = [ctypes.addressof(x) for x in (scores, design, law)]
    if not compiled.poisson_laws(*given):
        return None
    index = torch.empty((weights.shape[0], k), dtype=torch.int64, device="cpu")
    heads = _flip(compiled, given[1:], index, size, n, streams)
    _fill(compiled, given, index, heads, weights.chunks.length, streams)
    log_inclusion = torch.empty(index.shape, dtype=torch.float64, device="cpu")
    compiled.poisson_inclusion(*given, address(index), address(log_inclusion))
    return Selection(index, torch.ones(index.shape, dtype=torch.bool, device="cpu"), log_inclusion)


def _empty_law(sources: int, k: int, size: int, chunks: int, design: Any) -> Fields:
    """Return memory for what is found of each source."""
    shapes = {
        "coin": size,
        "acceptance": k + 2,
        "share": chunks,
        "turned": 2 * design.half,
        "number": 4,
    }
    real = {
        name: torch.empty((sources, x), dtype=torch.float64, device="cpu")
        for name, x in shapes.items()
    }
    return _Law.of(item=torch.empty((sources, size), dtype=torch.int64, device="cpu"), **real)


def _flip(
    compiled: Any, given: list[int], index: Tensor, size: int, n: int, streams: Streams
) -> Tensor:
    """Put the items of the head that come up into ``index`` [R, K]; return their numbers [R]."""
    heads = torch.zeros(index.shape[0], dtype=torch.int64, device="cpu")
    batch = shared_arange(index.shape[0], CPU)
    budget = 1 + block_size(CPU) // (1 + size)
    enough = _enough(index.shape[1])
    tries = min(FIRST_TRIES, enough)
    while batch.shape[0] > 0:
        if not streams.separate:
            tries = max(1, min(budget // batch.shape[0], enough))
        uniform = streams.uniform(batch, (tries, size + 1))
        accepted = torch.empty(batch.shape[0], dtype=torch.bool, device="cpu")
        into = [address(x) for x in (uniform, index, heads, accepted)]
        compiled.poisson_flips(*given, address(batch), batch.shape[0], tries, *into)
        batch, tries = batch[~accepted], min(2 * tries, enough)
    return heads


def _fill(
    compiled: Any, given: list[int], index: Tensor, heads: Tensor, length: int, streams: Streams
) -> None:
    """Put items of the tail into the places of ``index`` [R, K] from ``heads`` [R] on."""
    k = index.shape[1]
    pending = (heads < k).nonzero()[:, 0]
    budget = 1 + block_size(CPU) // (k * length)
    for start in range(0, pending.shape[0], budget):
        left = pending[start : start + budget].contiguous()
        while left.shape[0] > 0:
            uniform = streams.uniform(left, (k, 2))
            filled = torch.empty(left.shape[0], dtype=torch.bool, device="cpu")
            into = [address(x) for x in (uniform, heads, index, filled)]
            compiled.poisson_fill(*given, address(left), left.shape[0], *into)
            left = left[~filled]
