"""Exact laws of final beams on enumerable models, by summing over all paths (eq:inc-prob)."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable

from cpsbs import TableModel

Prefix = tuple[int, ...]
Beam = frozenset[Prefix]
Rule = Callable[[dict[Prefix, float], int], dict[Beam, float]]
"""From candidates with their probabilities, and K, to the law of the K that are picked."""


def extensions(model: TableModel, beam: Beam, p: dict[Prefix, float]) -> dict[Prefix, float]:
    """Y ∘ V with probabilities; finished hypotheses stay as they are."""
    out: dict[Prefix, float] = {}
    for y in beam:
        if y and y[-1] in model.eos:
            out[y] = p[y]
            continue
        for token, q in enumerate(model._tables[0][y]):
            if q > 0:
                out[(*y, token)] = p[y] * q
    return out


def beam_law(model: TableModel, k: int, length: int, rule: Rule) -> dict[Beam, float]:
    """P(Y_T) for the recursion with this rule."""
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
    """Subsets in proportion to the product of their weights."""

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


def without_replacement(p: dict[Prefix, float], k: int) -> dict[Beam, float]:
    """The law of K draws without replacement from p, one after the other."""
    law: dict[Beam, float] = defaultdict(float)
    for order in itertools.permutations(p, k):
        left, q = 1.0, 1.0
        for y in order:
            q *= p[y] / left
            left -= p[y]
        law[frozenset(order)] += q
    return dict(law)
