"""Baselines: what to subtract from f in an estimate of ∇E f, and when that keeps it unbiased.

Σ_y w(y) (f(y) − b) ∇log p(y) has the expectation ∇E f for every b that is fixed before the draw,
because E ∇log p = 0, and a b close to E f takes away much of the variance. A baseline that comes
from the beam itself may bias it. These do not:

- **Independent samples**, leave one out: b_i = Σ_{j≠i} f_j / (K − 1).
- **Stochastic beam search.** Given the threshold, two sequences are kept independently, so that
  b_i = p_i f_i + Σ_{j≠i} w_j f_j: in expectation Σ_{j≠i} w_j f_j is E f − p_i f_i, and what is
  missing is added (Kool, van Hoof and Welling, 2019). Products of two weights grow as the square
  of the threshold's rarity, so that the variance is infinite for K < 4.
- **Conditional Poisson**, with joint inclusion probabilities along the path:
  b_i = p_i f_i + Σ_{j≠i} (p_j π_i / π_ij) f_j. The pair (i, j) is drawn with probability π_ij, so
  that Σ_i w_i Σ_{j≠i} (p_j π_i / π_ij) f_j ∇log p_i has the expectation
  Σ_i p_i ∇log p_i (E f − p_i f_i), which the term p_i f_i completes to E f · E ∇log p = 0. Every
  pair must be possible, which a step with K = 1 does not allow.
- **Any design, several independent beams**: each is measured against the mean of the others.

A beam's own estimate Σ w f as its baseline is biased, by −Cov(Σ w ∇log p, Σ w f).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cpsbs.search.beams import Beams

NAMES = ("auto", "none", "loo", "cross", "own")
"""The baselines that have a name."""

FEWEST = {"gumbel-top-k": 4, "conditional-poisson": 3}
"""The smallest K for which leaving one out is worth it. In stochastic beam search the variance is
infinite below: with t = e^−κ, small t has the density of t^K, and two weights have a product of the
order of 1/t², so that the expectation of its square, ∫ t^(K−4) dt, is finite at 0 for K ≥ 4. In
conditional Poisson sampling with K = 2 a pair that is hardly ever drawn has a large weight."""

LEAVE_ONE_OUT = ("independent", "gumbel-top-k", "conditional-poisson")
"""The designs whose beams have an unbiased baseline of their own."""


class BaselineWarning(UserWarning):
    """No unbiased baseline can be had from these beams, so that the gradient varies more."""


def baselines(several: Sequence[Beams], values: Sequence[Tensor], baseline: Any) -> list[Tensor]:
    """Return [B, K] what to subtract from the values [B, K] of each of several beams.

    Args:
        several: independent beams of the same sources.
        values: f of their sequences, 0 in empty places.
        baseline: as for ``cpsbs.risk``.
    """
    check_baseline(baseline)
    if not isinstance(baseline, str) and baseline is not None:
        return [_given(baseline, own) for own in values]
    name = "none" if baseline is None else baseline
    if name == "auto":
        name = _chosen(several)
    if name == "cross":
        return _crossed(several, values)
    each = {"none": _nothing, "loo": _left_out, "own": _own}[name]
    return [each(beams, own) for beams, own in zip(several, values, strict=True)]


def check_baseline(baseline: Any) -> None:
    """Raise a ValueError if there is no baseline of this name."""
    if isinstance(baseline, str) and baseline not in NAMES:
        raise ValueError(
            f"baseline is {baseline!r}; it must be one of {', '.join(NAMES)}, a number, or a "
            "tensor with a number for each source"
        )


def _chosen(several: Sequence[Beams]) -> str:
    """Return the name of the best baseline that keeps the gradient unbiased."""
    if len(several) > 1:
        return "cross"
    (beams,) = several
    reason = _reason_against(beams)
    if not reason:
        return "loo"
    warnings.warn(
        f"no baseline is used: {reason}. Pass a list of two independent beams, a number, "
        "or baseline='own', which is biased by the order of 1/K",
        BaselineWarning,
        stacklevel=4,
    )
    return "none"


def has_own_baseline(beams: Beams) -> bool:
    """Return whether a single beam has a good unbiased baseline of its own, ``"loo"``."""
    return not _reason_against(beams)


def _reason_against(beams: Beams) -> str:
    """Return why the beams should not be their own baseline; nothing if they are a good one."""
    fewest = FEWEST.get(beams.design, 2)
    if not _obstacle(beams) and beams.k < fewest:
        return (
            f"leaving one out of k = {beams.k} sequences of {beams.design} makes the variance "
            f"larger; it needs k of at least {fewest}"
        )
    return _obstacle(beams)


def _obstacle(beams: Beams) -> str:
    """Return why the beams have no unbiased baseline of their own; nothing if they have one."""
    if beams.latest is not None:
        return "beams of several rounds have no unbiased baseline of their own"
    if beams.design not in LEAVE_ONE_OUT:
        return f"a single beam of {beams.design} has no unbiased baseline of its own"
    if beams.k < 2:
        return "a beam with k = 1 has nothing to leave out"
    if beams.design == "conditional-poisson" and beams.joint_log_inclusion is None:
        return "the beams have no joint inclusion probabilities; search with joint=True"
    return ""


def _given(baseline: Any, values: Tensor) -> Tensor:
    """Return a baseline that was fixed before the draw."""
    fixed = torch.as_tensor(baseline, dtype=values.dtype, device=values.device).detach()
    if fixed.ndim > 1 or (fixed.ndim == 1 and len(fixed) != len(values)):
        raise ValueError(
            f"baseline has the shape {list(fixed.shape)}; it must be a number, or have one for "
            f"each of the {len(values)} sources. A baseline for each sequence must not depend on "
            "the sequence"
        )
    if not bool(fixed.isfinite().all()):
        raise ValueError(f"baseline is {fixed.tolist()}; it must be finite")
    return fixed.reshape(-1, 1).expand_as(values)


def _nothing(beams: Beams, values: Tensor) -> Tensor:
    return torch.zeros_like(values)


def _own(beams: Beams, values: Tensor) -> Tensor:
    """Return the normalised estimate of the beam itself."""
    weight = _weight(beams)
    total = weight.sum(-1, keepdim=True)
    return ((weight * values).sum(-1, keepdim=True) / total).expand_as(values)


def _crossed(several: Sequence[Beams], values: Sequence[Tensor]) -> list[Tensor]:
    """Return for each beam the mean of the estimates of the others."""
    if len(several) < 2:
        raise ValueError(
            "baseline is 'cross', but there is one Beams; pass a list of two or more that were "
            "drawn independently, with other seeds"
        )
    pairs = zip(several, values, strict=True)
    each = torch.stack([(_weight(beams) * own).sum(-1) for beams, own in pairs])
    others = (each.sum(0) - each) / (len(several) - 1)
    return [b[:, None].expand_as(own) for b, own in zip(others, values, strict=True)]


def _left_out(beams: Beams, values: Tensor) -> Tensor:
    """Return a baseline for each sequence that rests on the others, exactly unbiased."""
    obstacle = _obstacle(beams)
    if obstacle:
        raise ValueError(
            f"baseline is 'loo', but {obstacle}; pass a list of two independent beams, a number, "
            "or baseline='own', which is biased by the order of 1/K"
        )
    weight = _weight(beams)
    whole = (weight * values).sum(-1, keepdim=True)
    if beams.design == "independent":
        return (values.sum(-1, keepdim=True) - values) / (beams.k - 1)
    p = torch.where(beams.present, beams.log_prob.exp(), 0.0)
    if beams.design == "gumbel-top-k":
        return p * values + whole - weight * values
    return p * values + (_pair_weight(beams) * values[:, None, :]).sum(-1)


def _pair_weight(beams: Beams) -> Tensor:
    """Return [B, K, K] p_j π_i / π_ij for i ≠ j, and 0 for i = j and in empty places."""
    pairs, single = beams.joint_log_inclusion, beams.log_inclusion
    assert pairs is not None
    assert single is not None
    both = beams.present[:, :, None] & beams.present[:, None, :]
    both = both & ~torch.eye(beams.k, dtype=torch.bool, device=both.device)
    log_ratio = beams.log_prob[:, None, :] + single[:, :, None] - pairs
    return torch.where(both, log_ratio, -math.inf).exp()


def _weight(beams: Beams) -> Tensor:
    assert beams.log_weight is not None
    return torch.where(beams.present, beams.log_weight.exp(), 0.0)
