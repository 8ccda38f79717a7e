"""S, the number of heads among independent coins with given odds: its tilt and its distribution.

**Tilt.** The odds of coin n are w_n e^s, where w_n is its weight and s is free to choose. It is
chosen so that about K − ½ heads are expected. Then S has variance at least about ¼ (its mean is
half-way between two integers) and, being unimodal with its mode next to its mean, takes the values
K − 1 and K with probability of order 1/σ. Without coin n the mean lies within ½ of K − 1. So both
probabilities in π_n = p_n P(S₋ₙ = K − 1)/P(S = K) are large, for every n and for every set of
weights: an absolute error ε in them is a relative error of about σ·ε. (ε itself is the rounding
error of a product of M factors: it grows with M, to 1e-12 relative for some thousand coins with p
near ½ and 1e-11 for 10⁵ of them.)

**Law.** The characteristic function of S is a product over the coins, φ(θ) = E e^{iθS} =
Π_n (q_n + p_n e^{iθ}), with q_n = 1 − p_n. At L points θ_l = 2π (l + ½)/L of the circle,

    (1/L) Σ_l φ(θ_l) e^{−ijθ_l} = Σ_m (−1)^m P(S = j + mL) .

Every term but m = 0 is an error (*aliasing*). By Bernstein's inequality P(|S − E S| ≥ t) ≤
2 exp(−t²/(2 (v + t/3))) with v ≥ Var S, so L = t + 2 with t² = 2 log(1/``ALIASING``) (v + t/3)
makes the error invisible (also where the tilt leaves the mean a quarter of σ off). Since
v ≤ K (1 − K/N), L grows like √K: it is about 60 for K = 20 and 350 for K = 2000 of 5000, and by
symmetry half of the points suffice. Leaving coin n out divides φ by its factor, which is zero at no
θ_l: it could only be zero at π, and L is even.

(The method of characteristic functions for Poisson-binomial laws is due to Fernández and Williams,
2010, and Hong, 2013; the tilt makes it accurate to rounding for every K and N.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import EllipsisType

import torch
from torch import Tensor
from torch.nn.functional import pad

from cpsbs.scores.memory import block_size, shared_arange

ALIASING = 1e-19
"""Largest total probability of the values of S that aliasing mistakes for others."""

TAIL_ODDS_LIMIT = 0.25
"""Bound on the odds of every item of the tail; see ``population``."""


class PowerSums:
    """Coins known by their power sums P_j = Σ (w / W)^j, j = 1…J, with W a bound on the weights.

    Args:
        largest: [...] log W; -inf if all weights are zero.
        sums: [..., J] P_j.
    """

    def __init__(self, largest: Tensor, sums: Tensor) -> None:
        self.largest = largest
        self.sums = sums
        self._order = shared_arange(sums.shape[-1] + 1, sums.device)[1:]

    def unsqueeze(self) -> PowerSums:
        """Return the same coins for tilts of shape [..., G]."""
        return PowerSums(self.largest[..., None], self.sums[..., None, :])

    def centred(self, centre: Tensor) -> PowerSums:
        """Return coins of weights w e^{−centre} in float32, for tilts of shape [..., G]."""
        largest = (self.largest - centre).to(torch.float32)[..., None]
        return PowerSums(largest, self.sums.to(torch.float32)[..., None, :])

    def expected(self, tilt: Tensor) -> Tensor:
        """Return [...] the expected number of heads, Σ_j (−1)^{j−1} P_j W^j e^{sj}."""
        return -(self.sums * self._powers(tilt)).sum(-1)

    def log_terms(self, tilt: Tensor) -> Tensor:
        """Return [..., J] (−1)^{j−1} P_j W^j e^{sj} / j, the terms of log Π (1 + w e^s)."""
        return -self.sums * self._powers(tilt) / self._order

    def log_characteristic(self, tilt: Tensor, points: int) -> tuple[Tensor, Tensor]:
        """Return the real and the imaginary part [..., L/2] of log E e^{iθS}.

        It is Σ_j term_j (e^{ijθ} − 1), at the points of the ``Circle`` of L.
        """
        real, imaginary = tail_waves(points, self.sums.shape[-1], tilt.device)
        terms = self.log_terms(tilt)
        return terms @ real, terms @ imaginary

    def _powers(self, tilt: Tensor) -> Tensor:
        """Return [..., J] (−W e^s)^j."""
        return (tilt + self.largest).exp_().neg_()[..., None] ** self._order


def expected_heads(log_weights: Tensor, tilt: Tensor) -> Tensor:
    """Return [..., G] the expected heads among coins [..., M] at each of the tilts [..., G]."""
    coins = max(1, 8 * block_size(tilt.device) // max(tilt.numel(), 1))
    if log_weights.shape[-1] <= coins:
        return torch.sigmoid(log_weights[..., None, :] + tilt[..., :, None]).sum(-1)
    parts = torch.split(log_weights, coins, dim=-1)
    return torch.stack([expected_heads(part, tilt) for part in parts]).sum(0)


def tilt_bounds(k: int, n: int) -> tuple[float, float]:
    """Return bounds on the tilt at which K − ½ of N coins are expected to come up heads.

    The K-th largest log-weight is 0. Above log 2K the K largest coins alone expect K·2K/(2K + 1) >
    K − ½ heads; below −log 2N all but K − 1 coins together expect less than ½.
    """
    return -math.log(2 * n + 1), math.log(2 * k + 2)


def solve_tilt(
    expected: Callable[[Tensor], Tensor], wanted: Tensor, limit: Tensor | None, k: int, n: int
) -> Tensor:
    """Return the tilt [...] at which ``wanted`` [...] heads are expected, at most the ``limit``.

    The K-th largest log-weight is 0. Between the ``tilt_bounds`` the expectation is interpolated
    linearly on a grid. Its second derivative is at most σ², so in a cell of width δ = √(2/σ) it is
    off by less than σ²δ²/8 = σ/4. That is all it takes: s is a free choice, not an approximation,
    as long as K is not in the tails of S.
    """
    low, high = tilt_bounds(k, n)
    cells = grid_cells(k, n)
    grid = shared_arange(cells + 1, wanted.device).to(wanted.dtype) / cells
    if limit is None:
        tilt = (low + (high - low) * grid).expand(*wanted.shape, -1)
    else:
        tilt = low + (limit.clamp(max=high) - low)[..., None] * grid
    heads = expected(tilt)
    right = torch.searchsorted(heads, wanted[..., None]).clamp_(1, cells)
    cell = torch.cat([right - 1, right], dim=-1)
    left, right = tilt.gather(-1, cell).unbind(-1)
    few, many = heads.gather(-1, cell).unbind(-1)
    share = ((wanted - few) / (many - few)).nan_to_num_(0.5).clamp_(0, 1)
    return torch.lerp(left, right, share)


def grid_cells(k: int, n: int) -> int:
    """Return how many cells the grid of ``solve_tilt`` has."""
    low, high = tilt_bounds(k, n)
    return 1 + math.ceil((high - low) * math.sqrt(math.sqrt(max(1, variance_bound(k, n))) / 2))


def variance_bound(k: int, n: int) -> float:
    """Return the largest variance of S among N coins that expect at most K + 1 heads."""
    heads = min(k + 1, n / 2)
    return heads * (1 - heads / max(n, 1)) + 0.25


def circle_points(k: int, n: int) -> int:
    """Return L, an even number of points on the circle that tell the likely values of S apart."""
    a = -math.log(ALIASING)
    distance = a / 3 + math.sqrt(a * a / 9 + 2 * a * variance_bound(k, n))
    return 2 * math.ceil((distance + 2) / 2)


@dataclass(frozen=True)
class Circle:
    """The L/2 points θ_l of the upper half circle, and what is computed at each of them."""

    theta: Tensor
    """[L/2] θ"""
    cos: Tensor
    """[L/2] cos θ"""
    sin: Tensor
    """[L/2] sin θ"""
    lift: Tensor
    """[L/2] 2 (1 + cos θ)"""
    rotation: Tensor
    """[L/2] e^{−iKθ} / (L/2), which takes φ to P(S = K)"""
    inverse: Tensor
    """[L/2, K + 1] e^{−ijθ} / (L/2) for j = K…0, which takes φ to P(S = j)"""
    pair_factors: Tensor
    """[3, L] e^{ijθ} for j = 0, 1, 2 heads of two coins, real and imaginary parts side by side"""

    @staticmethod
    @lru_cache(maxsize=64)
    def of(points: int, k: int, device: torch.device) -> Circle:
        """Return the circle of L = ``points``."""
        odd = torch.arange(1, points, 2, device=device)
        theta = odd.to(torch.float64) * (math.pi / points)
        # The angles jθ are reduced while they are integers, so that they are exact.
        turned = odd[:, None] * torch.arange(k, -1, -1, device=device) % (2 * points)
        turned = turned.to(torch.float64) * (-math.pi / points)
        inverse = torch.complex(turned.cos(), turned.sin()) / len(odd)
        lift = 4 * (theta / 2).cos().square()
        angle = torch.arange(3, device=device)[:, None] * theta
        pair_factors = torch.stack([angle.cos(), angle.sin()], dim=-1).flatten(1)
        rotation = inverse[:, 0]
        return Circle(theta, theta.cos(), theta.sin(), lift, rotation, inverse, pair_factors)


@lru_cache(maxsize=64)
def tail_waves(points: int, terms: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return [J, L/2] cos jθ − 1 and sin jθ for j = 1…J, at the points of the circle of L."""
    odd, order = torch.arange(1, points, 2, device=device), shared_arange(terms + 1, device)[1:]
    angle = order[:, None] * odd.to(torch.float64) * (math.pi / points)
    return -2 * (angle / 2).sin().square(), angle.sin()


