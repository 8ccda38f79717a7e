"""The number of heads among independent coins with given odds: its tilt and its law.

**Tilt.** s is chosen so that about K − ½ heads are expected. Then S has variance at least about
1/4 (its mean is half-way between two integers) and, being unimodal with its mode next to its mean,
takes the values K − 1 and K with probability of order 1/σ. Without coin n the mean lies within ½
of K − 1. So both probabilities in π_n = p_n P(S₋ₙ = K − 1)/P(S = K) are large, for every n and for
every set of weights: an absolute error ε in them is a relative error of about σ·ε. (ε itself is the
rounding error of a product of M factors: it grows with M, to 1e-12 relative for some thousand coins
with p near ½ and 1e-11 for 10⁵ of them.)

**Law.** With φ(θ) = E e^{iθS} = Π_n (q_n + p_n e^{iθ}) at L points θ_l = 2π (l + ½)/L,

    (1/L) Σ_l φ(θ_l) e^{−ijθ_l} = Σ_m (−1)^m P(S = j + mL) .

Everything but m = 0 is an error. By Bernstein's inequality P(|S − E S| ≥ t) ≤
2 exp(−t²/(2 (v + t/3))) with v ≥ Var S, so L = t + 2 with t² = 2 log(1/``ALIASING``) (v + t/3)
makes it invisible (also where the tilt leaves the mean a quarter of σ off). Since v ≤ K (1 − K/N),
L grows like √K: about 60 points for K = 20 and 350 for K = 2000 of 5000, and by symmetry half of
them suffice. Leaving coin n out divides φ by its factor, which is zero at no θ_l: it could only be
so at π, and L is even.

(The method of characteristic functions for Poisson-binomial laws is Fernández and Williams, 2010,
and Hong, 2013; the tilt makes it accurate to rounding for every K and N.)
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

from cpsbs.scores.memory import block_size, numbers

ALIASING = 1e-19
"""Probability of the values of S that are mistaken for others."""

TAIL_ODDS_LIMIT = 0.25
"""The odds of a tail item never exceed this; see ``population``."""


class PowerSums:
    """Coins [...] that are known only by P_j = Σ (w / W)^j, j = 1…J, with W a bound on the weights.

    Args:
        largest: [...] log W; -inf if all weights are zero.
        sums: [..., J] P_j.
    """

    def __init__(self, largest: Tensor, sums: Tensor) -> None:
        self.largest = largest
        self.sums = sums
        self._order = numbers(sums.shape[-1] + 1, sums.device)[1:]

    def unsqueeze(self) -> PowerSums:
        """The same coins for a batch [..., G]."""
        return PowerSums(self.largest[..., None], self.sums[..., None, :])

    def near(self, centre: Tensor) -> PowerSums:
        """Those with weights w e^{−centre}, in float32, for a batch [..., G] of tilts."""
        largest = (self.largest - centre).to(torch.float32)[..., None]
        return PowerSums(largest, self.sums.to(torch.float32)[..., None, :])

    def expected(self, tilt: Tensor) -> Tensor:
        """[...] expected number of heads, Σ_j (−1)^{j−1} P_j W^j e^{sj}."""
        return -(self.sums * self._powers(tilt)).sum(-1)

    def log_terms(self, tilt: Tensor) -> Tensor:
        """[..., J] (−1)^{j−1} P_j W^j e^{sj} / j, the terms of log Π (1 + w e^s)."""
        return -self.sums * self._powers(tilt) / self._order

    def log_characteristic(self, tilt: Tensor, points: int) -> tuple[Tensor, Tensor]:
        """[..., L/2] real and imaginary part of log E e^{iθS} = Σ_j term_j (e^{ijθ} − 1) at the
        points of the ``Circle`` of L.
        """
        real, imaginary = _waves(points, self.sums.shape[-1], tilt.device)
        terms = self.log_terms(tilt)
        return terms @ real, terms @ imaginary

    def _powers(self, tilt: Tensor) -> Tensor:
        """[..., J] (−W e^s)^j."""
        return (tilt + self.largest).exp_().neg_()[..., None] ** self._order


def expected_heads(log_weights: Tensor, tilt: Tensor) -> Tensor:
    """[..., G] expected heads among coins [..., M] for each of the tilts [..., G]."""
    coins = max(1, 8 * block_size(tilt.device) // max(tilt.numel(), 1))
    if log_weights.shape[-1] <= coins:
        return torch.sigmoid(log_weights[..., None, :] + tilt[..., :, None]).sum(-1)
    parts = torch.split(log_weights, coins, dim=-1)
    return torch.stack([expected_heads(part, tilt) for part in parts]).sum(0)


def solve_tilt(
    expected: Callable[[Tensor], Tensor], wanted: Tensor, limit: Tensor | None, k: int, n: int
) -> Tensor:
    """The tilt [...] at which ``wanted`` [...] heads are expected, no higher than the ``limit``.

    The K-th largest log-weight is 0. Above log 2K the K largest coins alone expect K·2K/(2K + 1) >
    K − ½ heads; below −log 2N all but K − 1 coins together expect less than ½. In between by linear
    interpolation on a grid. The second derivative of the expectation is at most σ², so in a cell of
    width δ = √(2/σ) it is off by less than σ²δ²/8 = σ/4. That is all it takes: s is a free choice,
    not an approximation, as long as K is not in the tails of S.
    """
    low, high = -math.log(2 * n + 1), math.log(2 * k + 2)
    cells = 1 + math.ceil((high - low) * math.sqrt(math.sqrt(max(1, variance_bound(k, n))) / 2))
    grid = numbers(cells + 1, wanted.device).to(wanted.dtype) / cells
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


def variance_bound(k: int, n: int) -> float:
    """Largest variance of the heads among N coins that expect at most K + 1."""
    heads = min(k + 1, n / 2)
    return heads * (1 - heads / max(n, 1)) + 0.25


def alias_free(k: int, n: int) -> int:
    """L, an even number of points on the circle that tells the likely values of S apart."""
    a = -math.log(ALIASING)
    distance = a / 3 + math.sqrt(a * a / 9 + 2 * a * variance_bound(k, n))
    return 2 * math.ceil((distance + 2) / 2)


@dataclass(frozen=True)
class Circle:
    """The points θ_l of the upper half circle, [L/2], with their cosines and sines."""

    theta: Tensor
    cos: Tensor
    sin: Tensor
    lift: Tensor
    """2 (1 + cos θ)"""
    rotation: Tensor
    """e^{−iKθ} / (L/2)"""
    back: Tensor
    """[L/2, K + 1] e^{−ijθ} / (L/2) for j = K…0"""
    turns: Tensor
    """[3, L] e^{ijθ} for j = 0, 1, 2, real and imaginary parts side by side"""

    @staticmethod
    @lru_cache(maxsize=64)
    def of(points: int, k: int, device: torch.device) -> Circle:
        """The circle of L = ``points``."""
        odd = torch.arange(1, points, 2, device=device)
        theta = odd.to(torch.float64) * (math.pi / points)
        # The angles jθ are reduced in whole numbers, so that they are exact.
        turned = odd[:, None] * torch.arange(k, -1, -1, device=device) % (2 * points)
        turned = turned.to(torch.float64) * (-math.pi / points)
        back = torch.complex(turned.cos(), turned.sin()) / len(odd)
        lift = 4 * (theta / 2).cos().square()
        angle = torch.arange(3, device=device)[:, None] * theta
        turns = torch.stack([angle.cos(), angle.sin()], dim=-1).flatten(1)
        return Circle(theta, theta.cos(), theta.sin(), lift, back[:, 0], back, turns)


@lru_cache(maxsize=64)
def _waves(points: int, terms: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[J, L/2] cos jθ − 1 and sin jθ for j = 1…J."""
    odd, order = torch.arange(1, points, 2, device=device), numbers(terms + 1, device)[1:]
    angle = order[:, None] * odd.to(torch.float64) * (math.pi / points)
    return -2 * (angle / 2).sin().square(), angle.sin()


