"""Inclusion probabilities from the law of the number of heads; everything on R rows.

    π_n     = p_n P(S₋ₙ = K − 1) / P(S = K)
    1 − π_n = q_n P(S₋ₙ = K)     / P(S = K)
    π_ij    = π_i · P(j | i) ,    where given i the rest is a design of K − 1 of the others

Each is computed at the tilt that makes its numerator large (see ``bernoulli_sum``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from cpsbs.conditional_poisson.bernoulli_sum import BernoulliSum
from cpsbs.conditional_poisson.population import Population, Tail
from cpsbs.scores.memory import block_size, working_memory


def log_inclusion_at(population: Population, y: Tensor) -> Tensor:
    """[..., R, m] log π of items with relative log-weights y [..., R, m]."""
    value = _log_inclusion(population.law, y)
    if population.plain:
        return value
    forced, positive = population.forced[:, None], population.positive[:, None]
    return _certain(value, y, forced, positive, population.k)


def log_inclusion(population: Population) -> Tensor:
    """[R, N] log π of all items."""
    head = log_inclusion_at(population, population.head)
    if population.tail is None:
        return head
    everything = _tail_log_inclusion(population, population.tail)
    return everything.scatter_(-1, population.head_index, head)


def log_exclusion_of_head(population: Population) -> Tensor:
    """[R, M] log(1 − π) of the head, to full relative accuracy."""
    law, y = population.law_above, population.head
    others = law.probability_without(y, fewer=0).log()
    log_q = logsigmoid(-y - law.tilt[:, None])
    value = (log_q + others - law.log_probability[:, None]).clamp(max=0.0)
    if population.plain:
        return value
    # Leaving an item out is taking it in the design of the M − K that are left out.
    m = y.shape[-1]
    never, not_always = m - population.positive[:, None], m - population.forced[:, None]
    return _certain(value, -y, never, not_always, m - population.k)


def log_inclusion_odds(population: Population) -> Tensor:
    """[R, N] log π/(1 − π) of all items, accurate at both ends."""
    log_pi = log_inclusion(population)
    log_not_pi = (-torch.expm1(log_pi)).log()
    log_not_pi.scatter_(-1, population.head_index, log_exclusion_of_head(population))
    return log_pi - log_not_pi


def log_conditional_inclusion(population: Population, y: Tensor) -> Tensor:
    """[R, m, m] log P(j | i) for items with relative log-weights y [R, m], i before j.

    Entries with i = j mean nothing, nor do those where i has probability zero.
    """
    k = population.k
    out = y.new_full((*y.shape, y.shape[-1]), -math.inf)
    if k < 2 or y.numel() == 0:
        return out
    other = y[:, None, :]
    positive = population.positive[:, None, None] - 1
    step = max(1, block_size(y.device) // (8 * population.head.numel()))
    for start in range(0, y.shape[-1], step):
        given = y[:, start : start + step]
        value = _log_inclusion(population.law_given(given), other)
        forced = population.forced[:, None] - (given == math.inf).long()
        out[:, start : start + step] = _certain(value, other, forced[..., None], positive, k - 1)
    return out


def joint_log_inclusion_at(population: Population, y: Tensor) -> Tensor:
    """[R, m, m] log P(i and j are both in) for items with relative log-weights y [R, m]."""
    single = log_inclusion_at(population, y)
    joint = single[..., None] + log_conditional_inclusion(population, y)
    joint = torch.where(single[..., None] == -math.inf, -math.inf, joint)
    joint.diagonal(dim1=-2, dim2=-1).copy_(single)
    return joint


def covariance_product(population: Population, vector: Tensor) -> Tensor:
    """[R, N] Σ_j Cov(i, j) v_j for v [R, N]; items that are certain have no covariance."""
    y = population.relative(population.log_weights)
    product = population.law.covariance_product(y, vector)
    free = y.isfinite() & ~population.determined[:, None]
    return torch.where(free, product, 0.0)


def _log_inclusion(law: BernoulliSum, y: Tensor) -> Tensor:
    others = law.probability_without(y, fewer=1).log_()
    log_p = logsigmoid(y + law.tilt[..., None])
    return (log_p + others - law.log_probability[..., None]).clamp_(max=0.0)


def _certain(value: Tensor, y: Tensor, forced: Tensor, positive: Tensor, k: int) -> Tensor:
    """``value`` = log π of items y, but exactly 0 or -inf where there is nothing to choose."""
    never, always = value.new_tensor(-math.inf), value.new_tensor(0.0)
    value = torch.where(y == math.inf, always, torch.where(y == -math.inf, never, value))
    value = torch.where((forced == k) & (y < math.inf), never, value)
    return torch.where((positive == k) & (y > -math.inf), always, value)


def _tail_log_inclusion(population: Population, tail: Tail) -> Tensor:
    """[R, N] log π_n by a power series in the odds o_n = w_n e^s, meant for the tail.

    P(S₋ₙ = K − 1) q_n = Σ_j (−o_n)^j P(S = K − 1 − j), as 1/(1 + o z) expands. The terms fall off
    like o^j, and the odds in the tail are what ``population`` chose its power sums by: the same
    number of terms is enough.
    """
    law, k, x = population.law, population.k, population.log_weights
    rows, n = x.shape
    out = torch.empty((rows, n), dtype=torch.float64, device=x.device)
    if k == 0:
        return out.fill_(-math.inf)
    terms = min(k, tail.powers.sums.shape[-1] + 1)
    series = law.probabilities(range(1, terms + 1))
    constant = series[:, :1].log() - law.log_probability[:, None]
    series = series / series[:, :1]
    series[:, 1::2] *= -1
    reference, tilt = population.reference[:, None], law.tilt[:, None]
    columns = min(n, block_size(x.device))
    height = max(1, block_size(x.device) // columns)
    height = min(height, max(rows, 1))
    buffer = working_memory(2 * height * columns, x.device).view(2, height, columns)
    for top in range(0, rows, height):
        row = slice(top, top + height)
        for left in range(0, n, columns):
            given = x[row, left : left + columns]
            log_odds, odds = buffer[:, : len(given), : given.shape[1]]
            log_odds.copy_(given).sub_(reference[row]).add_(tilt[row])
            torch.exp(log_odds, out=odds)
            value = out[row, left : left + columns]
            value[:] = series[row, -1:]
            for j in range(terms - 2, -1, -1):
                value.mul_(odds).add_(series[row, j : j + 1])
            value.log_().add_(log_odds).add_(constant[row])
    if not population.plain:
        out[population.forced == k] = -math.inf
    return out
