"""Computes exact inclusion probabilities on small models, by summing over all paths.

π(y) = Σ_{Y_1} … Σ_{Y_T ∋ y} Π_t Q(Y_t | Y_{t−1})                          (eq:monster-inclusion)
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from cpsbs.conditional_poisson.distribution import ConditionalPoisson
from cpsbs.models.table import Prefix, TableModel


def tempered(model: TableModel, temperature: float) -> TableModel:
    """Return the model at a temperature, p_τ, as a table model."""

    def scaled(p: Sequence[float]) -> list[float]:
        return (torch.tensor(p, dtype=torch.float64).log() / temperature).softmax(-1).tolist()

    tables = [{prefix: scaled(p) for prefix, p in table.items()} for table in model.tables]
    return TableModel(tables, model.eos[0])


def inclusion(model: TableModel, k: int, max_length: int) -> dict[Prefix, float]:
    """Return π(y) of every sequence that conditional Poisson stochastic beam search can return."""
    law: dict[frozenset[Prefix], float] = {frozenset({()}): 1.0}
    p: dict[Prefix, float] = {(): 1.0}
    for _ in range(max_length):
        following: dict[frozenset[Prefix], float] = defaultdict(float)
        for beam, probability in law.items():
            candidates = _extended(model, sorted(beam), p)
            for picked, share in _subsets(candidates, k).items():
                following[picked] += probability * share
            p |= candidates
        law = following
    total: dict[Prefix, float] = defaultdict(float)
    for beam, probability in law.items():
        for y in beam:
            total[y] += probability
    return dict(total)


def _extended(model: TableModel, beam: list[Prefix], p: dict[Prefix, float]) -> dict[Prefix, float]:
    """Return all one-token extensions with their probabilities; finished hypotheses stay."""
    found: dict[Prefix, float] = {}
    for y in beam:
        if y and y[-1] in model.eos:
            found[y] = p[y]
        else:
            after = enumerate(model.tables[0][y])
            found |= {(*y, token): p[y] * q for token, q in after if q > 0}
    return found


def _subsets(candidates: dict[Prefix, float], k: int) -> dict[frozenset[Prefix], float]:
    """Return the law of the K candidates that are selected; all, if there are at most K."""
    names = list(candidates)
    if len(names) <= k:
        return {frozenset(names): 1.0}
    log_p = torch.tensor([math.log(candidates[name]) for name in names], dtype=torch.float64)
    design = ConditionalPoisson.from_log_probs(log_p, k)
    places = list(itertools.combinations(range(len(names)), k))
    shares = design.log_weights[torch.tensor(places)].sum(-1).softmax(-1)
    return {
        frozenset(names[i] for i in place): share
        for place, share in zip(places, shares.tolist(), strict=True)
    }
