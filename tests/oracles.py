"""The numbers of a design computed by other means: enumeration and recurrences in mpmath.

Also the textbook recurrence in plain torch, which the benchmark compares our code with.
"""

from __future__ import annotations

import itertools
import math
from functools import cached_property
from typing import Any

import mpmath as mp
import torch
from torch import Tensor

mp.mp.dps = 60


class Enumeration:
    """A design of K of N items, given by a list of all its subsets; for small N."""

    def __init__(self, log_weights: list[float], k: int) -> None:
        self.n, self.k = len(log_weights), k
        forced = {i for i, x in enumerate(log_weights) if x == math.inf}
        weight = [mp.mpf(1) if x == math.inf else mp.exp(mp.mpf(x)) for x in log_weights]
        products = {
            subset: mp.fprod(weight[i] for i in subset)
            for subset in itertools.combinations(range(self.n), k)
            if forced <= set(subset)
        }
        self.products = {y: w for y, w in products.items() if w > 0}
        self.z = mp.fsum(self.products.values())

    @property
    def log_z(self) -> Any:
        """The logarithm of Z."""
        return mp.log(self.z)

    def inclusion(self, *items: int) -> Any:
        """Return the probability that all these items are in the sample."""
        return mp.fsum(w for y, w in self.products.items() if set(items) <= set(y)) / self.z

    @cached_property
    def entropy(self) -> Any:
        """The entropy; log1p keeps the digits of what the most probable subset contributes."""
        most = max(self.products, key=lambda y: self.products[y])
        others = [w / self.products[most] for y, w in self.products.items() if y != most]
        log_ratio = mp.log1p(mp.fsum(others))
        parts = [r * (log_ratio - mp.log(r)) for r in others]
        return (log_ratio + mp.fsum(parts)) / mp.exp(log_ratio)


def elementary(weights: list[Any], k: int) -> list[Any]:
    """Return e_0…e_K by the paper's Algorithm 1, in mpmath."""
    table = [mp.mpf(1)] + [mp.mpf(0)] * k
    for w in weights:
        for j in range(k, 0, -1):
            table[j] += w * table[j - 1]
    return table


class Recurrence:
    """A larger design: log Z and π of a few items are computed by recurrences in mpmath."""

    def __init__(self, log_weights: list[float], k: int) -> None:
        self.weights = [mp.exp(mp.mpf(x)) for x in log_weights]
        self.k = k
        self.table = elementary(self.weights, k)

    @property
    def log_z(self) -> Any:
        """The logarithm of Z."""
        return mp.log(self.table[self.k])

    def inclusion(self, *items: int) -> Any:
        """Return the probability that all these items are in the sample."""
        rest = [w for i, w in enumerate(self.weights) if i not in items]
        left = self.k - len(items)
        if left < 0:
            return mp.mpf(0)
        product = mp.fprod(self.weights[i] for i in items)
        return product * elementary(rest, left)[left] / self.table[self.k]


def relative_error(log_value: float, exact: Any) -> float:
    """Return |e^log_value / exact − 1|, or 0 where both are zero."""
    if exact == 0:
        return 0.0 if log_value == -math.inf else math.inf
    if not math.isfinite(log_value):
        return math.inf
    return float(abs(mp.expm1(mp.mpf(log_value) - mp.log(exact))))


def textbook_log_normalizer(log_weights: Tensor, k: int) -> Tensor:
    """Return log Z of a row of weights by the paper's Algorithm 1, vectorised over k.

    The weights are scaled so that the numbers stay in range without logarithms in the loop, which
    makes it about twice as fast.
    """
    scale = log_weights.topk(k).values[-1]
    weights = (log_weights - scale).exp() * (k / len(log_weights))
    table = torch.zeros(k + 1, dtype=torch.float64)
    table[0] = 1.0
    shift = 0.0
    for n, w in enumerate(weights):
        table[1:] += w * table[:-1]
        if n % 64 == 63:
            most = table.max()
            table /= most
            shift += float(most.log())
    return table[k].log() + shift + k * (scale - math.log(k / len(log_weights)))
