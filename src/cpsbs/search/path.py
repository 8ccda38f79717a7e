"""The path of a search: what each step offered, what the design selected, and what it dropped.

``Beams.path`` has a ``Step`` for every step if the search was asked to keep it. It is for people
who want to look at a search (``cpsbs explore``), so it keeps the likeliest candidates that lost as
well, with the probability that they would have been selected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cpsbs.scores.candidates import Candidates, Selection
    from cpsbs.search.beams import Hypotheses
    from cpsbs.search.settings import SearchSettings

OFFERED = 8
"""The number of likeliest extensions of every parent that a path keeps, selected or not."""


@dataclass(frozen=True)
class Offer:
    """The likeliest extensions of every parent at one step, whether they were selected or not."""

    token: Tensor
    """[b, P, R] the tokens, the likeliest first. A parent that has ended offers itself, in the
    place of token 0."""
    log_prob: Tensor
    """[b, P, R] log p of the extended hypothesis; -inf where a parent has fewer extensions."""
    log_rest: Tensor
    """[b, P] log p of all other extensions of the parent together."""
    log_inclusion: Tensor | None
    """[b, P, R] log of the inclusion probability at this step alone, given the previous beam: for
    designs that may repeat, the probability that the row of the parent takes this token; for
    stochastic beam search, the probability to beat the threshold so far. None for designs that do
    not know it."""


@dataclass(frozen=True)
class Step:
    """What was selected at one step, for the sources that were still being searched."""

    source: Tensor
    """[b] the numbers of the sources."""
    parent: Tensor
    """[b, K] the place of the parent in the previous beam."""
    token: Tensor
    """[b, K] the token by which the parent was extended; padding for one that had ended."""
    present: Tensor
    """[b, K] false for places that stayed empty."""
    finished: Tensor
    """[b, K] whether the extended hypothesis has ended."""
    log_prob: Tensor
    """[b, K] log p of the extended hypothesis."""
    log_inclusion: Tensor | None
    """[b, K] log of the inclusion probability at this step alone, given the previous beam, as in
    ``Offer``."""
    offer: Offer
    """The likeliest of the candidates that the design selected from."""


def path_step(
    settings: SearchSettings,
    candidates: Candidates,
    selection: Selection,
    beam: Hypotheses,
    parent: Tensor,
) -> Step:
    """Return the entry of ``Beams.path`` for a step that has led to ``beam``."""
    token, log_prob, log_rest = candidates.likeliest(OFFERED)
    _, parents, tokens = candidates.shape
    index = token + tokens * torch.arange(parents, device=token.device)[:, None]

    def log_inclusion_at(index: Tensor) -> Tensor | None:
        return settings.design.log_inclusion_at(candidates, settings.k, index, selection)

    picked = selection.log_inclusion
    if picked is None:
        picked = log_inclusion_at(selection.index)
    offered = log_inclusion_at(index.flatten(1))
    if offered is not None:
        offered = offered.view(token.shape).masked_fill(log_prob.isneginf(), -math.inf)
    return Step(
        source=beam.source,
        parent=parent,
        token=beam.token,
        present=selection.present,
        finished=beam.finished,
        log_prob=beam.log_prob,
        log_inclusion=picked,
        offer=Offer(token, log_prob, log_rest, offered),
    )
