"""The error of an estimate from a single beam, and the error of a mean over sources.

How one beam tells the variance of G = Σ w f depends on its design (``Design.variance``):

- ``conditional-poisson`` and ``calibrated`` need the joint inclusion probabilities along the path,
  which the search keeps with ``joint=True``; see ``cpsbs.designs.variance``.
- ``gumbel-top-k`` with K ≥ 2 uses the threshold, given which the terms of G are uncorrelated.
- ``independent`` uses the variance of its K samples over K.
- ``stratified`` uses the differences between light picks that are neighbours in the tree, and for
  events what the search knows of its own roundings.
- ``arithmetic`` and ``sum-and-sample`` rest on one random draw for the whole beam, so that a single
  beam tells nothing; pass a list of independent beams to ``estimate``.

docs/estimation.md measures how often the resulting intervals cover the truth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from cpsbs.designs import Design
from cpsbs.designs.variance import ROUNDING, infinite_freedom
from cpsbs.search.beams import Beams

LARGE_FREEDOM = 1000.0
"""With more degrees of freedom than this, Student's t is taken for normal."""

SIMPSON = 257
"""The number of points of Simpson's rule, which must be odd."""


def one_beam_variance(
    beams: Beams, weight: Tensor, values: Tensor, log_norm: Tensor | None, value: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Return the design's estimate of the variance of the estimate, and its degrees of freedom.

    The variance is NaN where it is zero or rounding: terms that agree do not tell how much others
    would differ. It is None for beams that do not know the design that made them.

    Args:
        beams: one beam of each source.
        weight: as for ``Design.variance``.
        values: as for ``Design.variance``.
        log_norm: as for ``Design.variance``.
        value: [B, d] the estimate.
    """
    if beams.made_by is None:
        return None, infinite_freedom(weight)
    if beams.latest is None:
        variance, freedom = beams.made_by.variance(beams, weight, values, log_norm)
    else:
        variance, freedom = _latest_variance(beams, beams.made_by, weight, values, log_norm)
    if variance is not None:
        vanishes = variance.abs() <= ROUNDING * value.square()
        variance = torch.where(vanishes, math.nan, variance)
    return variance, freedom


@dataclass(frozen=True)
class LatestRound:
    """The sequences of the latest round that were not picked with certainty, as a beam."""

    k: int
    sequences: Tensor
    present: Tensor
    log_prob: Tensor
    log_inclusion: Tensor | None
    joint_log_inclusion: Tensor | None
    trace: Tensor | None = None


def _latest_variance(
    beams: Beams, design: Design, weight: Tensor, values: Tensor, log_norm: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """Return the variance of beams of several rounds, of which only the latest is random.

    The terms of earlier rounds are the same whatever the latest round draws, so that the variance
    is that of the others. A design that looks at the sum of the weights of a normalised estimate
    is shown a beam by itself: weights that sum to one, and log Σ w of these sequences alone.
    """
    assert beams.latest is not None
    if beams.log_inclusion is None:
        return None, infinite_freedom(weight)
    drawn = beams.present & (beams.log_inclusion < 0)
    # The drawn sequences come first, as many places as a source has of them.
    order = (~drawn).to(torch.int8).argsort(dim=-1, stable=True)
    order = order[:, : max(1, int(drawn.sum(-1).max()))]

    def some(x: Tensor, empty: float) -> Tensor:
        return torch.where(drawn, x, empty).gather(-1, order)

    pairs = beams.joint_log_inclusion
    if pairs is not None:
        rows = pairs.gather(1, order[..., None].expand(-1, -1, pairs.shape[-1]))
        pairs = rows.gather(2, order[:, None, :].expand(-1, order.shape[-1], -1))
    present = drawn.gather(-1, order)
    log_inclusion = some(beams.log_inclusion, -math.inf)
    sequences = beams.sequences.gather(
        1, order[..., None].expand(-1, -1, beams.sequences.shape[-1])
    )
    log_prob = some(beams.log_prob, -math.inf)
    own = some(weight, 0.0)
    own_values = values.gather(1, order[..., None].expand(-1, -1, values.shape[-1]))
    own_values = own_values * present[..., None]
    share = torch.ones_like(own[:, 0])
    if log_norm is not None:
        share = own.sum(-1).clamp(min=2.0**-1000)
        own, log_norm = own / share[:, None], log_norm + share.log()
    total = torch.full_like(values[:, 0], math.nan)
    freedom = infinite_freedom(weight)
    for k in sorted(set(beams.latest.tolist())):  # one or two: the last round may have been smaller
        view = LatestRound(k, sequences, present, log_prob, log_inclusion, pairs)
        variance, found = design.variance(view, own, own_values, log_norm)
        if variance is not None:
            here = beams.latest == k
            total = torch.where(here[:, None], variance * share.square()[:, None], total)
            freedom = torch.where(here.cpu(), found, freedom)
    return None if bool(total.isnan().all()) else total, freedom


def mean_variance(
    variance: Tensor | None, freedom: Tensor, exact: Tensor
) -> tuple[Tensor | None, Tensor, int]:
    """Return the variance of the mean of B independent estimates.

    That is Σ_b v_b / B². Estimates whose variance is not known are taken to have the average
    variance of those that have one and are not exact. Variances that came out negative enter the
    sum as they are, because leaving out the smallest of several unbiased estimates would bias it.

    Args:
        variance: [B] or [B, d] the variances v_b, NaN where they are not known; None if none is.
        freedom: [B] their degrees of freedom.
        exact: [B] whether the estimate has no error.

    Returns:
        [1] or [1, d] the variance of the mean, or None if it is not known; [1] its degrees of
        freedom, (Σ v)² / Σ (v² / ν) after Welch and Satterthwaite, the smallest if f is a vector;
        and how many of the B variances are known.
    """
    infinite = torch.full((1,), math.inf, device="cpu")
    if variance is None:
        return None, infinite, 0
    count = len(variance)
    table = variance.reshape(count, -1).cpu()
    known = ~table.isnan().any(-1)
    random, unknown = known & ~exact, count - int(known.sum())
    if unknown and not bool(random.any()):
        return None, infinite, count - unknown
    part = table[random]
    total = part.sum(0)
    if unknown:
        total = total + unknown * part.mean(0)
    noise = (part.square() / freedom[random][:, None]).sum(0)
    found = torch.where(noise > 0, part.sum(0).square() / noise, math.inf).amin(0, keepdim=True)
    mean = (total / count**2).reshape(1, *variance.shape[1:]).to(variance.device)
    return mean, found.clamp(min=1), count - unknown


def student_quantile(probability: float, freedom: Tensor) -> Tensor:
    """Return [n] the quantiles of Student's t with these degrees of freedom [n], each at least 1.

    With θ = arctan(t/√ν), P(|T| < t) is the integral of cos^{ν−1} from 0 to θ, divided by that to
    π/2. θ is found by bisection, the integral by Simpson's rule.
    """
    inside = 2 * max(probability, 1 - probability) - 1
    known = freedom.to(torch.float64).clamp(max=LARGE_FREEDOM)
    log_gamma = torch.lgamma((known + 1) / 2) - torch.lgamma(known / 2)
    wanted = inside * math.sqrt(math.pi) / 2 * (-log_gamma).exp()
    step = torch.linspace(0, 1, SIMPSON, dtype=torch.float64, device=known.device)
    rule = torch.full_like(step, 2.0)
    rule[1::2], rule[0], rule[-1] = 4.0, 1.0, 1.0
    low, high = torch.zeros_like(known), torch.full_like(known, math.pi / 2)
    for _ in range(50):
        theta = (low + high) / 2
        height = (step * theta[:, None]).cos().pow(known[:, None] - 1)
        area = theta / (3 * (SIMPSON - 1)) * (rule * height).sum(-1)
        low, high = torch.where(area < wanted, theta, low), torch.where(area < wanted, high, theta)
    found = known.sqrt() * theta.tan()
    normal = NormalDist().inv_cdf((1 + inside) / 2)
    return torch.where(freedom > LARGE_FREEDOM, normal, found).copysign(
        torch.tensor(probability - 0.5, dtype=torch.float64, device=known.device)
    )
