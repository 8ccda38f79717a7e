"""Exact laws of final beams on enumerable models, by summing over all paths (eq:inc-prob)."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cpsbs import TableModel

Prefix = tuple[int, ...]
Beam = frozenset[Prefix]
Rule = Callable[[dict[Prefix, float], int], dict[Beam, float]]
"""A function from candidates with their probabilities, and K, to the law of the K picked ones."""


def extensions(model: TableModel, beam: Beam, p: dict[Prefix, float]) -> dict[Prefix, float]:
    """Return Y ∘ V with probabilities; finished hypotheses stay as they are."""
    out: dict[Prefix, float] = {}
    for y in beam:
        if y and y[-1] in model.eos:
            out[y] = p[y]
            continue
        for token, q in enumerate(model.tables[0][y]):
            if q > 0:
                out[(*y, token)] = p[y] * q
    return out


def beam_law(model: TableModel, k: int, length: int, rule: Rule) -> dict[Beam, float]:
    """Return P(Y_T) for the recursion with this rule."""
    law: dict[Beam, float] = {frozenset({()}): 1.0}
    p: dict[Prefix, float] = {(): 1.0}
    for _ in range(length):
        following: dict[Beam, float] = defaultdict(float)
        for beam, weight in law.items():
            candidates = extensions(model, beam, p)
            p.update(candidates)
            if len(candidates) <= k:
                following[frozenset(candidates)] += weight
                continue
            for picked, q in rule(candidates, k).items():
                following[picked] += weight * q
        law = dict(following)
    return law


def conditional_poisson(weight: Callable[[float], float]) -> Rule:
    """Return the rule that picks subsets in proportion to the product of their weights."""

    def rule(candidates: dict[Prefix, float], k: int) -> dict[Beam, float]:
        products: dict[Beam, float] = {}
        for subset in itertools.combinations(candidates, k):
            product = 1.0
            for y in subset:
                product *= weight(candidates[y])
            products[frozenset(subset)] = product
        total = sum(products.values())
        return {beam: q / total for beam, q in products.items()}

    return rule


@dataclass(frozen=True)
class Path:
    """One way that a search can go, Y_1, …, Y_T."""

    probability: float
    inclusion: dict[Prefix, float]
    """Π_t π_t of every sequence in Y_T."""
    joint: dict[tuple[Prefix, Prefix], float]
    """Π_t π_t of every pair, in both orders; while two have the same prefix, the prefix's own."""


StepRule = Callable[[dict[Prefix, float], dict[Prefix, float], int], dict[Beam, float]]
"""A function from candidates with p, and with p over the inclusion so far, and K, to the law of the
K picked ones."""


def paths(model: TableModel, k: int, length: int, rule: StepRule) -> Iterator[Path]:
    """Yield every path of the recursion with this rule."""

    def steps(
        probability: float,
        inclusion: dict[Prefix, float],
        joint: dict[tuple[Prefix, Prefix], float],
        p: dict[Prefix, float],
        left: int,
    ) -> Iterator[Path]:
        if left == 0:
            yield Path(probability, inclusion, joint)
            return
        candidates = extensions(model, frozenset(inclusion), p)
        parent = {y: y if y in inclusion else y[:-1] for y in candidates}
        worth = {y: q / inclusion[parent[y]] for y, q in candidates.items()}
        law = {frozenset(candidates): 1.0}
        if len(candidates) > k:
            law = rule(candidates, worth, k)
        single: dict[Prefix, float] = defaultdict(float)
        pair: dict[tuple[Prefix, Prefix], float] = defaultdict(float)
        for beam, q in law.items():
            for y in beam:
                single[y] += q
                for z in beam:
                    pair[y, z] += q
        for beam, q in law.items():
            if q > 0:
                yield from steps(
                    probability * q,
                    {y: inclusion[parent[y]] * single[y] for y in beam},
                    {(y, z): joint[parent[y], parent[z]] * pair[y, z] for y in beam for z in beam},
                    candidates,
                    left - 1,
                )

    yield from steps(1.0, {(): 1.0}, {((), ()): 1.0}, {(): 1.0}, length)


def poisson_rule(weight: Callable[[float], float]) -> StepRule:
    """Return the rule of the paper's design, whose weights are a function of p."""
    return lambda p, worth, k: conditional_poisson(weight)(p, k)


def targets(worth: dict[Prefix, float], k: int) -> dict[Prefix, float]:
    """Return the targets min(1, c u) that sum to K, found by bisection."""
    low, high = 0.0, k / min(worth.values())
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if sum(min(1.0, c * u) for u in worth.values()) < k else (low, c)
    return {y: min(1.0, high * u) for y, u in worth.items()}


def calibrated_rule(
    p: dict[Prefix, float], worth: dict[Prefix, float], k: int
) -> dict[Beam, float]:
    """Return the conditional Poisson law with the odds of the targets as weights.

    Certain items are in every subset.
    """
    target = targets(worth, k)
    certain = [y for y, t in target.items() if t > 1 - 1e-12]
    rest = [y for y in target if y not in certain]
    law = {}
    for subset in itertools.combinations(rest, k - len(certain)):
        odds = math.prod(target[y] / (1 - target[y]) for y in subset)
        law[frozenset((*certain, *subset))] = odds
    total = sum(law.values())
    return {beam: q / total for beam, q in law.items()}


def without_replacement(p: dict[Prefix, float], k: int) -> dict[Beam, float]:
    """Return the law of K draws without replacement from p, one after the other."""
    law: dict[Beam, float] = defaultdict(float)
    for order in itertools.permutations(p, k):
        left, q = 1.0, 1.0
        for y in order:
            q *= p[y] / left
            left -= p[y]
        law[frozenset(order)] += q
    return dict(law)
