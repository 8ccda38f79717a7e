"""The variance of the estimated probability of an event, from the roundings of a stratified search.

Successive differences (``cpsbs.designs.variance``) count every change of f between two neighbours
in the tree as noise. For an event, an f with two values, most changes are steps between branches,
and the search knows how little of them it left to chance. ``stratified`` keeps three numbers for
every step t at which a sequence was a light pick:

- the *share* 1/c_t, the weight of a light pick;
- the *start* x, the fractional part of Σ_{b' < b} μ_b', where the interval of its parent b begins;
- log π', how probable the pick was *inside* its parent, given the parent's number of places.

**Between parents.** The places of step t go to the parents by one uniform offset U. As many of them
as ⌈E − U⌉ lie left of the point E, so that the numbers left of two points with the fractional parts
x and x' have the covariance min(x, x') − x x'. With g_b the mean of f over the light picks of
parent b and those that follow from them, the step adds

    1/c_t² · Σ_{b, b'} (g_{b−1} − g_b) (g_{b'−1} − g_{b'}) (min(x_b, x_b') − x_b x_b')

to the variance of the estimate. It is exact if the g are. They are taken from the sequences that
the beam holds; a parent none of whose light picks has survived is left out.

**Inside parents.** From the step s at which two neighbours part, each would have been another
sequence with probability 1 − Π_{t ≥ s} π'_t. Let h be half of the squared difference of two
neighbours. If they part as certain picks, the step between them is counted above, and their noise
is what came later; that is seen where neighbours part later, and is the mean of h over the pairs
that part after them (for those that part last, over each other). If they part by chance, as light
picks of one parent, their own h joins that mean. Either is multiplied by the mean of 1 − Π π' over
the two. A sequence has the mean noise of its pairs; the sum over all sequences, times the square of
their weight, is what is added.

**At least a rounding.** A beam that happens to have its branches at whole numbers of places claims
next to nothing. Successive differences count a step between branches as ½, and the rounding of an
unknown fraction adds 1/6 on average. So the variance is taken to be a third of that of successive
differences where it comes out smaller.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from cpsbs.designs.variance import DrawnSequences, tree_order

START, INSIDE, SHARE = "start", "inside", "share"
TRACE = (START, INSIDE, SHARE)
"""The state that is kept for every step; all zero where a pick was certain."""


def two_valued(drawn: DrawnSequences, values: Tensor) -> Tensor:
    """Return [B, d] whether f [B, K, d] has no more than two values in a beam."""
    here = drawn.present[..., None]
    low = values.masked_fill(~here, torch.inf).amin(1, keepdim=True)
    high = values.masked_fill(~here, -torch.inf).amax(1, keepdim=True)
    return ((values == low) | (values == high) | ~here).all(1)


def event_variance(
    drawn: DrawnSequences,
    trace: Tensor,
    chance: Tensor,
    weight: Tensor,
    values: Tensor,
    differences: Tensor,
) -> Tensor:
    """Return [B, d] the variance, for sources with at least two picks that were left to chance.

    Args:
        drawn: the beams.
        trace: [B, K, T, 3] the numbers of ``TRACE`` for every step of every sequence.
        chance: [B, K] which of the sequences were left to chance.
        weight: as for ``Design.variance``.
        values: as for ``Design.variance``.
        differences: [B, d] the variance by successive differences.
    """
    order = tree_order(drawn.sequences, drawn.present)
    order = order.gather(1, (~chance).long().gather(1, order).argsort(dim=1, stable=True))
    light = torch.arange(order.shape[1], device=order.device) < chance.sum(1, keepdim=True)

    def ordered(x: Tensor) -> Tensor:
        return x.gather(1, order[(...,) + (None,) * (x.ndim - 2)].expand_as(x))

    f, tokens, trace = ordered(values), ordered(drawn.sequences), ordered(trace)
    start, inside, share = (trace.to(f.dtype) * light[..., None, None]).unbind(-1)
    largest = share.amax((1, 2)).clamp(min=2.0**-1000)
    total = torch.zeros_like(values[:, 0])
    same = light[:, :, None] & light[:, None, :]  # whether two have the same parent at this step
    common = torch.zeros_like(order[:, 1:])
    for step in range(tokens.shape[-1]):
        ratio = share[..., step].amax(1, keepdim=True) / largest[:, None]
        between = _between(f, same, share[..., step] > 0, start[..., step])
        total = total + ratio.square() * between
        same = same & (tokens[:, :, None, step] == tokens[:, None, :, step])
        common = common + same.diagonal(1, 1, 2)
    total = total + _inside(f, light, inside, share > 0, common)
    unit = (weight * chance).amax(1, keepdim=True)  # all light picks have the same weight
    return torch.maximum(unit.square() * total, differences / 3)


def _between(f: Tensor, same: Tensor, picked: Tensor, start: Tensor) -> Tensor:
    """Return [B, d] c_t² times what the places of the parents at one step add to the variance.

    Args:
        f: [B, K, d] the values in the order of the tree.
        same: [B, K, K] whether two sequences have the same parent.
        picked: [B, K] whether the sequence goes through a light pick of this step.
        start: [B, K] the fractional part of where the interval of its parent begins.
    """
    group = (same & picked[:, None, :]).to(f.dtype)
    mean = group @ f / group.sum(-1, keepdim=True).clamp(min=1)
    place = torch.arange(picked.shape[1], device=picked.device)
    latest = torch.where(picked, place, -1).cummax(1).values
    before = pad(latest[:, :-1], (1, 0), value=-1)
    change = mean.gather(1, before.clamp(min=0)[..., None].expand_as(mean)) - mean
    change = change * (picked & (before >= 0))[..., None]
    covariance = torch.minimum(start[:, :, None], start[:, None, :])
    covariance = covariance - start[:, :, None] * start[:, None, :]
    return torch.einsum("bij,bid,bjd->bd", covariance, change, change)


def _inside(f: Tensor, light: Tensor, inside: Tensor, picked: Tensor, common: Tensor) -> Tensor:
    """Return [B, d] Σ of the noise of the picks, for a weight of one.

    Args:
        f: [B, K, d] the values in the order of the tree, picks that were left to chance first.
        light: [B, K] which of them were left to chance.
        inside: [B, K, T] log π'.
        picked: [B, K, T] whether the sequence goes through a light pick of the step.
        common: [B, K − 1] the number of tokens that neighbours have in common.
    """
    pair = light[:, 1:]
    half = f.diff(dim=1).square() / 2
    # The step at which they part follows the last token that they share.
    at = common.clamp(max=inside.shape[-1] - 1)[..., None]
    parted = picked[:, :-1].gather(-1, at) | picked[:, 1:].gather(-1, at)
    later = (common[:, None, :] > common[:, :, None]) & pair[:, None, :]
    level = (common[:, None, :] == common[:, :, None]) & pair[:, None, :]
    own = parted & torch.eye(pair.shape[1], dtype=torch.bool, device=pair.device)
    pool = torch.where(parted | later.any(-1, keepdim=True), later | own, level).to(f.dtype)
    noise = pool @ half / pool.sum(-1, keepdim=True).clamp(min=1)
    kept = inside.flip(-1).cumsum(-1).flip(-1).exp()
    kept = (kept[:, :-1].gather(-1, at) + kept[:, 1:].gather(-1, at)) / 2
    noise = noise * (1 - kept) * pair[..., None]
    pairs = pad(pair, (0, 1)).int() + pad(pair, (1, 0)).int()
    both = pad(noise, (0, 0, 0, 1)) + pad(noise, (0, 0, 1, 0))
    return (both / pairs.clamp(min=1)[..., None]).sum(1)
