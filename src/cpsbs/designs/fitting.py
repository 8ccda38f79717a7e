"""Weights for prescribed inclusion probabilities.

π(x) is the gradient of the convex log Z(x), x = log w, and its derivative is the covariance matrix
C of the item indicators, with π_n (1 − π_n) on the diagonal. C is close to

    diag(c) − c cᵀ / Σc ,      c_n − c_n² / Σc = π_n (1 − π_n)

(Hájek's approximation, with c such that the diagonal is right; it is exact for K = 1 and K = N − 1,
where C = diag(π) − ππᵀ). Its inverse acts on vectors that sum to zero as division by c, so that a
Newton step costs one evaluation of π. The step is taken on the scale of log-odds, where the map
from x to π is nearly the identity and small and large probabilities are alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

TOLERANCE = 1e-11
"""Where to stop: the largest error of a log-odds of inclusion; that of π is at most a quarter."""

ACCEPTABLE = 1e-10
"""The largest error of π with which rounding may leave us."""


def fit_log_weights(inclusion: Tensor, k: int, log_odds: Callable[[Tensor], Tensor]) -> Tensor:
    """[..., N] log-weights whose inclusion probabilities are ``inclusion`` [..., N].

    ``log_odds`` maps log-weights to log π/(1 − π).
    """
    target = _checked(inclusion, k)
    wanted = torch.logit(target)
    free = wanted.isfinite()
    if not bool(free.any()):
        return wanted
    best, step, best_error, damping = wanted, torch.zeros_like(wanted), math.inf, 1.0
    for _ in range(300):
        x = best + damping * step
        now = log_odds(x)
        missing = torch.where(free, wanted - now, 0.0)
        error = float(missing.abs().max())
        if error < best_error:
            variance = torch.where(free, torch.sigmoid(now) * torch.sigmoid(-now), 0.0)
            best, step = x, _newton_scale(variance) * missing
            best_error, damping = error, 1.0
        else:
            damping /= 2
        if best_error <= TOLERANCE or damping < 1e-3:
            break
    off = float((torch.sigmoid(log_odds(best)) - target).abs().max())
    if not off <= ACCEPTABLE:
        raise RuntimeError(f"inclusion was met only to {off}; no design in float64 is closer")
    return best


def _newton_scale(variance: Tensor) -> Tensor:
    """[..., N] π(1 − π)/c, between ½ and 1, with c as in the module's text."""
    c = variance
    for _ in range(20):
        total = c.sum(-1, keepdim=True).clamp(min=1e-300)
        # From c − c²/Σc = v: c = v / (1 − c/Σc); no share can exceed ½ of the total.
        c = variance / (1 - (c / total).clamp(max=0.5))
    return torch.where(c > 0, variance / c, 1.0)


def _checked(inclusion: Tensor, k: int) -> Tensor:
    """The targets in float64, moved within their own precision so that they sum to K."""
    target = inclusion.to(torch.float64)
    if target.numel() == 0:
        return target
    if not bool(((target >= 0) & (target <= 1)).all()):
        wrong = target[~((target >= 0) & (target <= 1))][0]
        raise ValueError(f"inclusion has {float(wrong)}; a probability is between 0 and 1")
    total = target.sum(-1, keepdim=True)
    precision = 1e-8 if inclusion.dtype == torch.float64 else 1e-4
    off = (total - k).abs()
    if float(off.max()) > precision * max(k, 1):
        worst = float(total.flatten()[off.argmax()])
        raise ValueError(f"inclusion sums to {worst}; it must sum to k = {k}")
    for _ in range(3):
        variance = target * (1 - target)
        missing = k - target.sum(-1, keepdim=True)
        shift = missing / variance.sum(-1, keepdim=True).clamp(min=1e-300)
        moved = torch.sigmoid(torch.logit(target) + shift)
        target = torch.where(variance > 0, moved, target)
    return target
