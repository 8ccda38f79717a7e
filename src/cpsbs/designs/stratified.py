"""Stratified sampling: the inclusion probabilities of ``targets``, met exactly, parent by parent.

At every step the candidates have weights u and target inclusion probabilities π = min(1, c·u) that
sum to K. Heavy candidates, with π = 1, are kept. Each parent is a stratum: with μ_b the sum of the
targets of its light candidates, parent b gets ⌊μ_b⌋ or ⌈μ_b⌉ of the places that are left, by
systematic sampling over the parents. Inside a parent, sampling is systematic too: its light
candidates lie one after the other on [0, μ_b), each on an interval as long as its target, and the
parent's n_b places go to the candidates on which the points s, s + 1, … fall, with s uniform given
that n_b points fall on [0, μ_b). So every candidate is picked with exactly its target probability,
every light pick gets the weight 1/c, and the weights of a beam sum to one. The weights
p / Π_t π_t are unbiased as those of every design with known π_t; here a sequence has the same π on
every path, min(1, c p).

Order matters in systematic sampling. On [0, μ_b) the probable candidates, those among the K
largest, come first, and the others follow in chunks. The probable candidates, the chunks and the
tokens of a chunk are each in random order, so that equally spaced points never keep step with f.
The random order of the probable candidates depends on what they are (parent and token), not on
their ranks: candidates of nearly equal probability exchange ranks with the last digit of a score,
and the draw must not depend on that.

With no heavy candidate and one place for each parent, every hypothesis goes on as an ancestral
sample; with little entropy, the design enumerates. The offsets s of the parents are spread over
[0, 1) as evenly as possible, in random order: a single offset for all would make all hypotheses
lucky or unlucky together. Each parent takes up a share of [0, 1) that depends on how much there is
to choose among its light candidates, so that it makes no difference whether a candidate with
c·u = 1 is called heavy or light.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cpsbs.backends.base import Rule
from cpsbs.designs.base import DrawingDesign
from cpsbs.designs.rounding import INSIDE, SHARE, START, TRACE, event_variance, two_valued
from cpsbs.designs.targets import FORBIDDEN, Targets, find_targets
from cpsbs.designs.variance import DrawnSequences, difference_variance, infinite_freedom
from cpsbs.randomness import BELOW_ONE, Streams, shuffle_keys
from cpsbs.scores.candidates import Candidates, Selection

FULL_SHARE = 0.05
"""Parents whose light picks would have at least this variance, if they were independent, take up
full shares when offsets are spread; others take up less, in proportion."""


@dataclass(frozen=True, repr=False, eq=False)
class Stratified(DrawingDesign):
    """Systematic sampling, in which every prefix gets as many extensions as its weight deserves."""

    name = "stratified"
    summary = "every prefix gets as many extensions as its weight deserves; best for estimates"
    trace = TRACE

    def recordable(self, k: int) -> bool:
        """Return True, because selecting never synchronises with the host."""
        return True

    def begin(self, k: int, streams: Streams, sources: Tensor) -> Mapping[str, Tensor]:
        """Return zeros, as for picks that are certain."""
        return _certain(torch.zeros((len(sources), 1), dtype=torch.float64, device=sources.device))

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        """Draw K candidates of every source, or keep all of a source that has at most K.

        Either way they are in the order of the tree, along which parents get their places.
        """
        selection = super().select(candidates, k, streams, joint)
        if selection.state or selection.log_inclusion is None:
            return selection
        _, parents, tokens = candidates.shape
        last = selection.index.masked_fill(~selection.present, parents * tokens)
        order = last.argsort(dim=-1, stable=True)
        return replace(  # nothing was drawn: all inclusion probabilities are one
            selection,
            index=selection.index.gather(-1, order),
            present=selection.present.gather(-1, order),
            state=_certain(torch.zeros_like(selection.log_inclusion)),
        )

    def rule(self) -> Rule:
        """Return the rule of stratified sampling."""
        return Rule("stratified", full_share=FULL_SHARE)

    def draw(self, candidates: Candidates, k: int, streams: Streams, joint: bool) -> Selection:
        """Keep the heavy candidates, and draw light ones parent by parent."""
        fused = candidates.chunks.backend.draw_stratified(
            candidates, k, streams, FULL_SHARE, FORBIDDEN
        )
        return self._by_torch(candidates, k, streams) if fused is None else fused

    def _by_torch(self, candidates: Candidates, k: int, streams: Streams) -> Selection:
        targets = find_targets(candidates, k)
        sources, parents, tokens = candidates.shape
        slot = torch.arange(k, device=targets.index.device)
        is_heavy = slot < targets.heavy[:, None]
        row = torch.arange(sources, device=slot.device)
        pieces = (3, 2 * parents, targets.chunk_sums.shape[-1], targets.chunk)
        drawn, offsets, *shuffles = streams.uniform(row, (sum(pieces),)).split(pieces, dim=-1)
        of_chunks, in_chunk = (x.argsort(-1) for x in shuffles)
        of_largest = shuffle_keys(targets.index, drawn[:, 1:2]).argsort(-1)

        # On [0, μ_b) lie the light candidates among the K largest, then all others by chunks.
        light = (targets.scale[:, None] * targets.largest * ~is_heavy).gather(-1, of_largest)
        known = targets.index.gather(-1, of_largest)
        own = (known // tokens)[:, None, :] == torch.arange(parents, device=slot.device)[:, None]
        largest = torch.where(own, light[:, None, :], 0.0).cumsum(-1)
        sums = targets.scale[:, None, None] * targets.chunk_sums
        chunks = sums.gather(-1, of_chunks[:, None].expand_as(sums)).cumsum(-1)
        size = largest[..., -1] + chunks[..., -1]
        number = slot - targets.heavy[:, None]  # the number of a place for a light candidate
        end = size.cumsum(-1)
        begin, total = end - size, end[:, -1:].clamp(min=2.0**-1000)
        places = (k - targets.heavy[:, None]).clamp(min=1)
        point = (drawn[:, :1] + number) / places * total
        parent = torch.searchsorted(end, point * BELOW_ONE, right=True).clamp_(max=parents - 1)

        # How many places the parent of a pick has, and how many of them come before this one.
        same = (parent[:, :, None] == parent[:, None, :]) & ~is_heavy[:, None, :]
        before = (same & (slot < slot[:, None])).sum(-1)
        times = torch.zeros_like(size).scatter_add_(-1, parent, (~is_heavy).to(size.dtype))
        # The variance of independent light picks measures how much there is to choose.
        choice = torch.where(own, (light * (1 - light))[:, None, :], 0.0).sum(-1) + chunks[..., -1]
        share = torch.where(times > 0, (choice / FULL_SHARE).clamp(max=1.0), 0.0)
        start = _starts(size, times, share, drawn[:, 2:], offsets.view(sources, 2, parents))
        mu = size.gather(-1, parent)
        at = (start.gather(-1, parent) + before).minimum(mu * BELOW_ONE)

        among, end = _rows(largest, parent), _rows(chunks, parent)
        found = torch.searchsorted(among, at[..., None], right=True)[..., 0].clamp_(max=k - 1)
        beyond = at - among[..., -1]
        index = torch.where(
            beyond < 0,
            known.gather(-1, found),
            _in_chunks(candidates, targets, end, of_chunks, in_chunk, parent, beyond),
        )
        is_heavy = is_heavy | targets.few[:, None]  # with at most K candidates, all are kept
        index = torch.where(is_heavy, targets.index, index)
        index, order = index.sort(dim=-1)
        score = candidates.chunks.take_along(index)
        log_target = score + targets.offset.gather(-1, index // tokens)
        present = (log_target > -math.inf) | ~targets.few[:, None]
        log_target = (log_target + targets.log_scale[:, None]).clamp(max=0.0)
        is_heavy = is_heavy.gather(-1, order)
        # What the error of an event is computed from; see cpsbs.designs.rounding.
        parent = index // tokens
        start = (begin.gather(-1, parent) * places / total) % 1.0
        inside = (times / size).gather(-1, parent).log() + log_target
        state = {
            START: start,
            INSIDE: inside.clamp(max=0.0),
            SHARE: (-targets.log_scale).exp()[:, None].expand_as(start),
        }
        return Selection(
            index=index,
            present=present,
            log_inclusion=torch.where(is_heavy, 0.0, log_target),
            state={name: torch.where(is_heavy, 0.0, x) for name, x in state.items()},
        )

    def drawn_log_inclusion(self, candidates: Candidates, k: int, index: Tensor) -> Tensor:
        """Return [B, n] the logarithm of the targets, which are met exactly."""
        targets = find_targets(candidates, k)
        log_u = candidates.chunks.take_along(index)
        log_u = log_u + targets.offset.gather(-1, candidates.parent_of(index))
        return (
            (log_u + targets.log_scale[:, None])
            .clamp(max=0.0)
            .masked_fill(targets.few[:, None], 0.0)
        )

    def variance(
        self, drawn: DrawnSequences, weight: Tensor, values: Tensor, log_norm: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Return the variance of the light picks by successive differences along the tree.

        Heavy sequences are certain and add nothing. See ``cpsbs.designs.variance``. For events it
        comes from what the search knows of its roundings; see ``cpsbs.designs.rounding``.
        """
        if drawn.log_inclusion is None:
            return None, infinite_freedom(weight)
        light = drawn.present & (drawn.log_inclusion < 0)
        variance, freedom = difference_variance(drawn, light, weight, values)
        if drawn.trace is None:
            return variance, freedom
        events = two_valued(drawn, values) & (light.sum(1, keepdim=True) > 1)
        if bool(events.any()):
            known = event_variance(drawn, drawn.trace, light, weight, values, variance)
            variance = torch.where(events, known, variance)
        return variance, freedom


