"""The targets of ``targets``, met exactly and parent by parent.

Heavy candidates are kept. The places that are left go to the parents by systematic sampling: with
μ_b the sum of its light targets, parent b gets ⌊μ_b⌋ or ⌈μ_b⌉ of them. Inside a parent the light
candidates lie one after the other on [0, μ_b), each as long as its target, and the parent's n_b
places are the points s, s + 1, … that fall on it, with s uniform given that there are n_b. So every
candidate is picked with exactly its target, light picks all weigh 1/c, and the weights of the beam
sum to one.

On [0, μ_b) the probable candidates, those among the K largest, come first, and chunks of all others
after them: both in random order, and the tokens of a chunk too, so that equally spaced points never
keep step with f. The order of the probable ones is drawn by what they are (parent and token), not
by their ranks: candidates of almost the same probability change ranks with the last digit of a
score, and a draw must not depend on that.

With no heavy candidate and one place for each parent every hypothesis goes on as an ancestral
sample; with little entropy it enumerates. The offsets s of the parents are spread over [0, 1) as
evenly as can be, in random order: one for all of them would make all hypotheses lucky or unlucky
together. Parents count as far as there is something to choose among their light candidates, so that
it makes no difference whether a candidate with c·u = 1 is called heavy or light.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cpsbs.designs.drawing import DrawingDesign
from cpsbs.designs.targets import Targets, find_targets
from cpsbs.designs.variance import ROUNDING, Drawn, no_freedom, weighted
from cpsbs.randomness import BELOW_ONE, Streams, shuffled
from cpsbs.scores.candidates import Candidates, Selection

SOME_DOUBT = 0.05
"""The variance from which on a parent counts in full when offsets are spread."""


@dataclass(frozen=True, repr=False, eq=False)
class Stratified(DrawingDesign):
    """Every parent gets the children that it is worth."""

    name = "stratified"
    summary = "every prefix gets the children that it is worth; best for estimates"

    def recordable(self, k: int) -> bool:
        """Return True: a selection never synchronises with the host."""
        return True

    def draw(self, candidates: Candidates, k: int, streams: Streams, joint: bool) -> Selection:
        """Heavy candidates, and light ones by parents."""
        targets = find_targets(candidates, k)
        sources, parents, tokens = candidates.shape
        slot = torch.arange(k, device=targets.index.device)
        is_heavy = slot < targets.heavy[:, None]
        row = torch.arange(sources, device=slot.device)
        pieces = (3, 2 * parents, targets.chunk_sums.shape[-1], targets.chunk)
        drawn, offsets, *shuffles = streams.uniform(row, (sum(pieces),)).split(pieces, dim=-1)
        of_chunks, in_chunk = (x.argsort(-1) for x in shuffles)
        of_largest = shuffled(targets.index, drawn[:, 1:2]).argsort(-1)

        # What lies on [0, μ_b): the light ones among the K largest, then all others by chunks.
        light = (targets.scale[:, None] * targets.worth * ~is_heavy).gather(-1, of_largest)
        known = targets.index.gather(-1, of_largest)
        own = (known // tokens)[:, None, :] == torch.arange(parents, device=slot.device)[:, None]
        largest = torch.where(own, light[:, None, :], 0.0).cumsum(-1)
        sums = targets.scale[:, None, None] * targets.chunk_sums
        chunks = sums.gather(-1, of_chunks[:, None].expand_as(sums)).cumsum(-1)
        size = largest[..., -1] + chunks[..., -1]
        number = slot - targets.heavy[:, None]  # of a light place
        end = size.cumsum(-1)
        total = end[:, -1:].clamp(min=2.0**-1000)
        point = (drawn[:, :1] + number) / (k - targets.heavy[:, None]).clamp(min=1) * total
        parent = torch.searchsorted(end, point * BELOW_ONE, right=True).clamp_(max=parents - 1)

        # How many places a parent has, and which of them this one is.
        same = (parent[:, :, None] == parent[:, None, :]) & ~is_heavy[:, None, :]
        before = (same & (slot < slot[:, None])).sum(-1)
        times = torch.zeros_like(size).scatter_add_(-1, parent, (~is_heavy).to(size.dtype))
        # The variance of independent light picks: what there is to choose.
        doubt = torch.where(own, (light * (1 - light))[:, None, :], 0.0).sum(-1) + chunks[..., -1]
        share = torch.where(times > 0, (doubt / SOME_DOUBT).clamp(max=1.0), 0.0)
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
        is_heavy = is_heavy | targets.few[:, None]  # where there is nothing to choose, all are
        index = torch.where(is_heavy, targets.index, index)
        index, order = index.sort(dim=-1)
        score = candidates.chunks.take_along(index)
        log_target = score + targets.offset.gather(-1, index // tokens)
        present = (log_target > -math.inf) | ~targets.few[:, None]
        log_target = (log_target + targets.log_scale[:, None]).clamp(max=0.0)
        return Selection(
            index=index,
            present=present,
            log_inclusion=torch.where(is_heavy.gather(-1, order), 0.0, log_target),
        )

    def variance(
        self, beams: Drawn, weight: Tensor, values: Tensor, unit: Tensor, scale: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Return what the variance would be if the light picks were independent.

        They are usually better than that, because they are spread over the parents, and the
        estimate is on the safe side; it can be too small where f differs more between the children
        of a hypothesis than between hypotheses.
        """
        if beams.log_inclusion is None:
            return None, no_freedom(weight)
        terms = weighted(weight, values, scale)
        light = (beams.present & (beams.log_inclusion < 0))[..., None].to(terms.dtype)
        count = light.sum(1)
        mean = (light * terms).sum(1) / count.clamp(min=1)
        spread = (light * (terms - mean[:, None]).square()).sum(1)
        spread = spread * count / (count - 1).clamp(min=1)
        # Light picks that all agree, or a single one, do not tell how much others would differ; a
        # beam without any is not random.
        seen = (spread > ROUNDING * terms.sum(1).square()) | (count == 0)
        freedom = torch.where(count == 0, math.inf, (count - 1).clamp(min=1))[:, 0]
        return torch.where(seen, spread, math.nan), freedom.cpu()


