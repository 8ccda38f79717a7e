"""π(y) of a sequence: the paper's propositions by enumeration, and the estimates against it."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from torch import Tensor

from cpsbs import (
    Beams,
    ConditionalPoisson,
    TableModel,
    estimate,
    hindsight_inclusion,
    monte_carlo_inclusion,
    search,
)
from cpsbs.conditional_poisson.population import split
from cpsbs.conditional_poisson.sampling import log_inclusion
from cpsbs.conditional_poisson.weights import CandidateWeights, PlainWeights, WithForcedItem
from cpsbs.designs import Calibrated, ConditionalPoissonDesign
from cpsbs.estimation.inclusion import (
    hindsight_reciprocal_variance_bound,
    monte_carlo_reciprocal_variance,
    monte_carlo_variance,
)
from cpsbs.scores.reading import read
from tests.exact import Prefix, paths, poisson_rule

SIGMAS = 3.9
K, LENGTH = 2, 3
MODEL = TableModel.random(vocab_size=3, length=LENGTH, eos=0, seed=1)
ALL = MODEL.sequences(LENGTH)
PATHS = list(paths(MODEL, K, LENGTH, poisson_rule(lambda p: p / (1 - p))))

PI: dict[Prefix, float] = defaultdict(float)
"""π(y) = Σ over paths that end with y in the beam (eq:monster-inclusion)."""
for _path in PATHS:
    for _y in _path.inclusion:
        PI[_y] += _path.probability


def models(sources: Tensor) -> TableModel:
    return TableModel([MODEL.tables[0] for _ in sources.tolist()], 0)


def some_beams(seed: int = 0, k: int = K) -> Beams:
    generator = torch.Generator().manual_seed(seed)
    return search(MODEL, k, "conditional-poisson", max_length=LENGTH, generator=generator)


@pytest.mark.parametrize("y", sorted(PI))
def test_the_hindsight_proposal_is_a_distribution(y: Prefix) -> None:
    """P(path) / Π π_t sums to one over the paths through y (lem:decomposition), ..."""
    proposal = [(p.probability / p.inclusion[y], p.inclusion[y]) for p in PATHS if y in p.inclusion]
    assert math.fsum(q for q, _ in proposal) == pytest.approx(1, abs=1e-12)
    # ... under which Π π_t is unbiased for π (eq:is-good, prop:is i).
    mean = math.fsum(q * product for q, product in proposal)
    assert mean == pytest.approx(PI[y], rel=1e-12)
    # Its variance, by the delta rule, is within the bound of prop:is ii.
    variance = math.fsum(q * product**2 for q, product in proposal) - mean**2
    ratio = max(product for _, product in proposal) / PI[y]
    for runs in (1, 10):
        bound = hindsight_reciprocal_variance_bound(torch.tensor(PI[y]), torch.tensor(ratio), runs)
        assert variance / runs / PI[y] ** 4 <= float(bound) * (1 + 1e-6)


def test_hindsight_is_unbiased_and_its_reciprocal_consistent() -> None:
    beams = some_beams()
    many = hindsight_inclusion(models, beams, 3000, generator=torch.Generator().manual_seed(4))
    for i, y in enumerate(beams.tokens(0)):
        pi, error = float(many.log_value[0, i].exp()), float(many.standard_error[0, i])
        assert abs(pi - PI[tuple(y)]) < SIGMAS * error + 1e-12
        assert 1 / pi == pytest.approx(1 / PI[tuple(y)], rel=0.1)
    assert not bool(many.never.any())
    assert "3000 runs" in str(many)


def test_hindsight_products_are_those_of_paths_through_the_sequence() -> None:
    beams = some_beams()
    possible = {y: {round(p.inclusion[y], 9) for p in PATHS if y in p.inclusion} for y in PI}
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        one = hindsight_inclusion(models, beams, 1, generator=generator)
        for i, y in enumerate(beams.tokens(0)):
            assert round(float(one.log_value[0, i].exp()), 9) in possible[tuple(y)]


def test_hindsight_with_more_places_than_sequences_is_certain() -> None:
    beams = some_beams(k=50)
    result = hindsight_inclusion(models, beams, 2, batch_size=7)
    assert torch.equal(result.log_value[beams.present], torch.zeros(len(ALL)).double())
    assert float(estimate(beams, len, log_inclusion=result.log_value).captured[0]) == pytest.approx(
        1
    )


def test_monte_carlo_inclusion() -> None:
    beams, runs = some_beams(), 4000
    result = monte_carlo_inclusion(
        models, beams, runs, generator=torch.Generator().manual_seed(3), batch_size=1000
    )
    for i, y in enumerate(beams.tokens(0)):
        pi = torch.tensor(PI[tuple(y)], dtype=torch.float64)
        error = float(monte_carlo_variance(pi, runs).sqrt())
        assert abs(float(result.log_value[0, i].exp()) - float(pi)) < SIGMAS * error
        assert float(result.standard_error[0, i]) == pytest.approx(error, rel=0.2)


def test_empty_places_do_not_hide_sequences() -> None:
    model = TableModel.random(vocab_size=2, length=3, eos=0, seed=5)
    beams = search(model, 5, "conditional-poisson", max_length=3)
    assert int(beams.present.sum()) == 4
    result = monte_carlo_inclusion(lambda rows: TableModel(model.tables * len(rows), 0), beams, 10)
    assert torch.equal(result.log_value[beams.present], torch.zeros(4).double())
    assert bool(result.log_value[~beams.present].isnan().all())


def test_the_variance_of_monte_carlo_inclusion() -> None:
    """Var of the mean of M indicators (eq:mc-var), and of its reciprocal by the delta rule."""
    y = max(PI, key=lambda y: PI[y])
    pi, runs = torch.tensor(PI[y], dtype=torch.float64), 50
    generator = torch.Generator().manual_seed(0)
    drawn = search(
        models(torch.zeros(20_000)),
        K,
        "conditional-poisson",
        max_length=LENGTH,
        generator=generator,
    )
    hits = torch.tensor([list(y) in drawn.tokens(b) for b in range(20_000)]).double()
    shares = hits.view(-1, runs).mean(-1)
    assert float(shares.var()) == pytest.approx(float(monte_carlo_variance(pi, runs)), rel=0.3)
    reciprocal = float(monte_carlo_reciprocal_variance(pi, runs))
    assert float(shares.reciprocal().var()) == pytest.approx(reciprocal, rel=0.4)


def test_a_sequence_that_never_came_up_is_told_of() -> None:
    beams = some_beams(seed=5, k=4)
    result = monte_carlo_inclusion(models, beams, 1, generator=torch.Generator().manual_seed(9))
    assert bool(result.never.any())
    assert bool(result.log_value[result.never].isnan().all())
    assert "never came up" in str(result)
    with pytest.raises(ValueError, match="cannot be weighted"):
        estimate(beams, len, log_inclusion=result.log_value)


@pytest.mark.parametrize("k", [1, 3])
def test_a_forced_item_is_conditioning(k: int) -> None:
    """The implicit form that the search uses against ``condition_on``, with and without a tail."""
    generator = torch.Generator().manual_seed(k)
    for n in (20, 2000):
        scores = 3 * torch.randn((4, 2, n // 2), generator=generator).double()
        offset = torch.tensor([[-1.0, -2.0]]).double().expand(4, 2)
        chunks = read(scores, 1.0, 32, 4)
        weights = CandidateWeights(chunks, offset - chunks.log_total, odds=True)
        plain = PlainWeights(weights.values)
        design = ConditionalPoisson(weights.values, k)
        for item in (int(weights.values[0].argmax()), 0, n - 1):
            index = torch.full((4,), item)
            expected = design.condition_on(index).log_inclusion
            for kind in (weights, plain):
                got = log_inclusion(split(WithForcedItem(kind, index[:, None]), k))
                torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_bad_arguments_are_named() -> None:
    beams = some_beams()
    with pytest.raises(ValueError, match="runs is 0"):
        hindsight_inclusion(models, beams, 0)
    with pytest.raises(ValueError, match="batch_size is 0"):
        monte_carlo_inclusion(models, beams, 1, batch_size=0)
    with pytest.raises(ValueError, match="is for conditional-poisson"):
        hindsight_inclusion(models, beams, 1, Calibrated())
    annealed = ConditionalPoissonDesign(anneal=0.5)
    with pytest.raises(ValueError, match=r"anneal=0.5\); .* which is conditional-poisson$"):
        hindsight_inclusion(models, beams, 1, annealed)
    cooler = search(MODEL, K, annealed, max_length=LENGTH)
    for given in (annealed, None):
        assert hindsight_inclusion(models, cooler, 2, given).log_value.isfinite().all()
    repeating = search(MODEL, K, "independent", max_length=LENGTH)
    with pytest.raises(ValueError, match="may draw a sequence twice"):
        monte_carlo_inclusion(models, repeating, 1, "independent")
