"""A conditional Poisson sample of a beam's candidates, and its inclusion probabilities.

The mathematics is that of ``cpsbs.conditional_poisson``, for all sources of a batch at once. After
the reading of the scores,

0. ``find_head`` finds the m largest candidates, the head, and marks them in their chunks;
1. ``without_head`` adds up these chunks again, without the head;
2. ``tail`` turns the sums of all chunks into masses to draw from, and adds them up;
3. ``draw`` finds the tilt and the law of S, the number of coins that come up heads; it flips the
   coins of the head until the tail may have the other K − c, and draws these from the tail;
4. ``inclusion`` computes log π of what was drawn.

Scores are read again only inside of the chunks that a kernel looks into.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from cpsbs.backends.triton.kernels import POWER_SUMS
from cpsbs.backends.triton.kernels import poisson_programs as programs
from cpsbs.backends.triton.kernels.finding import find_head
from cpsbs.backends.triton.kernels.numbers import host_number
from cpsbs.backends.triton.kernels.poisson_programs import BLOCK, COLUMNS, TERMS
from cpsbs.conditional_poisson.bernoulli_sum import (
    TAIL_ODDS_LIMIT,
    Circle,
    circle_points,
    tail_waves,
    tilt_bounds,
)
from cpsbs.conditional_poisson.weights import binomials
from cpsbs.scores.largest import head_size
from cpsbs.scores.reading import Chunks

TAIL_WARPS = 8
"""Warps of a program of ``tail``"""

TAIL_REGISTERS = 128
"""Registers of a thread of ``tail``: with more, a multiprocessor would hold a single program"""

DRAW_WARPS = 16
"""Warps of a program of ``draw``"""

DRAWN = 32
"""Items of the tail that are drawn at a time"""


@dataclass(frozen=True)
class _Tables:
    """What depends on K and N alone: the points θ of ``Circle``, padded to POINTS of them.

    It is never freed, because CUDA graphs go on reading it.
    """

    cosines: Tensor
    """[POINTS] cos θ"""
    sines: Tensor
    """[POINTS] sin θ"""
    lifts: Tensor
    """[POINTS] ``Circle.lift``"""
    back: Tensor
    """[K + 1, POINTS, 2] ``Circle.inverse``, real and imaginary part; 0 where there is no point"""
    tail_real: Tensor
    """[TERMS, POINTS] cos jθ − 1"""
    tail_imaginary: Tensor
    """[TERMS, POINTS] sin jθ"""
    binomials: Tensor
    """[TERMS, TERMS] C(m − 1, j − 1)"""

    @staticmethod
    @cache
    def of(k: int, n: int, device: torch.device) -> _Tables:
        points, terms = circle_points(k, n), TERMS.value
        circle = Circle.of(points, k, device)
        count = len(circle.theta)
        missing = triton.next_power_of_2(count) - count

        def padded(x: Tensor, value: float = 0.0) -> Tensor:
            return torch.nn.functional.pad(x, (0, missing), value=value).contiguous()

        inverse = circle.inverse.T
        real, imaginary = tail_waves(points, terms, device)
        return _Tables(
            padded(circle.cos),
            padded(circle.sin),
            padded(circle.lift, 1.0),
            torch.stack([padded(inverse.real), padded(inverse.imag)], -1).contiguous(),
            padded(real),
            padded(imaginary),
            torch.tensor(binomials(terms), dtype=torch.float64, device=device),
        )


@dataclass(frozen=True)
class Drawn:
    """A sample for each of R sources."""

    index: Tensor
    """[R, K] the candidates; 0 where there are not enough"""
    present: Tensor
    """[R, K] whether there is a candidate"""
    log_inclusion: Tensor
    """[R, K] log π"""
    log_normalizer: Tensor
    """[R] log Z, over the candidates that are not certain"""


def draw(
    chunks: Chunks, offset: Tensor, odds: bool, k: int, seeds: Tensor, counts: Tensor
) -> Drawn:
    """Draw K of the candidates of each source; log p of one is its score plus offset [R, P].

    The weights are p/(1 − p) if ``odds`` is true, and p otherwise. ``seeds`` and ``counts`` [R] are
    those of the random streams; the counts advance by one.
    """
    sources, parents, tokens = chunks.shape
    m, per_parent = min(head_size(k), parents * tokens), chunks.maxima.shape[-1]
    head = find_head(chunks, offset, m, "odds" if odds else "probability")
    slots = head.chosen.shape[-1]
    blocks = triton.cdiv(parents * per_parent, BLOCK.value)
    device = offset.device
    inverse_temperature = host_number(1 / chunks.temperature, device)
    if len(chunks.sums) < POWER_SUMS:
        chunks = chunks.with_terms(POWER_SUMS)
    scores, offset = chunks.scores.contiguous(), offset.contiguous()
    maxima, sums = chunks.maxima.contiguous(), chunks.sums.contiguous()
    tables = _Tables.of(k, parents * tokens, device)
    points = len(tables.cosines)

    def empty(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    again = empty(sources, slots, TERMS.value)
    group = max(1, 1024 // chunks.length)
    programs.without_head[(sources, triton.cdiv(slots, group))](
        scores, head.chosen, head.bits, head.values, offset, again, inverse_temperature,
        m, slots, parents, tokens, per_parent,
        LENGTH=chunks.length, GROUP=group, TERMS=TERMS.value,
    )  # fmt: skip
    reach = empty(sources, parents * per_parent)
    partial = empty(sources, blocks, COLUMNS.value)
    programs.tail[(sources, blocks)](
        maxima, sums, head.values, offset, head.slot_of, again, reach, partial,
        inverse_temperature,
        m, slots, parents, per_parent, maxima.numel(), blocks,
        ODDS=odds, num_warps=TAIL_WARPS, maxnreg=TAIL_REGISTERS,
    )  # fmt: skip
    index = empty(sources, k, dtype=torch.int64)
    picked, present = empty(sources, k), empty(sources, k, dtype=torch.bool)
    tilts, probability, log_normalizer = empty(sources), empty(sources), empty(sources)
    turned = empty(sources, 2, points)
    programs.draw[(sources,)](
        scores, head.index, head.values, offset, head.slot_of, head.bits, reach, partial,
        seeds, counts,
        tables.cosines, tables.sines, tables.back, tables.tail_real, tables.tail_imaginary,
        tables.binomials,
        index, picked, present, tilts, turned, probability, log_normalizer, inverse_temperature,
        k, m, slots, parents, tokens, per_parent, blocks,
        *tilt_bounds(k, parents * tokens), math.log(TAIL_ODDS_LIMIT),
        ODDS=odds, LENGTH=chunks.length, COINS=triton.next_power_of_2(m),
        PLACES=max(2, triton.next_power_of_2(k)), POINTS=points,
        BLOCKS=max(4, triton.next_power_of_2(blocks)),
        GROUP=min(DRAWN, max(2, triton.next_power_of_2(k))), num_warps=DRAW_WARPS,
    )  # fmt: skip
    log_inclusion = empty(sources, k)
    programs.inclusion[(sources, triton.cdiv(k, 16))](
        picked, present, tilts, turned, probability, head.values,
        tables.cosines, tables.sines, tables.lifts, log_inclusion,
        k, m,
        PLACES=16, COINS=triton.next_power_of_2(m), POINTS=points,
    )  # fmt: skip
    return Drawn(index, present, log_inclusion, log_normalizer)