def _starts(size: Tensor, times: Tensor, share: Tensor, turn: Tensor, uniform: Tensor) -> Tensor:
    """[R, P] s for each parent, given how many points [R, P] it has.

    The parents divide a circle among them, in random order, each as large a part as its ``share``
    [R, P]; s lies anywhere in the parent's part, and the circle is turned by ``turn`` [R, 1].
    """
    order = uniform[:, 0].argsort(-1)
    ends = torch.empty_like(share).scatter_(-1, order, share.gather(-1, order).cumsum(-1))
    whole = share.sum(-1, keepdim=True).clamp(min=2.0**-1000)
    even = ((ends - uniform[:, 1] * share) / whole + turn) % 1.0
    rest = size - size.floor()
    return torch.where(times > size.floor(), even * rest, rest + even * (1 - rest))


def _rows(table: Tensor, parent: Tensor) -> Tensor:
    """[R, K, m] the rows of table [R, P, m] of these parents [R, K]."""
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
    """[R, K] the candidate of the parent [R, K] at this place [R, K] behind the K largest.

    ``end`` [R, K, C] are the ends of the parent's chunks, in the order of ``of_chunks`` [R, C];
    ``in_chunk`` [R, m] is the order of the tokens in a chunk.
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
    worth = (score + shift[..., None]).exp_().masked_fill_(taken | (token >= tokens), 0.0)
    worth = worth.cumsum(-1)
    level = ((at - begin) / targets.scale[:, None]).clamp(min=0).minimum(worth[..., -1] * BELOW_ONE)
    item = (worth <= level[..., None]).sum(-1, keepdim=True).clamp_(max=targets.chunk - 1)
    return index.gather(-1, item)[..., 0]
