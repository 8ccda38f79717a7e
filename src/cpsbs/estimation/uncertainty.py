"""The error of an estimate, from the one beam that it rests on.

The variance of G = Σ w f, where the design admits an estimate of it:

- conditional Poisson and calibrated (searched with ``joint=True``): with the joint probabilities
  along the path, Σ_{y,y'} p(y) p(y') / π(y, y') · f(y) f(y') is unbiased for (E f)² if every two
  sequences can come together, so G² minus that is unbiased for Var G. It can come out negative;
  there is then no standard error. A calibrated step that has a single place for light candidates
  never takes two of them; for f ≥ 0 its variance is then overestimated.
- stochastic beam search, K ≥ 2: given the threshold, the terms of G are uncorrelated, so that
  Σ (w f)² (1 − q) is unbiased. (With K = 1 the variance is infinite.)
- independent samples: their variance over K.
- stratified: as if the light picks were independent. They are usually better than that, because
  they are spread over the parents, and the estimate is on the safe side; it can be too small where
  f differs more between the children of a hypothesis than between hypotheses.

Arithmetic sampling and sum-and-sample rest on one random draw for the whole beam, and only repeated
beams tell their error: pass a list of them. Normalised estimates take the same with f − G for f,
over Σ w (linearisation). For the joint form that rests on Σ_{y,y'} p p'/π(y, y'), the square of
Σ w in expectation: where it is less than half of it, the beam does not know its error, and none is
given. How well all this covers is measured in docs/estimation.md.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor

from cpsbs.search.beams import Beams

ROUNDING = 1e-20
"""Variances below this, relative to the square of the value, are the rounding of numbers that
agree."""


def one_beam_variance(
    beams: Beams, weight: Tensor, values: Tensor, unit: Tensor, scale: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """[B, d] an estimate of the variance of Σ w f / scale from one beam, if the design admits one.

    And [B] its degrees of freedom, where it is a sample variance. ``weight`` is relative to
    e^unit, unit [B] or [1]; ``scale`` [B, 1] is there for normalised estimates.
    """
    many = torch.full((len(weight),), math.inf, device="cpu")
    terms = weight[..., None] * values
    if scale is not None:
        terms = terms / scale[:, None]
    if beams.joint_log_inclusion is not None and beams.k > 1:
        log_pair = beams.log_prob[:, :, None] + beams.log_prob[:, None, :] - 2 * unit[:, None, None]
        both = beams.present[:, :, None] & beams.present[:, None, :]
        ratio = torch.where(both, log_pair - beams.joint_log_inclusion, -math.inf).exp()
        if scale is not None:
            ratio = ratio / scale[:, None].square()
        square = torch.einsum("bij,bid,bjd->bd", ratio, values, values)
        variance = terms.sum(1).square() - square
        # Where nothing was left out nothing is random, and the difference is rounding.
        magnitude = torch.einsum("bij,bid,bjd->bd", ratio, values.abs(), values.abs())
        variance = torch.where(variance.abs() < 1e-12 * magnitude, 0.0, variance)
        if scale is None:
            # All taken for certain, and yet not all that there is: it does not know what is left.
            total = (weight * unit.exp()[:, None]).sum(-1, keepdim=True)
            known = (variance != 0) | ((total - 1).abs() < 1e-6)
        else:
            known = (ratio.sum((1, 2)) >= 0.5)[:, None]
        return torch.where(known, variance, math.nan), many
    if beams.design == "gumbel-top-k" and beams.log_inclusion is not None and beams.k > 1:
        left = -torch.expm1(beams.log_inclusion)
        spread = (torch.where(beams.present, left, 0.0)[..., None] * terms.square()).sum(1)
        # A ratio is fitted to the same K sequences that its error is taken from.
        return spread if scale is None else spread * beams.k / (beams.k - 1), many
    if beams.design == "independent" and beams.k > 1:
        # Independent samples that all agree do not tell how often they would not.
        spread = terms.var(1) * beams.k
        spread = torch.where(spread > ROUNDING * terms.sum(1).square(), spread, math.nan)
        return spread, torch.full_like(many, float(beams.k - 1))
    if beams.design == "stratified" and beams.log_inclusion is not None:
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
    return None, many


def student_quantile(probability: float, freedom: float) -> float:
    """The quantile of Student's t with this many degrees of freedom, a whole number or inf.

    By bisection on the distribution function, which for whole numbers is a finite sum in
    θ = arctan(t/√ν) (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """
    if freedom > 1000:
        return NormalDist().inv_cdf(probability)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        theta = (low + high) / 2
        if (1 + _student_centre(theta, int(freedom))) / 2 < max(probability, 1 - probability):
            low = theta
        else:
            high = theta
    return math.copysign(math.sqrt(freedom) * math.tan(theta), probability - 0.5)


def _student_centre(theta: float, freedom: int) -> float:
    """P(|T| < √ν tan θ)."""
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for j in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * j / (j + 1)
    return (2 / math.pi) * (theta + sine * total) if odd else sine * total
