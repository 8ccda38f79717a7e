"""Samples: flip the coins until K of them come up heads.

That is the definition of the design (the paper's appendix on conditional Poisson sampling), and at
the tilt of ``bernoulli_sum`` it succeeds with probability of order 1/√K. Only the head is flipped
coin by coin. With c heads there, K − c must come from the tail, which has a known probability
t_{K−c}: the attempt is accepted with probability t_{K−c} / max t. The K − c items are then drawn
from the tail independently, in proportion to their weights, all again if two coincide; given that
they are distinct, they have the conditional Poisson law of the tail.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cpsbs.conditional_poisson.bernoulli_sum import variance_bound
from cpsbs.conditional_poisson.population import Population, Tail
from cpsbs.randomness import Streams
from cpsbs.scores.memory import block_size, numbers


def draw(population: Population, samples: int, streams: Streams) -> Tensor:
    """[samples, R, K] positions of the items drawn, ascending."""
    rows, k = len(population.head), population.k
    row = numbers(rows, population.head.device).expand(samples, rows).flatten()
    accept = _tail_counts(population)
    picked = torch.empty((len(row), k), dtype=torch.int64, device=row.device)
    size = 1 + 4 * block_size(row.device) // (1 + population.head.shape[-1])
    for start in range(0, len(row), size):
        part, items = row[start : start + size], picked[start : start + size]
        count = _flip_head(population, accept, part, items, streams)
        if population.tail is not None:
            _fill_from_tail(population, population.tail, part, items, count, streams)
    return picked.view(samples, rows, k)


def _flip_head(
    population: Population, accept: Tensor, row: Tensor, picked: Tensor, streams: Streams
) -> Tensor:
    """Put the head's items, ascending, into ``picked`` [A, K] for each entry of ``row`` [A].

    Returns [A] how many there are. ``accept`` [R, K + 2] is the probability to accept a number of
    heads.
    """
    k, device = population.k, row.device
    p = torch.sigmoid(population.head + population.law.tilt[:, None])
    coins = p.shape[-1]
    chosen = torch.empty((len(row), coins), dtype=torch.bool, device=device)
    pending = numbers(len(row), device)
    if not population.plain:
        # Where only one subset is possible, no random number is used up.
        always = torch.where((population.forced == k)[:, None], math.inf, -math.inf)
        certain = (population.head == math.inf) | (population.head > always)
        chosen = certain[row]
        pending = (~population.determined[row]).nonzero()[:, 0]
    budget = 1 + block_size(device) // (1 + coins)
    enough = 4 * math.ceil(math.sqrt(variance_bound(k, coins)))
    for start in range(0, len(pending), budget):
        # In a search one or two attempts mostly do; flat weights need some √K of them.
        batch, tries = pending[start : start + budget], min(6, enough)
        while len(batch) > 0:
            source = row[batch]
            # What a stream of its own is asked for must not depend on the other rows.
            if not streams.separate:
                tries = max(1, min(budget // len(batch), enough))
            uniform = streams.uniform(source, (tries, coins + 1))
            flips = uniform[..., 1:] < p[source, None, :]
            heads = flips.sum(-1).clamp_(max=k + 1)
            accepted, attempt = (uniform[..., 0] < accept[source[:, None], heads]).max(dim=-1)
            done = accepted.nonzero()[:, 0]
            chosen[batch[done]] = flips[done, attempt[done]]
            batch, tries = batch[~accepted], min(2 * tries, enough)
    # The i-th head goes to place i; tails all go to one place too many, which is cut off.
    place = chosen.cumsum(-1)
    count = place[:, -1].clone() if coins else torch.zeros_like(row)
    places = torch.zeros((len(row), k + 1), dtype=torch.int64, device=device)
    places.scatter_(-1, place.sub_(1).masked_fill_(~chosen, k), population.head_index[row])
    picked.copy_(places[:, :k])
    return count


def _tail_counts(population: Population) -> Tensor:
    """[R, K + 2] t_{K−c} / max t for c = 0…K heads in the head, and 0 for more."""
    k = population.k
    out = population.head.new_zeros((len(population.head), k + 2))
    counts = population.law.tail_probabilities()
    if counts is None:
        out[:, k] = 1.0
    else:
        torch.div(counts, counts.amax(-1, keepdim=True), out=out[:, : k + 1])
    return out


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
    cumulative = _cumulative(tail)
    place = numbers(k, row.device)
    budget = 1 + block_size(row.device) // (k * tail.chunk)
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


def _cumulative(tail: Tail) -> Tensor:
    """[R·C] row number + the share of the row's tail up to this chunk: one ascending sequence, in
    which row + uniform finds the chunk for every row at once.
    """
    sums = tail.chunk_sums.cumsum(-1, dtype=torch.float64)
    row = numbers(len(sums), sums.device)[:, None]
    # A tail without weight is never drawn from; its share must only not be NaN.
    return (row + sums / sums[:, -1:].clamp(min=2.0**-1000)).flatten()


def _tail_items(
    population: Population,
    tail: Tail,
    cumulative: Tensor,
    row: Tensor,
    uniform: Tensor,
) -> Tensor:
    """[Q] one item of the tail for each entry of ``row`` [Q], in proportion to its weight.

    ``uniform`` [Q, 2] finds the chunk, and the item in it.
    """
    rows = len(population.head)
    # Rounded, row + uniform must stay below row + 1.
    target = (uniform[:, 0] - rows * 2.0**-52).clamp_(min=0).add_(row)
    chunk = torch.searchsorted(cumulative, target, right=True) - row * tail.chunk_sums.shape[-1]
    item, log_weight = population.weights.members(row, chunk, tail.chunk)
    head = population.head_index[row]
    found = torch.searchsorted(head, item).clamp_(max=head.shape[-1] - 1)
    excluded = head.gather(-1, found) == item
    weight = log_weight.sub_(tail.unit[row, None]).exp_().masked_fill_(excluded, 0.0).cumsum(-1)
    # Rounded, the level must stay below the total.
    level = uniform[:, 1] * weight[:, -1] * (1 - 2.0**-52)
    offset = (weight <= level[:, None]).sum(-1, keepdim=True)
    return item.gather(-1, offset)[:, 0]
