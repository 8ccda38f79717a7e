"""Samples, and the probability that an item is in one; everything is for R rows.

**Samples.** Flip the coins until K of them come up heads: that is the definition of the design (the
paper's appendix on conditional Poisson sampling), and at the tilt of ``bernoulli_sum`` it succeeds
with probability of order 1/√K. Only the head is flipped coin by coin. With c heads there, the other
K − c must come from the tail, which has a known probability t_{K−c}: the attempt is accepted with
probability t_{K−c} / max t. The K − c items are then drawn from the tail independently, in
proportion to their weights, all again if two coincide; given that they are distinct, they have the
conditional Poisson law of the tail.

**Inclusion.** From the law of the number of heads S, and S₋ₙ without coin n,

    π_n     = p_n P(S₋ₙ = K − 1) / P(S = K) ,
    1 − π_n = q_n P(S₋ₙ = K)     / P(S = K) ,
    π_ij    = π_i · P(j | i) ,

where the design given i is the one that draws K − 1 of the other items. Each is computed at the
tilt that makes its numerator large. y stands for relative log-weights (``population``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from cpsbs.conditional_poisson.bernoulli_sum import BernoulliSum, variance_bound
from cpsbs.conditional_poisson.population import Population, Tail
from cpsbs.randomness import BELOW_ONE, Streams
from cpsbs.scores.memory import block_size, scratch_buffer, shared_arange

FIRST_TRIES = 6
"""How many attempts are made at first. In a search one or two are usually enough; flat weights need
some √K of them."""

# ---------------------------------------------------------------------- samples


def draw(population: Population, samples: int, streams: Streams) -> Tensor:
    """Draw samples, and return the items [samples, R, K] of each in ascending order."""
    rows, k = len(population.head), population.k
    row = shared_arange(rows, population.head.device).expand(samples, rows).flatten()
    acceptance = _acceptance(population)
    picked = torch.empty((len(row), k), dtype=torch.int64, device=row.device)
    size = 1 + 4 * block_size(row.device) // (1 + population.head.shape[-1])
    for start in range(0, len(row), size):
        part, items = row[start : start + size], picked[start : start + size]
        count = _flip_head(population, acceptance, part, items, streams)
        if population.tail is not None:
            _fill_from_tail(population, population.tail, part, items, count, streams)
    return picked.view(samples, rows, k)


def _acceptance(population: Population) -> Tensor:
    """Return [R, K + 2] the probability of accepting c heads in the head.

    It is t_{K−c} / max t for c = 0…K, and 0 for more.
    """
    k = population.k
    out = population.head.new_zeros((len(population.head), k + 2))
    counts = population.law.tail_probabilities()
    if counts is None:
        out[:, k] = 1.0
    else:
        torch.div(counts, counts.amax(-1, keepdim=True), out=out[:, : k + 1])
    return out


def _flip_head(
    population: Population, acceptance: Tensor, row: Tensor, picked: Tensor, streams: Streams
) -> Tensor:
    """Put items of the head, in ascending order, into ``picked`` [A, K] for the rows [A].

    Returns:
        [A] how many there are.
    """
    k, device = population.k, row.device
    p = torch.sigmoid(population.head + population.law.tilt[:, None])
    coins = p.shape[-1]
    chosen = torch.empty((len(row), coins), dtype=torch.bool, device=device)
    pending = shared_arange(len(row), device)
    if not population.regular:
        # Where only one subset is possible, no random number is used up.
        always = torch.where((population.forced == k)[:, None], math.inf, -math.inf)
        certain = (population.head == math.inf) | (population.head > always)
        chosen = certain[row]
        pending = (~population.determined[row]).nonzero()[:, 0]
    budget = 1 + block_size(device) // (1 + coins)
    enough = 4 * math.ceil(math.sqrt(variance_bound(k, coins)))
    for start in range(0, len(pending), budget):
        batch, tries = pending[start : start + budget], min(FIRST_TRIES, enough)
        while len(batch) > 0:
            source = row[batch]
            # How much is drawn from a row's own stream must not depend on the other rows.
            if not streams.separate:
                tries = max(1, min(budget // len(batch), enough))
            uniform = streams.uniform(source, (tries, coins + 1))
            flips = uniform[..., 1:] < p[source, None, :]
            heads = flips.sum(-1).clamp_(max=k + 1)
            accepted, attempt = (uniform[..., 0] < acceptance[source[:, None], heads]).max(dim=-1)
            done = accepted.nonzero()[:, 0]
            chosen[batch[done]] = flips[done, attempt[done]]
            batch, tries = batch[~accepted], min(2 * tries, enough)
    # The i-th item that was chosen goes to place i; all others go to place K, which is cut off.
    place = chosen.cumsum(-1)
    count = place[:, -1].clone() if coins else torch.zeros_like(row)
    places = torch.zeros((len(row), k + 1), dtype=torch.int64, device=device)
    places.scatter_(-1, place.sub_(1).masked_fill_(~chosen, k), population.head_index[row])
    picked.copy_(places[:, :k])
    return count


def _fill_from_tail(
    population: Population,
    tail: Tail,
    row: Tensor,
    picked: Tensor,
    count: Tensor,
    streams: Streams,
) -> None:
    """Put items of the tail into ``picked`` [A, K] from place ``count`` [A] on, and sort."""
    k = population.k
    pending = (count < k).nonzero()[:, 0]
    if len(pending) == 0:
        return
    cumulative = _cumulative_chunks(tail)
    place = shared_arange(k, row.device)
    budget = 1 + block_size(row.device) // (k * tail.chunk_length)
    for start in range(0, len(pending), budget):
        batch = pending[start : start + budget]
        while len(batch) > 0:
            owner, slot = (place >= count[batch, None]).nonzero(as_tuple=True)
            source, drawn = row[batch], picked[batch]
            uniform = streams.uniform(source, (k, 2))[owner, slot]
            drawn[owner, slot] = _tail_items(population, tail, cumulative, source[owner], uniform)
            drawn = drawn.sort(dim=-1).values
            distinct = (drawn[:, 1:] != drawn[:, :-1]).all(-1)
            picked[batch[distinct]] = drawn[distinct]
            batch = batch[~distinct]


def _cumulative_chunks(tail: Tail) -> Tensor:
    """Return [R·C] the row number + the share of the row's tail up to the end of each chunk.

    That is one ascending sequence, in which row + uniform finds a chunk of every row at once.
    """
    sums = tail.chunk_sums.cumsum(-1, dtype=torch.float64)
    row = shared_arange(len(sums), sums.device)[:, None]
    # A tail without weight is never drawn from, but its share must not be NaN.
    return (row + sums / sums[:, -1:].clamp(min=2.0**-1000)).flatten()


def _tail_items(
    population: Population,
    tail: Tail,
    cumulative: Tensor,
    row: Tensor,
    uniform: Tensor,
) -> Tensor:
    """Return [Q] one item of the tail of each of the rows [Q], in proportion to its weight.

    The two numbers of ``uniform`` [Q, 2] find a chunk, and an item in it.
    """
    rows = len(population.head)
    # After rounding, row + uniform must stay below row + 1.
    target = (uniform[:, 0] - rows * 2.0**-52).clamp_(min=0).add_(row)
    chunk = torch.searchsorted(cumulative, target, right=True) - row * tail.chunk_sums.shape[-1]
    item, log_weight = population.weights.members(row, chunk, tail.chunk_length)
    head = population.head_index[row]
    found = torch.searchsorted(head, item).clamp_(max=head.shape[-1] - 1)
    in_head = head.gather(-1, found) == item
    weight = log_weight.sub_(tail.unit[row, None]).exp_().masked_fill_(in_head, 0.0).cumsum(-1)
    level = uniform[:, 1] * weight[:, -1] * BELOW_ONE
    offset = (weight <= level[:, None]).sum(-1, keepdim=True)
    return item.gather(-1, offset)[:, 0]


# ---------------------------------------------------------------------- inclusion


def log_inclusion_at(population: Population, y: Tensor) -> Tensor:
    """Return [..., R, m] log π of items with relative log-weights y [..., R, m]."""
    value = _log_inclusion(population.law, y)
    if population.regular:
        return value
    forced, positive = population.forced[:, None], population.positive[:, None]
    return _with_certainties(value, y, forced, positive, population.k)


def log_inclusion(population: Population) -> Tensor:
    """Return [R, N] log π of all items."""
    head = log_inclusion_at(population, population.head)
    if population.tail is None:
        return head
    everything = _tail_log_inclusion(population, population.tail)
    return everything.scatter_(-1, population.head_index, head)


def log_exclusion_of_head(population: Population) -> Tensor:
    """Return [R, M] log(1 − π) of the head, to full relative accuracy."""
    law, y = population.law_above, population.head
    others = law.probability_without(y, fewer=0).log()
    log_q = logsigmoid(-y - law.tilt[:, None])
    value = (log_q + others - law.log_probability[:, None]).clamp(max=0.0)
    if population.regular:
        return value
    # The M − K items that are left out are a conditional Poisson sample too, with weights 1/w.
    m = y.shape[-1]
    never, not_always = m - population.positive[:, None], m - population.forced[:, None]
    return _with_certainties(value, -y, never, not_always, m - population.k)


def log_inclusion_odds(population: Population) -> Tensor:
    """Return [R, N] log π/(1 − π) of all items, accurate at both ends."""
    log_pi = log_inclusion(population)
    log_not_pi = (-torch.expm1(log_pi)).log()
    log_not_pi.scatter_(-1, population.head_index, log_exclusion_of_head(population))
    return log_pi - log_not_pi


def log_conditional_inclusion(population: Population, y: Tensor) -> Tensor:
    """Return [R, m, m] log P(j | i) for items with relative log-weights y [R, m], i before j.

    Entries with i = j have no meaning, nor have those where i has probability zero.
    """
    k = population.k
    out = y.new_full((*y.shape, y.shape[-1]), -math.inf)
    if k < 2 or y.numel() == 0:
        return out
    other = y[:, None, :]
    positive = population.positive[:, None, None] - 1
    step = max(1, block_size(y.device) // (8 * population.head.numel()))
    for start in range(0, y.shape[-1], step):
        part = slice(start, start + step)
        given = y[:, part]
        value = _log_inclusion(population.law_given(given), other)
        forced = (population.forced[:, None] - (given == math.inf).long())[..., None]
        out[:, part] = _with_certainties(value, other, forced, positive, k - 1)
    return out


def joint_log_inclusion_at(population: Population, y: Tensor) -> Tensor:
    """Return [R, m, m] log P(i and j are both in) for relative log-weights y [R, m]."""
    single = log_inclusion_at(population, y)
    joint = single[..., None] + log_conditional_inclusion(population, y)
    joint = torch.where(single[..., None] == -math.inf, -math.inf, joint)
    joint.diagonal(dim1=-2, dim2=-1).copy_(single)
    return joint


def covariance_product(population: Population, vector: Tensor) -> Tensor:
    """Return [R, N] Σ_j Cov(i, j) v_j for v [R, N]; items that are certain have no covariance."""
    y = population.relative(population.log_weights)
    product = population.law.covariance_product(y, vector)
    free = y.isfinite() & ~population.determined[:, None]
    return torch.where(free, product, 0.0)


def _log_inclusion(law: BernoulliSum, y: Tensor) -> Tensor:
    """Return log p_n + log P(S₋ₙ = K − 1) − log P(S = K)."""
    others = law.probability_without(y, fewer=1).log_()
    log_p = logsigmoid(y + law.tilt[..., None])
    return (log_p + others - law.log_probability[..., None]).clamp_(max=0.0)


def _with_certainties(value: Tensor, y: Tensor, forced: Tensor, positive: Tensor, k: int) -> Tensor:
    """Return ``value`` = log π of items y, but exactly 0 or -inf where there is no choice."""
    never, always = value.new_tensor(-math.inf), value.new_tensor(0.0)
    value = torch.where(y == math.inf, always, torch.where(y == -math.inf, never, value))
    value = torch.where((forced == k) & (y < math.inf), never, value)
    return torch.where((positive == k) & (y > -math.inf), always, value)


def _tail_log_inclusion(population: Population, tail: Tail) -> Tensor:
    """Return [R, N] log π_n by a power series in the odds o_n = w_n e^s; right in the tail only.

    P(S₋ₙ = K − 1) q_n = Σ_j (−o_n)^j P(S = K − 1 − j), as 1/(1 + o z) expands. The terms fall off
    like o^j, and the odds in the tail are those by which the number of power sums was chosen: the
    same number of terms is enough.
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
    buffer = scratch_buffer(2 * height * columns, x.device).view(2, height, columns)
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
    if not population.regular:
        out[population.forced == k] = -math.inf
    return out
