"""The weights of the sequences of a beam, and a warning where they are not to be trusted.

Unbiased weights sum to one in expectation. ``stratified``, ``sum-and-sample`` and samples with
replacement keep that sum in every beam; for the other designs it varies. Where it varies widely,
unbiasedness is of no use: nearly all of the weight lies with sequences that are hardly ever drawn,
and the beams that are drawn miss it.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from cpsbs.search.beams import Beams

FAR = 3.0
"""A sum of weights above this, or below its reciprocal, is far from one."""

FAR_SHARE = 0.1
"""The share of sources with such sums above which ``estimate`` warns. On the first 50 sentences of
newstest2014 with the embedded model and K = 10, at the temperatures 0.3, 0.5 and 1, it was at most
0.02 for ``calibrated`` and 0 for ``gumbel-top-k``. For ``conditional-poisson`` it was 0.18, 0.42 to
0.50 and 0.98, and the mean of the expected lengths was too small by a factor of 1.6, of 1.5 to 3
and of 70."""


class WeightWarning(UserWarning):
    """The weights of the beams sum to something far from one: the estimate is not to be trusted."""


def log_weights_of(beams: Beams, log_inclusion: Tensor | None) -> Tensor:
    """Return [B, K] the logarithms of the weights, -inf in empty places.

    They are those that the design gave, or p / π with the inclusion probabilities [B, K] given.
    """
    if log_inclusion is None:
        if beams.log_weight is None:
            raise ValueError(
                f"the design {beams.design!r} has no inclusion probabilities, so its beams cannot "
                "estimate an expectation; search with a design that has, such as 'stratified'"
            )
        return beams.log_weight
    if log_inclusion.shape != beams.log_prob.shape:
        raise ValueError(
            f"log_inclusion has the shape {list(log_inclusion.shape)}; "
            f"it must be [B, K] = {list(beams.log_prob.shape)}"
        )
    missing = beams.present & ~(log_inclusion.isfinite() & (log_inclusion <= 1e-9))
    if bool(missing.any()):
        b, i = missing.nonzero()[0].tolist()
        raise ValueError(
            f"log_inclusion is {float(log_inclusion[b, i])} for sequence {i} of source {b}, which "
            "cannot be weighted: the logarithm of an inclusion probability is finite and at most 0"
        )
    return torch.where(beams.present, beams.log_prob - log_inclusion, -math.inf)


def warn_of_far_sums(sums: Tensor, design: str, normalize: bool) -> None:
    """Warn once if the sums of weights [B] are far from one, on average or in many sources.

    The warning points to the caller of the function that calls this.
    """
    mean = float(sums.mean())
    far = (sums > FAR) | (sums < 1 / FAR)
    if 1 / FAR <= mean <= FAR and float(far.double().mean()) <= FAR_SHARE:
        return
    found = f"sum to {mean:.3g}"
    if len(sums) > 1:
        found += f" on average over {len(sums)} sources (far from 1 in {int(far.sum())} of them)"
    remedy = "" if normalize else ". normalize=True makes the error smaller, but does not remove it"
    warnings.warn(
        f"the weights of {design} {found}, where 1 is expected: the beams miss much of the "
        "distribution or exaggerate it, and the error bar does not show that. Search with the "
        f"design 'stratified', whose weights always sum to 1, or with a larger k{remedy}",
        WeightWarning,
        stacklevel=3,
    )
