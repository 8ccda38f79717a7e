"""Exact laws of whole beams: every beam that a design can draw, with its probability.

The beams are ``Beams`` like those of a search, so that what the library makes of them can be summed
over the law. A law of a beam over sequences is needed only where the search is one draw from all
sequences, whatever the steps: independent samples, stochastic beam search (the K largest of N
perturbed log-probabilities), sum-and-sample, and every design with one step. For conditional
Poisson sampling over several steps there are the paths of ``tests.exact``.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import cpsbs
from cpsbs import Beams
from cpsbs.estimation.weights import WeightWarning
from tests.exact import Path, Prefix

STEP, LOWEST, HIGHEST = 0.25, -60.0, 4.0
"""The grid of the logarithm of the threshold. The trapezoidal rule errs by e^(−π²/STEP), because
the nearest poles are at a distance of π/2 from the axis, and what lies outside is below 1e-23."""


@dataclass(frozen=True)
class Outcomes:
    """N sequences and their probabilities, which sum to one."""

    sequences: tuple[Prefix, ...]
    log_prob: Tensor
    """[N] log p(y)."""

    @property
    def p(self) -> Tensor:
        """[N] the probabilities."""
        return self.log_prob.exp()

    def __len__(self) -> int:
        return len(self.sequences)


@dataclass(frozen=True)
class Law:
    """B beams and the probability of each."""

    probability: Tensor
    """[B] the probabilities, which sum to one."""
    picks: Tensor
    """[B, K] the numbers of the sequences in a beam; -1 in empty places."""
    beams: Beams
    """The beams, one for each source."""

    def __getitem__(self, rows: Tensor) -> Law:
        """Return some of the beams, with their probabilities as they are."""
        return Law(self.probability[rows], self.picks[rows], self.beams[rows.tolist()])

    def mean(self, values: Tensor) -> Tensor:
        """Return [d] the expectation of values [B, d]."""
        return (self.probability[:, None] * values).sum(0)

    def variance(self, values: Tensor) -> Tensor:
        """Return [d] the variance of values [B, d]."""
        return (self.probability[:, None] * (values - self.mean(values)).square()).sum(0)


def make(
    outcomes: Outcomes,
    design: str,
    probability: Iterable[float] | Tensor,
    picks: Sequence[Sequence[int]] | Tensor,
    log_weight: Tensor,
    log_inclusion: Tensor | None = None,
    joint: Tensor | None = None,
) -> Law:
    """Return a law whose beams hold these picks, with these weights [B, K]."""
    number = torch.as_tensor(picks, dtype=torch.int64)
    length = max(map(len, outcomes.sequences))
    tokens = torch.tensor([[*y, *[0] * (length - len(y))] for y in outcomes.sequences])
    lengths = torch.tensor([len(y) for y in outcomes.sequences])
    present = number >= 0
    place = number.clamp(min=0)

    def some(x: Tensor) -> Tensor:
        return torch.where(present, x, -math.inf)

    beams = Beams(
        sequences=tokens[place],
        lengths=lengths[place],
        finished=present,
        present=present,
        log_prob=some(outcomes.log_prob[place]),
        log_inclusion=None if log_inclusion is None else some(log_inclusion),
        log_weight=some(log_weight),
        design=design,
        pad=0,
        joint_log_inclusion=joint,
        made_by=cpsbs.DESIGNS[design](),
    )
    return Law(torch.as_tensor(probability, dtype=torch.float64), number, beams)


def independent(outcomes: Outcomes, k: int) -> Law:
    """Return the law of K independent samples, whose order does not matter."""
    number = list(itertools.combinations_with_replacement(range(len(outcomes)), k))
    picks = torch.tensor(number)
    orders = [
        math.factorial(k) / math.prod(math.factorial(y.count(i)) for i in set(y)) for y in number
    ]
    probability = torch.tensor(orders).double() * outcomes.p[picks].prod(-1)
    log_weight = torch.full(picks.shape, -math.log(k), dtype=torch.float64)
    return make(outcomes, "independent", probability, picks, log_weight)


def gumbel(outcomes: Outcomes, k: int) -> Law:
    """Return the law of stochastic beam search, by quadrature over the threshold κ.

    The scores are G_y = −log X_y with X_y exponential of rate p(y). With t = e^−κ, the beam is S
    and the threshold in dt with probability Π_{y ∈ S} (1 − e^{−p t}) · R e^{−R t} dt, where R is
    the mass outside S. The grid is in log R t.
    """
    n = len(outcomes)
    if k >= n:
        picks = torch.arange(n)[None]
        nothing = torch.zeros(1, n, dtype=torch.float64)
        return make(outcomes, "gumbel-top-k", [1.0], picks, outcomes.log_prob[None], nothing)
    subsets = torch.tensor(list(itertools.combinations(range(n), k)))
    outside = torch.ones(len(subsets), n, dtype=torch.float64).scatter_(-1, subsets, 0.0)
    rest = (outside * outcomes.p).sum(-1)
    x = torch.arange(LOWEST, HIGHEST, STEP, dtype=torch.float64)
    s = x.exp()
    t = s / rest[:, None]
    q = -torch.expm1(-outcomes.p[subsets][:, None, :] * t[..., None])
    probability = (q.prod(-1) * (-s).exp() * s * STEP).flatten()
    picks = subsets[:, None, :].expand(q.shape).reshape(-1, k)
    log_q = q.log().view(-1, k)
    log_weight = outcomes.log_prob[picks] - log_q
    kept = probability > 0
    return make(
        outcomes, "gumbel-top-k", probability[kept], picks[kept], log_weight[kept], log_q[kept]
    )


def from_paths(outcomes: Outcomes, paths: Iterable[Path], k: int, design: str) -> Law:
    """Return the law of a design of which all paths are known."""
    number = {y: i for i, y in enumerate(outcomes.sequences)}
    found = list(paths)
    picks = torch.full((len(found), k), -1)
    single = torch.zeros(len(found), k, dtype=torch.float64)
    pairs = torch.zeros(len(found), k, k, dtype=torch.float64)
    for b, path in enumerate(found):
        beam = list(path.inclusion)
        size = len(beam)
        picks[b, :size] = torch.tensor([number[y] for y in beam])
        single[b, :size] = torch.tensor(
            [path.inclusion[y] for y in beam], dtype=torch.float64
        ).log()
        both = [[path.joint[y, z] for z in beam] for y in beam]
        pairs[b, :size, :size] = torch.tensor(both, dtype=torch.float64).log()
    log_weight = outcomes.log_prob[picks.clamp(min=0)] - single
    probability = [path.probability for path in found]
    return make(outcomes, design, probability, picks, log_weight, single, pairs)


def rankings(outcomes: Outcomes, k: int) -> list[list[int]]:
    """Return the ways to name the K largest where some are equally probable, each a list of all.

    A search breaks ties in an order of its own; to average over all is to shuffle the sequences.
    """
    p = [float(f"{x:.9g}") for x in outcomes.p.tolist()]
    edge = sorted(p, reverse=True)[k - 1] if k else 2.0
    above = [i for i, x in enumerate(p) if x > edge]
    equal = [i for i, x in enumerate(p) if x == edge]
    return [
        [*above, *some, *(i for i in range(len(p)) if i not in above and i not in some)]
        for some in itertools.combinations(equal, k - len(above))
    ]


def stratified(outcomes: Outcomes, k: int, ranked: Sequence[Sequence[int]]) -> Law:
    """Return the law of systematic sampling in one step: over rankings, orders and offsets.

    Heavy sequences are kept. The light ones among the first K of the ranking lie first on the line,
    in random order, and then the others, in random order; those on which s, s + 1, … fall are
    picked, with s uniform in [0, 1).
    """
    n, p = len(outcomes), outcomes.p
    target = _targets(p, k)
    log_pi = target.log()
    if k >= n:
        everything = torch.arange(n)[None]
        nothing = torch.zeros(1, n, dtype=torch.float64)
        return make(outcomes, "stratified", [1.0], everything, outcomes.log_prob[None], nothing)
    heavy = [i for i in range(n) if target[i] >= 1]
    halves = [
        [[i for i in part if i not in heavy] for part in (ranking[:k], ranking[k:])]
        for ranking in ranked
    ]
    orders = torch.tensor(
        [
            [*a, *b]
            for first, others in halves
            for a in itertools.permutations(first)
            for b in itertools.permutations(others)
        ]
    )
    ends = target[orders].cumsum(-1)
    # The picks change only where an end of an interval passes a point.
    breaks = torch.cat([(ends % 1.0), torch.zeros_like(ends[:, :1])], -1).sort(-1).values
    breaks = torch.cat([breaks, torch.ones_like(ends[:, :1])], -1)
    share, offset = breaks.diff(dim=-1), (breaks[:, 1:] + breaks[:, :-1]) / 2
    points = offset[..., None] + torch.arange(k - len(heavy))
    at = torch.searchsorted(ends, points.flatten(1), right=True).clamp_(max=orders.shape[-1] - 1)
    picked = orders.gather(-1, at).view(points.shape)
    code = (2**picked).sum(-1).flatten()
    weight = torch.bincount(code, weights=share.flatten(), minlength=2**n) / len(orders)
    picks = [[*heavy, *(i for i in range(n) if c >> i & 1)] for c in range(2**n)]
    kept = [c for c in range(2**n) if weight[c] > 1e-13 and len(picks[c]) == k]
    chosen = torch.tensor([picks[c] for c in kept])
    log_weight = outcomes.log_prob[chosen] - log_pi[chosen]
    return make(outcomes, "stratified", weight[kept], chosen, log_weight, log_pi[chosen])


def _targets(p: Tensor, k: int) -> Tensor:
    """Return min(1, c p) that sum to K."""
    order = p.argsort(descending=True)
    for heavy in range(k):
        light = order[heavy:]
        scale = (k - heavy) / p[light].sum()
        if scale * p[light[0]] < 1 - 1e-12:
            return torch.ones_like(p).index_copy(0, light, scale * p[light])
    return torch.ones_like(p)


def sum_and_sample(outcomes: Outcomes, k: int, ranked: Sequence[Sequence[int]]) -> Law:
    """Return the law of the first K − 1 of a ranking, and one sample of all others."""
    picks = torch.tensor(
        [[*ranking[: k - 1], other] for ranking in ranked for other in ranking[k - 1 :]]
    )
    each = [outcomes.p[list(ranking[k - 1 :])].sum() for ranking in ranked]
    rest = torch.stack(each).repeat_interleave(len(outcomes) - k + 1)
    log_weight = outcomes.log_prob[picks].clone()
    log_weight[:, -1] = rest.log()
    probability = outcomes.p[picks[:, -1]] / rest / len(ranked)
    return make(outcomes, "sum-and-sample", probability, picks, log_weight)


def pairs(law: Law) -> tuple[Law, Law]:
    """Return two laws whose beams, row by row, are all pairs of independent beams."""
    count = torch.arange(len(law.probability))
    i, j = count.repeat_interleave(len(count)), count.repeat(len(count))
    probability = law.probability[i] * law.probability[j]
    return replace(law[i], probability=probability), replace(law[j], probability=probability)


def gradients(
    laws: Law | Sequence[Law], f: Tensor, score: Tensor, baseline: Any = "none", **options: Any
) -> Tensor:
    """Return [B, d] the gradient that ``cpsbs.risk`` has for every beam of a law.

    Args:
        laws: a law, or several of independent beams, row by row.
        f: [N] f of the sequences.
        score: [N, d] ∇log p of the sequences.
        baseline: as for ``risk``.
        **options: as for ``risk``.
    """
    several = [laws] if isinstance(laws, Law) else list(laws)
    leaves = [
        torch.where(law.beams.present, law.beams.log_prob, 0.0).requires_grad_() for law in several
    ]
    values = [f[law.picks] for law in several]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WeightWarning)  # rare beams count as much as others here
        found = cpsbs.risk([law.beams for law in several], values, leaves, baseline, **options)
    pieces = torch.autograd.grad(found.sum(), leaves)
    terms = [
        (c[..., None] * score[law.picks]).sum(1) for c, law in zip(pieces, several, strict=True)
    ]
    return torch.stack(terms).sum(0)


def unordered_set(outcomes: Outcomes, k: int, f: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    """Return the law [M] and the gradients [M, d] of the unordered set estimator.

    Kool, van Hoof and Welling (2020) draw S without replacement and condition on the set alone:
    with R(S, s) the probability that the others are drawn if s does not exist, over the probability
    of S, Σ_s p(s) R(S, s) f(s) is unbiased, and the baseline of s is the same estimate without s,
    with p(s) f(s) added. A single sequence has no baseline: K is at least 2.
    """
    p = outcomes.p.tolist()
    known: dict[tuple[frozenset[int], frozenset[int]], float] = {}

    def probability(subset: frozenset[int], without: frozenset[int]) -> float:
        """Return the probability that a set is what is drawn first, if some do not exist."""
        if not subset:
            return 1.0
        if (subset, without) not in known:
            total = 0.0
            for last in subset:
                before = subset - {last}
                left = sum(x for i, x in enumerate(p) if i not in before and i not in without)
                total += probability(before, without) * p[last] / left
            known[subset, without] = total
        return known[subset, without]

    law, found = [], []
    for beam in map(frozenset, itertools.combinations(range(len(p)), k)):
        whole = probability(beam, frozenset())
        gradient = torch.zeros_like(score[0])
        for s in beam:
            others = beam - {s}
            alone = probability(others, frozenset({s}))
            b = p[s] * f[s]
            for z in others:
                b = b + p[z] * probability(others - {z}, frozenset({s, z})) / alone * f[z]
            gradient = gradient + p[s] * alone / whole * (f[s] - b) * score[s]
        law.append(whole)
        found.append(gradient)
    return torch.tensor(law, dtype=torch.float64), torch.stack(found)


def bernoulli_toy(eta: float) -> tuple[Outcomes, Tensor, Tensor, list[Prefix]]:
    """Return Kool et al.'s toy: eight outcomes, their costs f [8], ∇log p [8, 1], and their bits.

    Three independent bits are one with probability σ(η), and f(b) = Σ_i (b_i − t_i)² with the
    targets t = 0.6, 0.51, 0.48. The gradient of E f is σ(η) (1 − σ(η)) Σ_i (1 − 2 t_i).
    """
    bits = list(itertools.product((0, 1), repeat=3))
    b = torch.tensor(bits, dtype=torch.float64)
    sigma = torch.tensor(eta, dtype=torch.float64).sigmoid()
    log_p = (b * sigma.log() + (1 - b) * (-sigma).log1p()).sum(-1)
    f = (b - torch.tensor([0.6, 0.51, 0.48], dtype=torch.float64)).square().sum(-1)
    score = (b - sigma).sum(-1, keepdim=True)
    return Outcomes(tuple((i,) for i in range(8)), log_p), f, score, bits
