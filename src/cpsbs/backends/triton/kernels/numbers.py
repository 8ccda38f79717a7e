"""Functions of numbers that several kernels share."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@cache
def host_number(value: float, device: torch.device) -> Tensor:
    """Return the number as a float64 tensor [1], because arguments of a kernel are float32.

    It is never freed, because CUDA graphs go on reading it.
    """
    return torch.tensor([value], dtype=torch.float64, device=device)


@triton.jit
def scaled(score, inverse_temperature):
    """Return score / temperature in float64, by a product: a division takes ten times as long."""
    return score.to(tl.float32).to(tl.float64) * inverse_temperature


@triton.jit
def one_minus_exp(x):
    """Return 1 − e^x for x ≤ 0, accurate at both ends.

    Near 0 the rounded e^x has another logarithm than x, which (1 − e^x)·x / log e^x corrects.
    """
    p = tl.exp(x)
    inner = tl.where((x > -1.0) & (p < 1.0), p, 0.5)
    near = tl.where(p < 1.0, (1.0 - inner) * x / tl.log(inner), -x)
    return tl.where(x > -1.0, near, 1.0 - p)


@triton.jit
def log_odds(log_p):
    """Return log p/(1 − p), accurate at both ends, as ``conditional_poisson.weights.log_odds``."""
    return tl.where(log_p == 0.0, float("inf"), log_p - tl.log(one_minus_exp(log_p)))


@triton.jit
def softplus(x):
    """Return log(1 + e^x), to an absolute error of rounding."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
