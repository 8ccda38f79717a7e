"""Policy gradients: regularisers, advantages within a group, clipped ratios, and their error.

What people add to ∇E f when they train a policy, for weighted beams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cpsbs.decisions.baselines import baselines
from cpsbs.decisions.risk import (
    TOLERANCE,
    checked_log_probs,
    function_values,
    importance_ratio,
    tensor_values,
    weights_of,
    with_gradient,
)
from cpsbs.estimation.arguments import Decode, checked_beams
from cpsbs.estimation.forcing import TokenScores
from cpsbs.estimation.uncertainty import one_beam_variance
from cpsbs.estimation.weights import COMPLETE, SAME
from cpsbs.search.beams import Beams


def entropy(
    beams: Beams, scores: TokenScores, *, moved: bool = False, tolerance: float = TOLERANCE
) -> Tensor:
    """Return [B] the estimate of the entropy H(p), with an unbiased estimate of ∇H as its gradient.

    With H_t the entropy of p(· | y_<t), H = E Σ_t H_t, and

        ∇H = E Σ_t [ ∇H_t + (Σ_{s>t} H_s) ∇log p(y_t | y_<t) ] :

    the entropy of each token's distribution is differentiated exactly, and a token is credited
    with the entropies that come after it only, because those before it do not depend on it.

    Args:
        beams: the result of ``search`` with a design that has weights.
        scores: what ``token_scores(model, beams, entropy=True)`` returns.
        moved: as for ``risk``.
        tolerance: as for ``risk``.
    """
    if scores.entropy is None:
        raise ValueError("scores has no entropies; compute it by token_scores(…, entropy=True)")
    return _sum_over_tokens(beams, scores.log_prob, scores.entropy, moved, tolerance)


def divergence(
    beams: Beams, scores: TokenScores, *, moved: bool = False, tolerance: float = TOLERANCE
) -> Tensor:
    """Return [B] the estimate of KL(p ‖ q), with an unbiased estimate of its gradient.

    As for ``entropy``, with KL(p(· | y_<t) ‖ q(· | y_<t)) in the place of H_t. The gradient is with
    respect to p; q is the fixed model that training must not leave too far behind.

    Args:
        beams: the result of ``search`` with a design that has weights.
        scores: what ``token_scores(model, beams, other=q)`` returns.
        moved: as for ``risk``.
        tolerance: as for ``risk``.
    """
    if scores.divergence is None:
        raise ValueError("scores has no divergences; compute it by token_scores(…, other=model)")
    return _sum_over_tokens(beams, scores.log_prob, scores.divergence, moved, tolerance)


def _sum_over_tokens(
    beams: Beams, log_prob: Tensor, terms: Tensor, moved: bool, tolerance: float
) -> Tensor:
    """Return [B] Σ w Σ_t of terms [B, K, T] that each depend on the tokens before it alone."""
    if log_prob.shape != beams.sequences.shape:
        raise ValueError(
            f"scores are of tokens [B, K, T] = {list(log_prob.shape)}, but the beams have "
            f"{list(beams.sequences.shape)}; compute them by token_scores for these beams"
        )
    later = terms.detach().flip(-1).cumsum(-1).flip(-1) - terms.detach()
    surrogate = (terms + later * log_prob).sum(-1)
    weight = weights_of(beams)
    (whole,) = checked_log_probs([beams], log_prob.sum(-1), moved, tolerance)
    if moved:
        weight = weight * importance_ratio(beams, whole)
    value = (weight * terms.detach().sum(-1)).sum(-1)
    return with_gradient(value, (weight * surrogate).sum(-1))


def group_advantages(
    beams: Beams, f: Any, *, decode: Decode | None = None, scale: bool = True, epsilon: float = 1e-4
) -> Tensor:
    """Return [B, K] how much better each sequence is than the others of its source.

    These are the advantages of GRPO, (f − μ) / (σ + ε), with the weighted mean μ and the weighted
    standard deviation σ of the group. For samples of equal weight they are GRPO's own. Zero in
    empty places. Both μ and σ come from the same beam, so that a gradient with them is biased by
    the order of 1/K, as GRPO's is.

    Args:
        beams: the result of ``search`` with a design that has weights.
        f: as for ``risk``.
        decode: as for ``estimate``.
        scale: whether to divide by σ + ε.
        epsilon: ε, so that a group of equal values does not divide by zero.
    """
    (values,) = function_values([beams], f, decode)
    weight = weights_of(beams)
    share = weight / weight.sum(-1, keepdim=True)
    centred = torch.where(beams.present, values - (share * values).sum(-1, keepdim=True), 0.0)
    if not scale:
        return centred
    # 1 − Σ share² is (K − 1)/K for equal weights, which makes it the sample variance.
    correction = (1 - share.square().sum(-1)).clamp(min=torch.finfo(share.dtype).eps)
    deviation = ((share * centred.square()).sum(-1) / correction).sqrt()
    return centred / (deviation[:, None] + epsilon)


def policy_loss(
    beams: Beams, advantages: Tensor, log_prob: Tensor, *, clip: float | None = None
) -> Tensor:
    """Return [B] a loss whose descent makes sequences of positive advantage more probable.

    The loss is −Σ w r A, with the importance ratio r = p_now / p_then of each sequence, so that
    several steps may be taken on one draw. With ``clip`` it is PPO's,
    −Σ w min(r A, clamp(r, 1 − ε, 1 + ε) A), which stops pushing a sequence whose probability has
    moved far enough; the gradient is then biased, in exchange for stability.

    Args:
        beams: the result of ``search`` with a design that has weights.
        advantages: [B, K] such as those of ``group_advantages``; no gradient goes through them.
        log_prob: [B, K] what ``cpsbs.log_prob`` returns for the model as it is now.
        clip: ε, such as 0.2; None for no clipping.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip is {clip}; it must be above 0, or None")
    (log_p,) = checked_log_probs([beams], log_prob, moved=True, tolerance=0.0)
    gain = tensor_values(beams, advantages, "advantages")
    gap = torch.where(beams.present, log_p - beams.log_prob, 0.0)
    ratio = gap.exp()
    objective = ratio * gain
    if clip is not None:
        objective = torch.minimum(objective, ratio.clamp(1 - clip, 1 + clip) * gain)
    return -(weights_of(beams) * objective).sum(-1)


