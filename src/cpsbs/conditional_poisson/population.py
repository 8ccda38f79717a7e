"""Splits N weights into a head of M items, kept one by one, and a tail, kept as power sums.

Inside this package log-weights are float64 and *relative*, written y: measured from the row's
*reference*, its K-th largest log-weight. The design does not depend on the scale of the weights,
and the candidates that matter then have log-weights near zero. An item with log-weight +inf is in
every sample and is called *forced*.

The tail enters the characteristic function of the number of heads S through

    log Π_{n ∈ tail} (1 + w_n z) = Σ_{j ≥ 1} (−1)^{j−1} P_j z^j / j ,    P_j = Σ_{n ∈ tail} w_n^j ,

(Newton's identities in exponential form), cut after J terms. On the circle |z| = e^s that the law
of S is computed on, let u = e^s·(largest tail weight). At most K + ½ heads are expected, so that
P_1 e^s ≤ (1 + u) Σ_{tail} w_n e^s/(1 + w_n e^s) ≤ (K + ½)(1 + u), and what is cut off is at most

    Σ_{j > J} P_j e^{sj} / j  ≤  (K + ½)(1 + u) u^J / ((J + 1) (1 − u)) .

J is chosen so large that this does not matter (``weights``). At least M − K − 1 coins of the head
that are not forced are as likely as any in the tail, and together they expect at most K + 1 heads.
So with M ≥ 8 K + 40 (``head_size``) u is below ¼ for every input, and J is below 25; typically J is
4 to 10.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from cpsbs.conditional_poisson.bernoulli_sum import BernoulliSum, PowerSums
from cpsbs.conditional_poisson.weights import PlainWeights, Weights
from cpsbs.scores.largest import head_size
from cpsbs.scores.reading import Largest

TAIL_SPREAD = 4.0
"""Largest Σ_{n ∈ tail} (odds of n)² before the head is made larger.

