"""A conditional Poisson sample of a beam's candidates, and its inclusion probabilities.

The mathematics is that of ``cpsbs.conditional_poisson``, for the sources of a batch side by side.
From the first reading of the scores,

0. ``find_head`` finds the M largest candidates, and marks them in the chunks that it looks at;
1. ``without_head`` adds up these chunks again, without the head;
2. ``tail`` turns the sums of all chunks into masses to draw from, and adds them up;
3. ``draw`` finds the tilt and the law of the number of heads, flips the coins until it has K of
   them, and draws from the tail what the head leaves open;
4. ``inclusion`` gives log π of what was drawn.

The scores are read once more where something of a chunk is looked at, and nowhere else.
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
from cpsbs.backends.triton.kernels.head import find_head
from cpsbs.backends.triton.kernels.numbers import host_number
from cpsbs.backends.triton.kernels.poisson_programs import BLOCK, COLUMNS, TERMS
from cpsbs.conditional_poisson.bernoulli_sum import TAIL_ODDS_LIMIT, Circle, alias_free
from cpsbs.scores.reading import Chunks


@dataclass(frozen=True)
class _Tables:
    """What depends on K and N alone: the circle, padded to POINTS.

    Never freed, because graphs go on reading it.
    """

    cosines: Tensor
    sines: Tensor
    lifts: Tensor
    back: Tensor
    """[K + 1, POINTS, 2]; zero where there is no point."""
    tail_real: Tensor
    """[TERMS, POINTS] cos jθ − 1"""
    tail_imaginary: Tensor
    """[TERMS, POINTS] sin jθ"""
    binomials: Tensor
    """[TERMS, TERMS] C(m − 1, j − 1)"""

    @staticmethod
    @cache
    def of(k: int, n: int, device: torch.device) -> _Tables:
        circle = Circle.of(alias_free(k, n), k, device)
        count = len(circle.theta)
        missing = triton.next_power_of_2(count) - count
        terms = TERMS.value
        order = torch.arange(1, terms + 1, dtype=torch.float64, device=device)[:, None]

        def padded(x: Tensor, value: float = 0.0) -> Tensor:
            return torch.nn.functional.pad(x, (0, missing), value=value).contiguous()

        angle = order * circle.theta
        binomials = [[math.comb(j, i) for j in range(terms)] for i in range(terms)]
        return _Tables(
            padded(circle.cos),
            padded(circle.sin),
            padded(circle.lift, 1.0),
            torch.stack([padded(circle.back.real.T), padded(circle.back.imag.T)], -1).contiguous(),
            padded(-2 * (angle / 2).sin().square()),
            padded(angle.sin()),
            torch.tensor(binomials, dtype=torch.float64, device=device),
        )


@dataclass(frozen=True)
class Drawn:
    """A sample for each of R sources."""

    index: Tensor
    """[R, K] candidates; 0 where there are not enough."""
    present: Tensor
    """[R, K]"""
    log_inclusion: Tensor
    """[R, K]"""
    log_normalizer: Tensor
    """[R] log Z, over the candidates that are not certain."""


def draw(
    chunks: Chunks, offset: Tensor, odds: bool, k: int, seeds: Tensor, counts: Tensor
) -> Drawn:
    """Draw K of the candidates of each source; log p of one is its score plus offset [R, P].

    ``seeds`` and ``counts`` [R] are those of the random streams, which are counted on.
    """
    sources, parents, tokens = chunks.shape
    m, per_parent = min(8 * k + 40, parents * tokens), chunks.maxima.shape[-1]
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
        LENGTH=chunks.length, GROUP=group,
    )  # fmt: skip
    reach = empty(sources, parents * per_parent)
    partial = empty(sources, blocks, COLUMNS.value)
    programs.tail[(sources, blocks)](
        maxima, sums, head.values, offset, head.slot_of, again, reach, partial,
        inverse_temperature,
        m, slots, parents, per_parent, maxima.numel(), blocks,
        ODDS=odds, num_warps=8,
    )  # fmt: skip
    index = empty(sources, k, dtype=torch.int64)
    picked, present = empty(sources, k), empty(sources, k, dtype=torch.bool)
    tilts, probability, log_normalizer = empty(sources), empty(sources), empty(sources)
    turned = empty(sources, 2, points)
    n = parents * tokens
    programs.draw[(sources,)](
        scores, head.index, head.values, offset, head.slot_of, head.bits, reach, partial,
        seeds, counts,
        tables.cosines, tables.sines, tables.back, tables.tail_real, tables.tail_imaginary,
        tables.binomials,
        index, picked, present, tilts, turned, probability, log_normalizer, inverse_temperature,
        k, m, slots, parents, tokens, per_parent, blocks,
        -math.log(2 * n + 1), math.log(2 * k + 2), math.log(TAIL_ODDS_LIMIT),
        ODDS=odds, LENGTH=chunks.length, COINS=triton.next_power_of_2(m),
        PLACES=max(2, triton.next_power_of_2(k)), POINTS=points,
        BLOCKS=max(4, triton.next_power_of_2(blocks)),
        GROUP=min(16, max(2, triton.next_power_of_2(k))), num_warps=8,
    )  # fmt: skip
    log_inclusion = empty(sources, k)
    programs.inclusion[(sources, triton.cdiv(k, 16))](
        picked, present, tilts, turned, probability, head.values,
        tables.cosines, tables.sines, tables.lifts, log_inclusion,
        k, m,
        PLACES=16, COINS=triton.next_power_of_2(m), POINTS=points,
    )  # fmt: skip
    return Drawn(index, present, log_inclusion, log_normalizer)
