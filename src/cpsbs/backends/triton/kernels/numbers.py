"""What several kernels compute with."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@cache
def host_number(value: float, device: torch.device) -> Tensor:
    """[1] float64; as arguments kernels get numbers in float32.

    It is never freed, because graphs go on reading it.
    """
    return torch.tensor([value], dtype=torch.float64, device=device)


@triton.jit
def scaled(score, inverse_temperature):
    """Float64 score / temperature. To divide takes ten times as long as to multiply."""
    return score.to(tl.float32).to(tl.float64) * inverse_temperature


@triton.jit
def one_minus_exp(x):
    """1 − e^x for x ≤ 0, accurate at both ends.

    Near 0 a rounded e^x has another logarithm than x; (1 − e^x)·x / log e^x makes up for it.
    """
    p = tl.exp(x)
    inner = tl.where((x > -1.0) & (p < 1.0), p, 0.5)
    near = tl.where(p < 1.0, (1.0 - inner) * x / tl.log(inner), -x)
    return tl.where(x > -1.0, near, 1.0 - p)


@triton.jit
def log_odds(log_p):
    """Log p/(1 − p), accurate at both ends, as ``conditional_poisson.weights.log_odds``."""
    return tl.where(log_p == 0.0, float("inf"), log_p - tl.log(one_minus_exp(log_p)))


@triton.jit
def softplus(x):
    """Log(1 + e^x), to an absolute error of rounding."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