class BernoulliSum:
    """S, the number of heads of coins [..., M] and a tail, near K: P(S = K) and its relatives.

    The tilt is the one at which ``wanted`` [...] heads are expected. ``centre`` [...] is the K-th
    largest log-weight and N = ``n`` counts all coins. With ``removed`` [...], the log-weight of one
    of the coins, the law is that of the others.
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
        # Which tilt it is need not be exact, so that float32 is enough to find it.
        near_coins = (log_weights - centre[..., None]).to(torch.float32)
        near_tail = None if tail is None else tail.near(centre)
        # The tail's series must converge.
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
        self._circle = Circle.of(alias_free(k, n), k, log_weights.device)
        phi = self._product(log_weights)
        self._tail: Tensor | None = None
        """[..., L/2] the factor of the tail in φ"""
        if tail is not None:
            real, imaginary = tail.log_characteristic(self.tilt, alias_free(k, n))
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
        """[..., m] P(S = K − j) for each j of ``fewer``."""
        angle = torch.arange(fewer.start, fewer.stop, device=self.tilt.device)[:, None]
        angle = angle * self._circle.theta
        real = self._turned.real[..., None, :] * angle.cos()
        return (real - self._turned.imag[..., None, :] * angle.sin()).sum(-1)

    def tail_probabilities(self) -> Tensor | None:
        """[..., K + 1] P(T = K), …, P(T = 0) of the number of heads T in the tail, if there is one.

        The tail expects no more heads than all coins do, so that L points suffice here too.
        """
        if self._tail is None:
            return None
        return (self._tail @ self._circle.back).real.clamp(min=0)

    def probability_without(self, log_weights: Tensor, fewer: int) -> Tensor:
        """[..., m] P(S₋ₙ = K − ``fewer``) without the n-th of these coins [..., m], each in turn.

        For ``fewer`` 0 or 1. In real arithmetic: with G = φ e^{−ijθ}, the real part of
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
        """[..., N] Σ_j Cov(X_i, X_j | S = K) v_j, for all coins [..., N] and v [..., N].

        With A_n = p_n e^{iθ}/(q_n + p_n e^{iθ}), P(X_i = X_j = 1, S = K) is the mean over the
        circle of φ e^{−iKθ} A_i A_j, so that the sum over j can be taken first.
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
        """[..., m] p and q = 1 − p of these coins, each to full relative accuracy."""
        log_odds = log_weights + self.tilt[..., None]
        return torch.sigmoid(log_odds), torch.sigmoid(-log_odds)

    def _product(self, log_weights: Tensor) -> Tensor:
        """[..., L/2] Π (q + p e^{iθ}) over coins [..., M]."""
        parts = []
        for part in self._blocks(log_weights):
            p, q = self.coins(log_weights[part])
            if p.shape[-1] % 2:
                p, q = pad(p, (0, 1)), pad(q, (0, 1), value=1.0)
            # Two coins at a time, of which none, one or both come up heads.
            a, b, c, d = p[..., ::2], p[..., 1::2], q[..., ::2], q[..., 1::2]
            law = torch.stack([c * d, a * d + b * c, a * b], dim=-1)
            factors = (law @ self._circle.turns).view(*a.shape, len(self._circle.theta), 2)
            parts.append(torch.view_as_complex(factors).prod(-2))
        return parts[0] if len(parts) == 1 else torch.stack(parts).prod(0)

    def _factors(self, log_weights: Tensor) -> Tensor:
        """[..., m, L/2] q + p e^{iθ} of each of these coins [..., m]."""
        p, q = (coin[..., None] for coin in self.coins(log_weights))
        return torch.complex(q + p * self._circle.cos, p * self._circle.sin)

    def _heads_share(self, log_weights: Tensor) -> Tensor:
        """[..., m, L/2] p e^{iθ} / (q + p e^{iθ})."""
        p, _ = self.coins(log_weights)
        return torch.polar(p[..., None], self._circle.theta) / self._factors(log_weights)

    def _blocks(self, coins: Tensor) -> Iterator[tuple[EllipsisType, slice]]:
        """Slices of the last dimension that keep a [..., m, L/2] array within cache."""
        batch = max(self.tilt.numel(), math.prod(coins.shape[:-1]), 1)
        step = max(1, block_size(coins.device) // (batch * len(self._circle.theta)))
        for start in range(0, max(coins.shape[-1], 1), step):
            yield ..., slice(start, start + step)