class BernoulliSum:
    """The law of S, the number of heads of some coins and a tail, near K.

    Args:
        log_weights: [..., M] the log-weights of the coins.
        tail: further coins, if there are any.
        k: K.
        n: N, how many coins there are with those of the tail.
        wanted: [...] how many heads are to be expected at the tilt.
        centre: [...] the K-th largest log-weight.
        removed: [...] the log-weight of one of the coins, if the law is to be that of all others.
    """

    def __init__(
        self,
        log_weights: Tensor,
        tail: PowerSums | None,
        k: int,
        n: int,
        wanted: Tensor,
        centre: Tensor,
        removed: Tensor | None = None,
    ) -> None:
        # The tilt need not be exact, so that float32 is enough to find it.
        near_coins = (log_weights - centre[..., None]).to(torch.float32)
        near_tail = None if tail is None else tail.centred(centre)
        # Beyond the limit the series of the tail would not converge.
        limit = None if near_tail is None else math.log(TAIL_ODDS_LIMIT) - near_tail.largest[..., 0]

        def expected(tilt: Tensor) -> Tensor:
            heads = expected_heads(near_coins, tilt)
            if near_tail is not None:
                heads += near_tail.expected(tilt)
            if removed is not None:
                heads -= torch.sigmoid((removed - centre).to(torch.float32)[..., None] + tilt)
            return heads

        self.k = k
        self.tilt = solve_tilt(expected, wanted.to(torch.float32), limit, k, n) - centre
        self._circle = Circle.of(circle_points(k, n), k, log_weights.device)
        phi = self._product(log_weights)
        self._tail: Tensor | None = None
        """[..., L/2] the factor of φ that belongs to the tail"""
        if tail is not None:
            real, imaginary = tail.log_characteristic(self.tilt, circle_points(k, n))
            self._tail = torch.polar(real.exp_(), imaginary)
            phi = phi * self._tail
        if removed is not None:
            phi = phi / self._factors(removed[..., None])[..., 0, :]
        self._turned = phi * self._circle.rotation
        """[..., L/2] φ e^{−iKθ} / (L/2), the terms of P(S = K)"""

    @cached_property
    def log_probability(self) -> Tensor:
        """[...] log P(S = K)."""
        return self._turned.real.sum(-1).log_()

    def probabilities(self, fewer: range) -> Tensor:
        """Return [..., m] P(S = K − j) for each j of ``fewer``."""
        angle = torch.arange(fewer.start, fewer.stop, device=self.tilt.device)[:, None]
        angle = angle * self._circle.theta
        real = self._turned.real[..., None, :] * angle.cos()
        return (real - self._turned.imag[..., None, :] * angle.sin()).sum(-1)

    def tail_probabilities(self) -> Tensor | None:
        """Return [..., K + 1] P(T = K), …, P(T = 0) for the number T of heads in the tail.

        None if there is no tail. It expects no more heads than all coins do, so that L points
        suffice here too.
        """
        if self._tail is None:
            return None
        return (self._tail @ self._circle.inverse).real.clamp(min=0)

    def probability_without(self, log_weights: Tensor, fewer: int) -> Tensor:
        """Return [..., m] P(S₋ₙ = K − ``fewer``), without each of these coins [..., m] in turn.

        ``fewer`` is 0 or 1. In real arithmetic: with G = φ e^{−ijθ}, the real part of
        G / (q + p e^{iθ}) is (q Re G + p Re(G e^{−iθ})) / ((q − p)² + 2 p q (1 + cos θ)).
        """
        p, q = self.coins(log_weights)
        here, circle = self._turned.real, self._circle
        aside = self._turned.imag * circle.sin
        if fewer == 0:
            columns = torch.stack([here, here * circle.cos + aside], dim=-1)
        else:
            columns = torch.stack([here * circle.cos - aside, here], dim=-1)
        product, square = p * q, (q - p).square_()
        pieces = []
        for part in self._blocks(p):
            modulus = square[part][..., None].addcmul(product[part][..., None], circle.lift)
            pieces.append(modulus.reciprocal_() @ columns)
        both = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-2)
        return q * both[..., 0] + p * both[..., 1]

    def covariance_product(self, log_weights: Tensor, vector: Tensor) -> Tensor:
        """Return [..., N] Σ_j Cov(X_i, X_j | S = K) v_j, for all coins [..., N] and v [..., N].

        X_n is 1 if coin n comes up heads, else 0. With A_n = p_n e^{iθ}/(q_n + p_n e^{iθ}),
        P(X_i = X_j = 1, S = K) is the mean over the circle of φ e^{−iKθ} A_i A_j, so that the sum
        over j can be taken first.
        """
        total = torch.zeros_like(self._turned)
        for part in self._blocks(log_weights):
            share = self._heads_share(log_weights[part])
            total += (vector[part][..., None, :].to(share.dtype) @ share)[..., 0, :]
        turned = self._turned[..., None]
        probability = self.log_probability.exp()[..., None]
        mean, second = torch.zeros_like(vector), torch.zeros_like(vector)
        for part in self._blocks(log_weights):
            share = self._heads_share(log_weights[part])
            mean[part] = (share @ turned)[..., 0].real / probability
            pairs = share * (total[..., None, :] - share * vector[part][..., None])
            second[part] = (pairs @ turned)[..., 0].real / probability + mean[part] * vector[part]
        return second - mean * (mean * vector).sum(-1, keepdim=True)

    def coins(self, log_weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return [..., m] p and q = 1 − p of these coins, each to full relative accuracy."""
        log_odds = log_weights + self.tilt[..., None]
        return torch.sigmoid(log_odds), torch.sigmoid(-log_odds)

    def _product(self, log_weights: Tensor) -> Tensor:
        """Return [..., L/2] Π (q + p e^{iθ}) over coins [..., M]."""
        parts = []
        for part in self._blocks(log_weights):
            p, q = self.coins(log_weights[part])
            if p.shape[-1] % 2:
                p, q = pad(p, (0, 1)), pad(q, (0, 1), value=1.0)
            # Two coins are taken at a time, of which none, one or both come up heads.
            a, b, c, d = p[..., ::2], p[..., 1::2], q[..., ::2], q[..., 1::2]
            law = torch.stack([c * d, a * d + b * c, a * b], dim=-1)
            factors = (law @ self._circle.pair_factors).view(*a.shape, len(self._circle.theta), 2)
            parts.append(torch.view_as_complex(factors).prod(-2))
        return parts[0] if len(parts) == 1 else torch.stack(parts).prod(0)

    def _factors(self, log_weights: Tensor) -> Tensor:
        """Return [..., m, L/2] q + p e^{iθ} of each of these coins [..., m]."""
        p, q = (coin[..., None] for coin in self.coins(log_weights))
        return torch.complex(q + p * self._circle.cos, p * self._circle.sin)

    def _heads_share(self, log_weights: Tensor) -> Tensor:
        """Return [..., m, L/2] p e^{iθ} / (q + p e^{iθ}) of each of these coins [..., m]."""
        p, _ = self.coins(log_weights)
        return torch.polar(p[..., None], self._circle.theta) / self._factors(log_weights)

    def _blocks(self, coins: Tensor) -> Iterator[tuple[EllipsisType, slice]]:
        """Yield slices of the last dimension for which a [..., m, L/2] array stays in the cache."""
        batch = max(self.tilt.numel(), math.prod(coins.shape[:-1]), 1)
        step = max(1, block_size(coins.device) // (batch * len(self._circle.theta)))
        for start in range(0, max(coins.shape[-1], 1), step):
            yield ..., slice(start, start + step)