Items of the tail are picked independently, and rejected when two coincide. They are accepted with
probability about exp(−spread / 2), so a draw takes at most some e² attempts on average."""


class TooFewError(ValueError):
    """An error that says which rows, ``rows`` [R], have too few items of positive weight."""

    def __init__(self, message: str, rows: Tensor) -> None:
        super().__init__(message)
        self.rows = rows


@dataclass(frozen=True)
class Tail:
    """What is kept of the items outside the head, for R rows."""

    powers: PowerSums
    unit: Tensor
    """[R] the log-weight that the sums are relative to; it is not itself a relative one."""
    chunk_sums: Tensor
    """[R, C] the first power sum of each chunk of items."""
    chunk_length: int
    """The number of items in a chunk; the last one may be shorter."""


@dataclass(frozen=True)
class Population:
    """R rows of N weights from which K items are drawn, split into a head and a tail."""

    weights: Weights
    """The weights as they were given."""
    k: int
    reference: Tensor
    """[R] the log-weight that the relative ones are measured from."""
    head: Tensor
    """[R, M] relative log-weights, in the order of ``head_index``."""
    head_index: Tensor
    """[R, M] the items of the head, in ascending order."""
    in_top: Tensor
    """[R, M] true for the K largest."""
    ranked: Tensor
    """[R, M + 2] the head's relative log-weights, descending, between +inf and -inf: column j is
    the j-th largest item of the row."""
    regular: bool
    """Whether no row has forced items, and all have more than K items of positive weight."""
    tail: Tail | None
    """None if the head is the whole row."""

    @property
    def n(self) -> int:
        """N, the number of items in a row."""
        return self.weights.shape[-1]

    @property
    def log_weights(self) -> Tensor:
        """[R, N] the log-weights as they were given, in the caller's dtype."""
        return self.weights.values

    @cached_property
    def forced(self) -> Tensor:
        """[R] the number of forced items."""
        return (self.head == math.inf).sum(-1)

    @cached_property
    def positive(self) -> Tensor:
        """[R] the number of items in the head with positive weight."""
        return (self.head > -math.inf).sum(-1)

    @property
    def determined(self) -> Tensor:
        """[R] true where only one subset has positive probability."""
        return (self.forced == self.k) | (self.positive == self.k)

    def wanted_heads(self, offset: float) -> Tensor:
        """Return [R] the number of heads to expect at the tilt: K + ``offset``."""
        if self.regular:
            return torch.full_like(self.reference, self.k + offset)
        return _wanted_heads(self.k, self.forced, offset)

    def relative(self, log_weights: Tensor) -> Tensor:
        """Return given log-weights [..., R, m] as float64 ones relative to their reference."""
        return log_weights.to(torch.float64) - self.reference[:, None]

    @cached_property
    def law(self) -> BernoulliSum:
        """The law of the number of heads at the tilt where about K − ½ are expected."""
        return self._law(self.wanted_heads(-0.5), torch.zeros_like(self.reference))

    @cached_property
    def law_above(self) -> BernoulliSum:
        """The same law at the tilt where K + ½ are expected, which suits 1 − π."""
        return self._law(self.wanted_heads(0.5), finite_or_zero(self.ranked[:, self.k + 1]))

    def _law(self, wanted: Tensor, centre: Tensor) -> BernoulliSum:
        tail = None if self.tail is None else self.tail.powers
        return BernoulliSum(self.head, tail, self.k, self.n, wanted, centre)

    def law_given(self, item: Tensor) -> BernoulliSum:
        """Return [R, m] the law of the heads among all *other* coins, for each of the items [R, m].

        It is the law near K − 1, at the tilt where about K − 3/2 are expected. The (K−1)-th largest
        of the others is the K-th of all where the item is above it, and the (K−1)-th of all where
        it is not.
        """
        forced = self.forced[:, None] - (item == math.inf).long()
        return BernoulliSum(
            log_weights=self.head[:, None, :],
            tail=None if self.tail is None else self.tail.powers.unsqueeze(),
            k=self.k - 1,
            n=self.n,
            wanted=_wanted_heads(self.k - 1, forced, -0.5),
            centre=torch.where(item > 0, 0.0, finite_or_zero(self.ranked[:, [self.k - 1]])),
            removed=item,
        )


def _wanted_heads(k: int, forced: Tensor, offset: float) -> Tensor:
    """Return [...] K + offset, or K + ½ where the forced items leave no free place.

    There K − ½ heads cannot be expected, and only P(S = K) matters.
    """
    return torch.where(forced < k, k + offset, k + 0.5).to(torch.float64)


def finite_or_zero(x: Tensor) -> Tensor:
    """Return x, with 0 in the place of infinities and NaN."""
    return x.nan_to_num(0.0, 0.0, 0.0)


@torch.inference_mode()
def split(weights: Tensor | Weights, k: int, name: str = "log_weights") -> Population:
    """Split rows into head and tail so that every error bound of this package holds.

    The head starts with ``head_size`` items and grows until the tail is thin enough; where it would
    become a sizeable part of the row, it becomes the whole row.

    Args:
        weights: log-weights [R, N], or an object that stands for them.
        k: K.
        name: what errors call the weights.

    Raises:
        ValueError: if a row has a NaN or admits no sample.
    """
    if isinstance(weights, Tensor):
        weights = PlainWeights(weights)
    n = weights.shape[-1]
    size = head_size(k)
    while True:
        if 4 * size >= n or weights.shape[0] == 0:
            return _without_tail(weights, weights.largest(n), k, name)
        head = weights.largest(size)
        population = _without_tail(weights, head, k, name)
        tail = _tail(population, head)
        population = replace(population, tail=tail)
        odds = (population.law.tilt + tail.powers.largest).exp()
        if float((tail.powers.sums[:, 1] * odds.square()).max()) <= TAIL_SPREAD:
            return population
        size *= 4


