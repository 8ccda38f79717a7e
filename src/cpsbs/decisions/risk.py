"""Gradients of expectations: ∇E f from a handful of different sequences.

The gradient of E_p f is E[f ∇log p], an expectation like any other, so that a weighted beam
estimates it without bias:

    ∇E f ≈ Σ_{y ∈ Y} w(y) (f(y) − b) ∇log p(y) ,

with a baseline b (``cpsbs.decisions.baselines``). ``risk`` returns a scalar for each source whose
value is the estimate of E f and whose gradient is this sum, so that minimum-risk training is

    beams = model.beams(texts, k=8, seed=step)
    log_p = cpsbs.log_prob(model.sequence_model(texts), beams)
    cpsbs.risk(beams, cost, log_p, decode=model.decode).mean().backward()

If the model has moved since the draw, each term is multiplied by the importance ratio p_now / p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cpsbs.decisions.baselines import baselines, check_baseline
from cpsbs.estimation.arguments import Decode, check_function, checked_beams
from cpsbs.estimation.estimate import FunctionValues
from cpsbs.estimation.weights import log_weights_of, warn_of_far_sums
from cpsbs.search.beams import Beams

TOLERANCE = 0.02
"""By how many nats a token the log-probabilities of the draw and of the gradient may differ by
default: some times the rounding of bfloat16, and much less than another model or dropout makes."""


def risk(
    beams: Beams | Sequence[Beams],
    f: Any,
    log_prob: Tensor | Sequence[Tensor],
    baseline: Any = "auto",
    *,
    decode: Decode | None = None,
    normalize: bool = False,
    moved: bool = False,
    tolerance: float = TOLERANCE,
) -> Tensor:
    """Return [B] the estimate of E f for every source, with an estimate of ∇E f as its gradient.

    Args:
        beams: the result of ``search`` with a design that has weights; or a list of independent
            ones, whose mean is taken.
        f: as for ``estimate``, but not vector-valued; or a tensor [B, K] with its values, or a list
            of such tensors, one for each ``Beams``. No gradient goes through f.
        log_prob: [B, K] what ``cpsbs.log_prob`` returns for the beams; a list if they are one.
        baseline: what to subtract from f in the gradient, which changes its variance:

            - ``"loo"``, leave one out, for beams of ``independent``, ``gumbel-top-k`` and (with
              ``joint=True``) ``conditional-poisson``; unbiased;
            - ``"cross"``, for a list of beams: each is measured against the others; unbiased;
            - a number, or a tensor [B], that does not depend on the beams, such as a mean over
              earlier steps; unbiased;
            - ``"none"``; unbiased, and the variance is large;
            - ``"own"``, the beam's own normalised estimate; biased by the order of 1/K;
            - ``"auto"``: "cross" for a list of beams, else "loo" where it can be had and has a
              finite variance, else none.
        decode: as for ``estimate``.
        normalize: whether to divide by the sum of the weights, as Kool et al. do for stochastic
            beam search: with W = Σ w and G = Σ w f / W, the gradient is
            Σ w (f − G) ∇log p / (W − w + p). Biased, with less variance where the weights vary;
            it brings its own baseline.
        moved: whether the model may have changed since the draw, as in the second epoch over the
            same beams. Each term is then multiplied by the importance ratio of the probabilities
            now and then, so that value and gradient are those of the model as it is now. A sequence
            that has become impossible counts nothing.
        tolerance: without ``moved``, by how many nats a token ``log_prob`` may differ from the
            beams' own.

    Raises:
        ValueError: if the beams have no weights, if f is not finite, or if ``log_prob`` is not of
            the model that was searched.

    Warns:
        BaselineWarning: if ``baseline`` is "auto" and no unbiased one can be had.
        WeightWarning: as ``estimate``.
    """
    several = checked_beams(beams)
    weights = list(map(partial(weights_of, normalize=normalize), several))
    log_probs = checked_log_probs(several, log_prob, moved, tolerance)
    check_baseline(baseline)
    if normalize and not (baseline is None or (isinstance(baseline, str) and baseline == "auto")):
        raise ValueError(
            f"baseline is {baseline!r}, but normalize=True brings its own; leave one of them out"
        )
    values = function_values(several, f, decode)
    each = []
    offsets = values if normalize else baselines(several, values, baseline)
    parts = zip(several, weights, values, offsets, log_probs, strict=True)
    for own, weight, f_own, b, log_p in parts:
        ratio = importance_ratio(own, log_p) if moved else torch.ones_like(weight)
        weight = weight * ratio
        total = weight.sum(-1, keepdim=True) if normalize else torch.ones_like(weight[:, :1])
        value = (weight * f_own).sum(-1, keepdim=True) / total
        if normalize:
            p = torch.where(own.present, own.log_prob.exp() * ratio, 0.0)
            coefficient = weight * (f_own - value) / (total - weight + p)
        else:
            coefficient = weight * (f_own - b)
        surrogate = coefficient * log_p.masked_fill(log_p.isneginf(), 0.0)
        each.append(with_gradient(value[:, 0], surrogate.sum(-1)))
    return torch.stack(each).mean(0)


def with_gradient(value: Tensor, surrogate: Tensor) -> Tensor:
    """Return ``value``, with the gradient of ``surrogate``."""
    return value.detach() + (surrogate - surrogate.detach())


def weights_of(beams: Beams, normalize: bool = False) -> Tensor:
    """Return [B, K] the weights, zero in empty places, and warn if they are not to be trusted."""
    log_weight = log_weights_of(beams, None)
    weight = torch.where(beams.present, log_weight.exp(), 0.0)
    warn_of_far_sums(weight.sum(-1), beams.design, normalize, level=4)
    return weight


def importance_ratio(beams: Beams, log_prob: Tensor) -> Tensor:
    """Return [B, K] p_now / p_then of every sequence, without a gradient; one in empty places."""
    gap = torch.where(beams.present, log_prob.detach() - beams.log_prob, 0.0)
    return gap.exp()


def function_values(several: Sequence[Beams], f: Any, decode: Decode | None) -> list[Tensor]:
    """Return [B, K] f of the sequences of each of several beams, checked; 0 in empty places."""
    given = [f] if isinstance(f, Tensor) else f
    if isinstance(given, list | tuple) and given and all(isinstance(x, Tensor) for x in given):
        if len(given) != len(several):
            raise ValueError(
                f"f is {len(given)} tensors for {len(several)} beams; there must be one for each"
            )
        return [tensor_values(b, x, "f") for b, x in zip(several, given, strict=True)]
    check_function(f, len(several[0]))
    evaluated = FunctionValues(f, decode, len(several[0]))
    values = [evaluated.of_beams(b) for b in several]
    if not evaluated.scalar:
        raise ValueError("f returned vectors; a risk needs a number for each sequence")
    return [x[..., 0] for x in values]


def tensor_values(beams: Beams, values: Tensor, name: str) -> Tensor:
    """Return the values that were given for the sequences of beams, if they are right."""
    if values.shape != beams.log_prob.shape:
        raise ValueError(
            f"{name} is a tensor of the shape {list(values.shape)}; it must be [B, K] = "
            f"{list(beams.log_prob.shape)}"
        )
    values = values.detach().to(beams.log_prob)
    wrong = beams.present & ~values.isfinite()
    if bool(wrong.any()):
        b, i = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{name} is {float(values[b, i])} for sequence {i} of source {b}; it must be finite"
        )
    return torch.where(beams.present, values, 0.0)


def checked_log_probs(
    several: Sequence[Beams], log_prob: Tensor | Sequence[Tensor], moved: bool, tolerance: float
) -> list[Tensor]:
    """Return the log-probabilities of each of several beams, if they can be theirs."""
    given = [log_prob] if isinstance(log_prob, Tensor) else log_prob
    if not isinstance(given, list | tuple) or not all(isinstance(x, Tensor) for x in given):
        raise ValueError(
            f"log_prob is a {type(log_prob).__name__}; it must be what cpsbs.log_prob returns for "
            "the beams, or a list of that"
        )
    if len(given) != len(several):
        raise ValueError(
            f"log_prob is {len(given)} tensors for {len(several)} beams; there must be one for each"
        )
    return [
        _checked_log_prob(beams, own, moved, tolerance)
        for beams, own in zip(several, given, strict=True)
    ]


def _checked_log_prob(beams: Beams, log_prob: Tensor, moved: bool, tolerance: float) -> Tensor:
    if log_prob.shape != beams.log_prob.shape:
        raise ValueError(
            f"log_prob has the shape {list(log_prob.shape)}; it must be [B, K] = "
            f"{list(beams.log_prob.shape)}, as cpsbs.log_prob returns it"
        )
    if torch.is_grad_enabled() and not log_prob.requires_grad:
        raise ValueError(
            "log_prob has no gradient; compute it by cpsbs.log_prob outside torch.no_grad(), with "
            "a model whose parameters require gradients"
        )
    log_prob = torch.where(beams.present, log_prob.to(beams.log_prob.dtype), 0.0)
    gap = torch.where(beams.present, log_prob.detach() - beams.log_prob, 0.0).abs()
    limit = math.inf if moved else tolerance
    wrong = ~(gap <= limit * beams.lengths.clamp(min=1))
    if bool(wrong.any()):
        b, i = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"log_prob is {log_prob[b, i].item():.6g} for sequence {i} of source {b}, where the "
            f"search found {float(beams.log_prob[b, i]):.6g}: it is of another model or of other "
            "sources, was computed with dropout, or the model has changed since the draw. If it "
            "has, pass moved=True; for rounding, a larger tolerance"
        )
    return log_prob
