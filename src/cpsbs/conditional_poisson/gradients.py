"""Derivatives of a conditional Poisson design with respect to x = log w.

∂ log Z / ∂x = π (the paper's eq:incl-from-grad, read backwards), and ∂π / ∂x is the covariance
matrix of the item indicators, which is never materialised: it is only applied to vectors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cpsbs.conditional_poisson.distribution import ConditionalPoisson

RARE = -500.0
"""log π below which the covariances of an item cannot be represented in float64."""


def apply(function: type[torch.autograd.Function], design: ConditionalPoisson) -> Tensor:
    """Return the value that one of the functions below computes, with its gradient."""
    value: Tensor = function.apply(design.log_weights, design)
    return value


class LogNormalizer(torch.autograd.Function):
    """log Z, with ∂ log Z / ∂x_n = π_n (eq:incl-from-grad, read backwards)."""

    @staticmethod
    def forward(ctx: Any, log_weights: Tensor, design: ConditionalPoisson) -> Tensor:
        ctx.save_for_backward(log_weights)
        ctx.design = design
        return design._log_normalizer

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (log_weights,) = ctx.saved_tensors
        inclusion = LogInclusion.apply(log_weights, ctx.design).exp()
        # log Z does not depend on forced items.
        inclusion = inclusion.masked_fill(log_weights == math.inf, 0.0)
        return (grads[0][..., None] * inclusion).to(log_weights.dtype), None


class LogInclusion(torch.autograd.Function):
    """log π, with ∂ log π_i / ∂x_j = Cov(i, j) / π_i and Cov(i, j) = π_ij − π_i π_j."""

    @staticmethod
    def forward(ctx: Any, log_weights: Tensor, design: ConditionalPoisson) -> Tensor:
        value = design._log_inclusion.view(log_weights.shape)
        ctx.save_for_backward(log_weights, value)
        ctx.design = design
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        log_weights, value = ctx.saved_tensors
        grad = grads[0].detach()
        rare = value < RARE
        product = ctx.design._covariance_product(torch.where(rare, 0.0, grad * (-value).exp()))
        rare = rare & (value > -math.inf) & (grad != 0)
        if bool(rare.any()):
            product = product + ctx.design._gradient_of_rare(torch.where(rare, grad, 0.0))
        return _FirstDerivative.apply(product.to(log_weights.dtype), log_weights, grads[0]), None


class Entropy(torch.autograd.Function):
    """The entropy H = log Z − Σ_n π_n x_n, with ∂H / ∂x_j = −Σ_i Cov(i, j) x_i."""

    @staticmethod
    def forward(ctx: Any, log_weights: Tensor, design: ConditionalPoisson) -> Tensor:
        ctx.save_for_backward(log_weights)
        ctx.design = design
        return design.entropy()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (log_weights,) = ctx.saved_tensors
        y = ctx.design._population.relative(ctx.design._population.log_weights)
        y = torch.where(y.isfinite(), y, 0.0).view(log_weights.shape)
        product = -grads[0].detach()[..., None] * ctx.design._covariance_product(y)
        return _FirstDerivative.apply(product.to(log_weights.dtype), log_weights, grads[0]), None


class _FirstDerivative(torch.autograd.Function):
    """A gradient that raises an error when it is differentiated once more.

    Without it the second derivative would silently be zero.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError(
            "log_inclusion and entropy of a conditional Poisson design have first derivatives only"
        )
