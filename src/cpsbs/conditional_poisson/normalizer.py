"""The normaliser and the entropy, both measured from the most probable subset, for R rows.

Let Y* be the K items of largest weight. In terms of the coins (see ``cpsbs.conditional_poisson``),

    Q(Y*) = Π_{n ∈ Y*} p_n Π_{n ∉ Y*} q_n / P(S = K) ,
    log Z = Σ_{n ∈ Y*} log w_n − log Q(Y*) .
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from cpsbs.conditional_poisson.population import Population
from cpsbs.conditional_poisson.sampling import log_exclusion_of_head


def log_normalizer(population: Population) -> Tensor:
    """Return [R] log Z of the weights as they were given, over the items that are not forced."""
    chosen = population.in_top & (population.head < math.inf)
    row = torch.arange(len(chosen), device=chosen.device)[:, None]
    log_weights = population.weights.take(row, population.head_index)
    # Scaled down so that no partial sum overflows; scaling by a power of two is exact.
    part = 0.5 ** population.k.bit_length()
    product = torch.where(chosen, log_weights * part, 0.0).sum(-1) / part
    return product + surprisal_of_top(population)


def surprisal_of_top(population: Population) -> Tensor:
    """Return [R] −log Q(Y*), with an absolute error of some M·1e-16."""
    law = population.law
    log_odds = population.head + law.tilt[:, None]
    lost = logsigmoid(torch.where(population.in_top, log_odds, -log_odds)).sum(-1)
    value = law.log_probability - lost
    if population.tail is not None:
        value = value + population.tail.powers.log_terms(law.tilt).sum(-1)
    return torch.where(population.determined, 0.0, value.clamp(min=0.0))


def log_prob(population: Population, y: Tensor) -> Tensor:
    """Return [..., R] log Q(Y) of the subsets with relative log-weights y [..., R, K].

    The i-th largest of Y is at most the i-th largest of all, so that with both in order

        log Q(Y) = log Q(Y*) + Σ_i (y_i − y*_i)

    is a sum of terms that are not positive: nothing cancels.
    """
    y = y.sort(dim=-1, descending=True).values
    best = population.ranked[:, 1 : population.k + 1]
    # Without a forced item the subset is impossible; with it the item changes nothing.
    forced = best == math.inf
    loss = torch.where(forced, torch.where(y == math.inf, 0.0, -math.inf), y - best).sum(-1)
    return loss - surprisal_of_top(population)


def entropy(population: Population, log_pi: Tensor) -> Tensor:
    """Return [R] the entropy H = log Z − Σ π_n x_n, from log π [R, N] and x = log w.

    It is computed as a sum of terms that are not negative, so that small entropies keep their
    digits: with c the K-th largest log-weight,

        H = −log Q(Y*) + Σ_{n ∈ Y*} (1 − π_n)(x_n − c) + Σ_{n ∉ Y*} π_n (c − x_n) .
    """
    top = population.in_top & (population.head < math.inf)
    left_out = log_exclusion_of_head(population).exp()
    inside = torch.where(top, left_out * population.head, 0.0).sum(-1)
    depth = -population.relative(population.log_weights)
    outside = torch.where((depth > 0) & (depth < math.inf), depth * log_pi.exp(), 0.0).sum(-1)
    total = _small_surprisal_of_top(population) + inside + outside
    return torch.where(population.determined, 0.0, total)


def _small_surprisal_of_top(population: Population) -> Tensor:
    """Return [R] −log Q(Y*), to full relative accuracy also where it is tiny.

    1/Q(Y*) = Σ_d e_d(1/w in Y*) e_d(w outside), with d the number of items exchanged. Where the
    term d = 1 is small the others fall off faster than its powers, and Newton's identities give
    them.
    """
    top, rest = population.in_top & (population.head < math.inf), ~population.in_top
    order = torch.arange(1, 9, device=top.device)[:, None, None]
    lost = torch.where(top, (-population.head * order).exp(), 0.0).sum(-1)
    gained = torch.where(rest, (population.head * order).exp(), 0.0).sum(-1)
    if population.tail is not None:
        powers = population.tail.powers
        for j in range(min(8, powers.sums.shape[-1])):
            gained[j] += powers.sums[:, j] * (powers.largest * (j + 1)).exp()
    exchanged = (_elementary(lost) * _elementary(gained)).sum(0).log1p()
    small = lost[0] * gained[0] < 0.25
    return torch.where(small, exchanged, surprisal_of_top(population))


def _elementary(powers: Tensor) -> Tensor:
    """Return [m, ...] the elementary symmetric polynomials e_1…e_m from power sums [m, ...].

    By Newton's identities, d e_d = Σ_{j ≤ d} (−1)^{j−1} e_{d−j} P_j.
    """
    out: list[Tensor] = [torch.ones_like(powers[0])]
    for d in range(1, len(powers) + 1):
        terms = [(-1) ** (j - 1) * out[d - j] * powers[j - 1] for j in range(1, d + 1)]
        out.append(torch.stack(terms).sum(0) / d)
    return torch.stack(out[1:])