@dataclass(frozen=True)
class GradientEstimate:
    """An estimate of the gradient of the mean risk over sources, with its error."""

    value: Tensor
    """[d] the gradient with respect to the chosen coordinates."""
    variance: Tensor | None
    """[d] the variance of each; None if it is not known."""

    @property
    def standard_error(self) -> Tensor | None:
        """[d] the standard error of each coordinate; NaN where it is not known."""
        return None if self.variance is None else self.variance.clamp(min=0).sqrt()

    @property
    def norm(self) -> float:
        """The Euclidean norm of the gradient."""
        return float(self.value.norm())

    @property
    def norm_error(self) -> float | None:
        """The root of the total variance: how far the gradient is off, as a Euclidean distance.

        Coordinates whose variance is not known count nothing.
        """
        if self.variance is None:
            return None
        return float(self.variance.nansum().clamp(min=0).sqrt())


def gradient_estimate(
    beams: Beams | Sequence[Beams],
    f: Any,
    log_prob: Tensor | Sequence[Tensor],
    parameters: Sequence[Tensor],
    baseline: Any = "auto",
    *,
    decode: Decode | None = None,
    coordinates: Tensor | None = None,
    moved: bool = False,
    tolerance: float = TOLERANCE,
) -> GradientEstimate:
    """Return ∇ of the mean of E f over sources, with the error of every coordinate.

    Each sequence needs a backward pass of its own, so this is for looking at a gradient now and
    then, not for every step. From a single beam the error is the design's estimate of it, in which
    a baseline from the same beam counts as fixed; from a list of beams it is that of their mean, as
    if no beam were the baseline of another, which is a little too small.

    Args:
        beams: as for ``risk``.
        f: as for ``risk``.
        log_prob: as for ``risk``; its graph is kept.
        parameters: the parameters of the model to differentiate by.
        baseline: as for ``risk``.
        decode: as for ``risk``.
        coordinates: [d] which coordinates of all parameters, flattened one after the other, to
            return; all of them by default.
        moved: as for ``risk``.
        tolerance: as for ``risk``.
    """
    several = checked_beams(beams)
    weights = list(map(weights_of, several))
    log_probs = checked_log_probs(several, log_prob, moved, tolerance)
    values = function_values(several, f, decode)
    offsets = baselines(several, values, baseline)
    means, variances = [], []
    parts = zip(several, weights, values, offsets, log_probs, strict=True)
    for own, weight, f_own, b, log_p in parts:
        gain = f_own - b
        if moved:  # part of f, because designs know the weights of the draw
            gain = gain * importance_ratio(own, log_p)
        each = [
            _source_gradient(own[s], weight[s], gain[s], log_p[s], parameters, coordinates)
            for s in range(len(own))
        ]
        means.append(torch.stack([value for value, _, _ in each]).mean(0))
        found = torch.stack([variance for _, variance, _ in each])
        # A source whose terms are all zero tells nothing of the error, no more than others that
        # agree; it counts as zero where other sources tell something. Other sources whose variance
        # is not known are taken to have the average one of the rest.
        idle = torch.stack([nothing for _, _, nothing in each]) & ~found.isnan().all(0)
        variances.append(torch.where(idle, 0.0, found).nanmean(0) / len(own))
    stacked = torch.stack(means)
    if len(several) > 1:
        return GradientEstimate(stacked.mean(0), stacked.var(0) / len(several))
    known = None if bool(variances[0].isnan().all()) else variances[0]
    return GradientEstimate(stacked[0], known)