def _certain(zeros: Tensor) -> dict[str, Tensor]:
    """Return the state of picks that are certain."""
    return {name: zeros.clone() for name in TRACE}


def _starts(size: Tensor, times: Tensor, share: Tensor, turn: Tensor, uniform: Tensor) -> Tensor:
    """Return [R, P] the offset s of each parent.

    The parents divide a circle among them in random order, each taking an arc in proportion to its
    share. A uniform point of the parent's arc, on the circle turned at random, is uniform on
    [0, 1); s is that point mapped to the offsets with which the parent gets its number of places.

    Args:
        size: [R, P] μ_b.
        times: [R, P] n_b, the number of places of each parent.
        share: [R, P] the shares of the circle.
        turn: [R, 1] by how much the circle is turned, uniform in [0, 1).
        uniform: [R, 2, P] random numbers for the order, and for the points.
    """
    order = uniform[:, 0].argsort(-1)
    ends = torch.empty_like(share).scatter_(-1, order, share.gather(-1, order).cumsum(-1))
    whole = share.sum(-1, keepdim=True).clamp(min=2.0**-1000)
    even = ((ends - uniform[:, 1] * share) / whole + turn) % 1.0
    rest = size - size.floor()
    return torch.where(times > size.floor(), even * rest, rest + even * (1 - rest))


