"""Finds the weights of a design with prescribed inclusion probabilities.

π(x) is the gradient of the convex log Z(x), x = log w, and its derivative is the covariance matrix
C of the item indicators, with π_n (1 − π_n) on the diagonal. Where the sum of these variances is
large, C is close to

    diag(c) − c cᵀ / Σc ,      c_n − c_n² / Σc = π_n (1 − π_n)

(Hájek's approximation, with c such that the diagonal is right; it is exact for K = 1, where c = π,
and for K = N − 1, where c = 1 − π). Its inverse acts on vectors that sum to zero as division by c,
so that such a Newton step costs one evaluation of π. The step is taken on the scale of log-odds of
π, where the map from x is nearly the identity and treats small and large probabilities alike. What
the approximation misses, a few directions at most, is learnt from the last steps (Anderson's
acceleration).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

TOLERANCE = 1e-11
"""Largest error of the log-odds of π at which the iteration stops; that of π is at most a quarter
of it."""

ACCEPTABLE = 1e-10
"""Largest error of π that rounding may leave."""

PATIENCE = 5
"""Number of evaluations without progress after which the steps become smaller."""

HISTORY = 6
"""Number of steps that the acceleration remembers."""


def fit_log_weights(inclusion: Tensor, k: int, log_odds: Callable[[Tensor], Tensor]) -> Tensor:
    """Return [..., N] log-weights whose inclusion probabilities are ``inclusion`` [..., N].

    Args:
        inclusion: the targets, which sum to K.
        k: K.
        log_odds: the function from log-weights to log π/(1 − π).
    """
    target = _checked_targets(inclusion, k)
    wanted = torch.logit(target)
    free = wanted.isfinite()
    if not bool(free.any()):
        return wanted
    x, best, best_error, since, damping = wanted, wanted, math.inf, 0, 1.0
    visited: list[tuple[Tensor, Tensor]] = []
    best_visit = (wanted, wanted)
    while damping > 1e-3:
        now = log_odds(x)
        missing = torch.where(free, wanted - now, 0.0)
        error = float(missing.abs().max())
        variance = torch.where(free, torch.sigmoid(now) * torch.sigmoid(-now), 0.0)
        visited.append((torch.where(free, x, 0.0), _newton_scale(variance) * missing))
        if error < best_error:
            best, best_error, best_visit, since = x, error, visited[-1], 0
        if best_error <= TOLERANCE:
            break
        since += 1
        if since > PATIENCE:
            # The steps do not converge: go back to the best iterate, take smaller steps, and
            # forget the history.
            damping, since, visited = damping / 2, 0, [best_visit]
            x = best
        visited = visited[-HISTORY:]
        x = torch.where(free, x + damping * _accelerated(visited), x)
    off = float((torch.sigmoid(log_odds(best)) - target).abs().max())
    if not off <= ACCEPTABLE:
        raise RuntimeError(
            f"inclusion was met only to {off}, which is more than {ACCEPTABLE}; no better weights "
            "were found"
        )
    return best


def _accelerated(visited: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the step from the last iterate, given all iterates and the Newton step at each.

    The combination of iterates whose steps cancel best is taken to be a better one (Anderson).
    """
    x, step = visited[-1]
    if len(visited) == 1:
        return step
    moves = torch.stack([x - y for y, _ in visited[:-1]], dim=-1)
    steps = torch.stack([step - s for _, s in visited[:-1]], dim=-1)
    gram = steps.mT @ steps
    # A ridge, relative to each row, keeps steps that are nearly parallel from blowing up.
    scale = gram.diagonal(dim1=-2, dim2=-1).amax(-1).clamp(min=1e-300)[..., None, None]
    ridge = 1e-12 * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    right = (steps.mT @ step[..., None]) / scale
    share = torch.linalg.solve(gram / scale + ridge, right)
    correction: Tensor = (moves + steps) @ share
    return step - correction[..., 0]


def _newton_scale(variance: Tensor) -> Tensor:
    """Return [..., N] π(1 − π)/c, which is between ½ and 1, with c as in the module's docstring."""
    c = variance
    for _ in range(20):
        total = c.sum(-1, keepdim=True).clamp(min=1e-300)
        # c − c²/Σc = v means c = v / (1 − c/Σc), and no share c/Σc exceeds ½.
        c = variance / (1 - (c / total).clamp(max=0.5))
    return torch.where(c > 0, variance / c, 1.0)


def _checked_targets(inclusion: Tensor, k: int) -> Tensor:
    """Return the targets in float64, moved within their own precision so that they sum to K."""
    target = inclusion.to(torch.float64)
    if target.numel() == 0:
        return target
    if not bool(((target >= 0) & (target <= 1)).all()):
        wrong = target[~((target >= 0) & (target <= 1))][0]
        raise ValueError(f"inclusion has {float(wrong)}; it must hold probabilities from 0 to 1")
    total = target.sum(-1, keepdim=True)
    # float64 targets must sum to K well; others as well as their dtype lets them.
    precision = max(1e-8, min(0.05, 32 * torch.finfo(inclusion.dtype).eps))
    off = (total - k).abs()
    if float(off.max()) > precision * max(k, 1):
        worst = float(total.flatten()[off.argmax()])
        raise ValueError(f"inclusion sums to {worst}; it must sum to k = {k}")
    target = _without_leftovers(target, k)
    for _ in range(3):
        variance = target * (1 - target)
        missing = k - target.sum(-1, keepdim=True)
        shift = missing / variance.sum(-1, keepdim=True).clamp(min=1e-300)
        moved = torch.sigmoid(torch.logit(target) + shift)
        target = torch.where(variance > 0, moved, target)
    return _without_leftovers(target, k)


def _without_leftovers(target: Tensor, k: int) -> Tensor:
    """Return targets of exactly 0 or 1 where the certain items leave no choice for the others.

    Where they leave no room for the others, or just enough, the targets of the others are off from
    0 or 1 by rounding alone.
    """
    room = (k - (target == 1).sum(-1, keepdim=True)).clamp(min=0)
    free = (target > 0) & (target < 1)
    target = torch.where(free & (room == 0), 0.0, target)
    return torch.where(free & (room >= free.sum(-1, keepdim=True)), 1.0, target)