def _without_tail(weights: Weights, head: Largest, k: int, name: str) -> Population:
    """Return the population with this head, which lacks its tail."""
    ranked = pad(head.values, (1, 1), value=-math.inf)
    ranked[:, 0] = math.inf
    regular = _check_rows(ranked, k, name)
    reference = ranked[:, k]
    if not regular:
        # The K-th largest is forced only if all places are.
        reference = torch.where(reference == math.inf, ranked[:, k + 1], reference)
        reference = finite_or_zero(reference)
    # A finite weight may be so far above the reference that the difference overflows; that does not
    # make it forced.
    far = (ranked < math.inf) & (ranked - reference[:, None] == math.inf)
    ranked = (ranked - reference[:, None]).masked_fill_(far, torch.finfo(ranked.dtype).max)
    index, order = head.index.sort(dim=-1)
    return Population(
        weights=weights,
        k=k,
        reference=reference,
        head=ranked[:, 1:-1].gather(-1, order),
        head_index=index,
        in_top=order < k,
        ranked=ranked,
        regular=regular,
        tail=None,
    )


def _check_rows(ranked: Tensor, k: int, name: str) -> bool:
    """Raise an error for rows that admit no sample; return whether all rows are regular."""
    if len(ranked) == 0:
        return True
    # NaN counts as the largest value, so it comes first; and it is not below infinity.
    if ranked.shape[-1] > 2:
        most, least = torch.stack([ranked[:, 1].max(), ranked[:, k + 1].min()]).tolist()
        if k > 0 and most < math.inf and least > -math.inf:
            return True
    values = ranked[:, 1:-1]
    forced, positive = (values == math.inf).sum(-1), (values > -math.inf).sum(-1)
    if bool(values.isnan().any()):
        row = int(values.isnan().any(-1).nonzero()[0, 0])
        raise ValueError(f"{name} has a NaN (row {row}); it must hold numbers, -inf or inf")
    if int(forced.max()) > k:
        raise ValueError(
            f"{name} makes {int(forced.max())} items of row {int(forced.argmax())} certain; "
            f"at most k = {k} can be in every sample"
        )
    if int(positive.min()) < k:
        raise TooFewError(
            f"{name} is above -inf in only {int(positive.min())} places of row "
            f"{int(positive.argmin())}; k = {k} needs at least {k}",
            positive < k,
        )
    return False


def _tail(population: Population, found: Largest) -> Tail:
    """Return the tail of a population whose head are the items that were found."""
    head = population.head
    # No item of the tail exceeds the smallest of the head; "largest" means that bound from here on.
    largest = population.ranked[:, -2]
    unit = finite_or_zero(largest)

    # How many power sums? That depends on the odds u of the largest tail item, and these on the
    # tail. Bound u from above: the heads expected at odds u are a concave function of u, so from
    # any u that is too large, u·wanted/expected is smaller and still too large. K + ½ heads are the
    # most that is ever asked for, and a tail of mass P_1 expects at least P_1 u/(1 + u).
    log_weights = head - unit[:, None]
    wanted = torch.full((), population.k + 0.5, dtype=unit.dtype, device=unit.device)
    first = wanted / (head.shape[-1] - wanted)
    if not population.regular:
        log_weights = torch.where(head < math.inf, log_weights, -math.inf)
        wanted = population.wanted_heads(0.5) - population.forced
        first = wanted / (head.shape[-1] - population.forced - wanted)
    empty = largest == -math.inf

    def odds(mass: Tensor | None, rounds: int) -> Tensor:
        u = first
        for _ in range(rounds):
            expected = torch.sigmoid(log_weights + u.log()[..., None]).sum(-1)
            if mass is not None:
                expected += mass * (u / (1 + u))
            u = u * (wanted / expected).clamp_(max=1.0)
        return u.masked_fill(empty, 0.0)

    # Adding the reference rounds the unit; what counts is that all sums use the same one.
    unit = unit + population.reference
    largest = torch.where(largest == -math.inf, -math.inf, unit - population.reference)
    sums, chunk_sums, length = population.weights.power_sums(unit, found, population.k, odds)
    return Tail(PowerSums(largest, sums), unit, chunk_sums, length)