def _rows(table: Tensor, parent: Tensor) -> Tensor:
    """Return [R, K, m] the rows of the table [R, P, m] of these parents [R, K]."""
    return table.gather(1, parent[..., None].expand(-1, -1, table.shape[-1]))


def _in_chunks(
    candidates: Candidates,
    targets: Targets,
    end: Tensor,
    of_chunks: Tensor,
    in_chunk: Tensor,
    parent: Tensor,
    at: Tensor,
) -> Tensor:
    """Return [R, K] the candidates at given points among those that are not the K largest.

    Args:
        candidates: the candidates.
        targets: their targets.
        end: [R, K, C] where the chunks of the parent end, in the random order.
        of_chunks: [R, C] the random order of the chunks.
        in_chunk: [R, m] the random order of the tokens in a chunk.
        parent: [R, K] the parents.
        at: [R, K] the points, counted from where the K largest candidates of the parent end.
    """
    tokens = candidates.shape[-1]
    chunk = torch.searchsorted(end, at[..., None] * BELOW_ONE, right=True)
    chunk = chunk.clamp_(max=end.shape[-1] - 1)
    begin = torch.where(chunk > 0, end.gather(-1, (chunk - 1).clamp(min=0)), 0.0)[..., 0]
    chunk = of_chunks.gather(-1, chunk[..., 0])[..., None]
    token = chunk * targets.chunk + in_chunk[:, None, :]
    index = parent[..., None] * tokens + token.clamp(max=tokens - 1)
    known = targets.index.sort(dim=-1).values
    place = torch.searchsorted(known, index.flatten(1)).clamp_(max=known.shape[-1] - 1)
    taken = (known.gather(-1, place) == index.flatten(1)).view(index.shape)
    score = candidates.chunks.take_along(index.flatten(1)).view(index.shape)
    shift = targets.offset.gather(-1, parent) - targets.reference[:, None]
    weight = (score + shift[..., None]).exp_().masked_fill_(taken | (token >= tokens), 0.0)
    until = weight.cumsum(-1)
    level = ((at - begin) / targets.scale[:, None]).clamp(min=0).minimum(until[..., -1] * BELOW_ONE)
    item = (until <= level[..., None]).sum(-1, keepdim=True).clamp_(max=targets.chunk - 1)
    return index.gather(-1, item)[..., 0]