def _source_gradient(
    beams: Beams,
    weight: Tensor,
    gain: Tensor,
    log_prob: Tensor,
    parameters: Sequence[Tensor],
    coordinates: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return [d] the gradient of one source, its variance, and where all terms are zero.

    The variance is NaN where it is not known, and zero if the beam holds all sequences.

    Args:
        beams: the beams of the source alone.
        weight: [K] the weights.
        gain: [K] f less its baseline.
        log_prob: [K] the log-probabilities.
        parameters: what to differentiate by.
        coordinates: which coordinates are wanted.
    """
    rows = [
        _gradient(log_prob[i], parameters, coordinates, here)
        for i, here in enumerate(beams.present[0].tolist())
    ]
    terms = gain[:, None] * torch.stack(rows).to(gain)
    value = (weight[:, None] * terms).sum(0)
    found, _ = one_beam_variance(beams, weight[None], terms[None], None, value[None])
    variance = torch.full_like(value, torch.nan) if found is None else found[0]
    p = torch.where(beams.present[0], beams.log_prob[0].exp(), 0.0)
    all_there = (p.sum() - 1).abs() <= COMPLETE and (weight - p).abs().sum() <= SAME
    return value, torch.where(all_there, 0.0, variance), (terms == 0).all(0)


def _gradient(
    log_p: Tensor, parameters: Sequence[Tensor], coordinates: Tensor | None, present: bool
) -> Tensor:
    """Return [d] the gradient of the log-probability of one sequence, zero in an empty place."""
    size = sum(p.numel() for p in parameters)
    if present:
        found = torch.autograd.grad(log_p, list(parameters), retain_graph=True, allow_unused=True)
        pairs = zip(found, parameters, strict=True)
        flat = torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])
    else:
        flat = torch.zeros(size, device=log_p.device)
    return flat if coordinates is None else flat[coordinates.to(flat.device)]
