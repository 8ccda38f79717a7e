"""Gradients of expectations beyond ``cpsbs.risk``; they live in ``cpsbs.decisions.policy``."""

from cpsbs.decisions.baselines import BaselineWarning
from cpsbs.decisions.policy import (
    GradientEstimate,
    divergence,
    entropy,
    gradient_estimate,
    group_advantages,
    policy_loss,
)
from cpsbs.estimation.forcing import TokenScores, token_scores

__all__ = [
    "BaselineWarning",
    "GradientEstimate",
    "TokenScores",
    "divergence",
    "entropy",
    "gradient_estimate",
    "group_advantages",
    "policy_loss",
    "token_scores",
]
