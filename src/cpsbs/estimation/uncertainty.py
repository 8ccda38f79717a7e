"""The error of an estimate, from the one beam that it rests on.

How well a beam knows the variance of G = Σ w f is for its design to say, in ``Design.variance``:

- conditional Poisson and calibrated: by the joint inclusion probabilities along the path, if the
  search kept them (``joint=True``); see ``cpsbs.designs.variance``.
- stochastic beam search, K ≥ 2: by the threshold, given which the terms of G are uncorrelated.
- independent samples: their variance over K.
- stratified: as if the light picks were independent, which is usually on the safe side.

Arithmetic sampling and sum-and-sample rest on one random draw for the whole beam, and only repeated
beams tell their error: pass a list of them. How well all this covers is measured in
docs/estimation.md.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from torch import Tensor

from cpsbs.designs.variance import no_freedom
from cpsbs.search.beams import Beams


def one_beam_variance(
    beams: Beams, weight: Tensor, values: Tensor, unit: Tensor, scale: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """Return the design's estimate of the variance of Σ w f / scale, and its degrees of freedom.

    Beams that do not know the design that made them have no error of their own. The arguments are
    those of ``Design.variance``.
    """
    if beams.made_by is None:
        return None, no_freedom(weight)
    return beams.made_by.variance(beams, weight, values, unit, scale)


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
