"""Gradients of expectations: bias and variance exactly, by summing over all beams (``tests.laws``).

Statistical tests have fixed seeds and a false-alarm rate of 1e-4 each (3.9 standard deviations).
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

import cpsbs
from benchmarks import gradients as benchmark
from cpsbs import TableModel, log_prob, risk, search
from cpsbs.estimation.weights import WeightWarning
from tests import laws
from tests.decisions.small import ALL, SCORE, SIZE, THETA, F, expectation, f, model, poisson
from tests.exact import Prefix, paths, poisson_rule

SIGMAS = 3.9
ETAS = (*benchmark.ETAS, 0.7)
TRUTH = (ALL.p[:, None] * F[:, None] * SCORE).sum(0)
SEVEN = laws.Outcomes(
    tuple((i,) for i in range(7)),
    torch.tensor([0.31, 0.24, 0.17, 0.11, 0.08, 0.06, 0.03], dtype=torch.float64).log(),
)

toy = cache(benchmark.Toy)


# ------------------------------------------------------------------ the toy, with one step


@pytest.mark.parametrize("eta", ETAS)
def test_the_toy_has_the_gradient_of_the_paper(eta: float) -> None:
    sigma = 1 / (1 + math.exp(-eta))
    assert toy(eta).truth == pytest.approx(-0.18 * sigma * (1 - sigma), rel=1e-12)
    assert toy(0.0).truth == pytest.approx(-0.045, rel=1e-12)


@pytest.mark.parametrize("eta", ETAS)
@pytest.mark.parametrize("estimator", benchmark.ESTIMATORS, ids=lambda e: e.name)
def test_what_claims_to_be_unbiased_is_so_exactly(
    estimator: benchmark.Estimator, eta: float
) -> None:
    for k in estimator.sizes:
        probability, gradient = estimator.made(toy(eta), k)
        assert float(probability.sum()) == pytest.approx(1, abs=1e-12)
        bias = float((probability * gradient[:, 0]).sum()) - toy(eta).truth
        if estimator.unbiased or k == 8:
            assert abs(bias) < 1e-10, k
        else:
            assert bias > 1e-10, k  # towards zero


def test_the_results_are_those_of_the_code() -> None:
    kept = json.loads((benchmark.ROOT / "benchmarks/results/gradients.json").read_text())
    for mine, theirs in zip(benchmark.measured()["rows"], kept["rows"], strict=True):
        assert mine["estimator"] == theirs["estimator"]
        for name in ("eta", "k", "bias", "deviation"):
            both = [math.inf if row[name] is None else row[name] for row in (mine, theirs)]
            assert both[0] == pytest.approx(both[1], rel=1e-6, abs=1e-10), theirs


@pytest.mark.parametrize("eta", ETAS)
def test_variances_of_independent_samples_are_those_of_the_textbook(eta: float) -> None:
    own, k = toy(eta), 5
    p, score = own.outcomes.p, own.score[:, 0]

    def variance(b: float) -> float:
        return float((p * ((own.f - b) * score).square()).sum()) - own.truth**2

    for b in (0.0, own.expectation):
        law = own.law("independent", k)
        found = law.variance(laws.gradients(law, own.f, own.score, b))
        assert float(found) == pytest.approx(variance(b) / k, rel=1e-10)
    # RLOO is a U-statistic: Hoeffding's second component comes on top.
    law = own.law("independent", k)
    found = law.variance(laws.gradients(law, own.f, own.score, "loo"))
    spread = float((p * (own.f - own.expectation).square()).sum())
    more = (spread * float((p * score.square()).sum()) + own.truth**2) / (k * (k - 1))
    assert float(found) == pytest.approx(variance(own.expectation) / k + more, rel=1e-10)


def test_equal_probabilities_make_three_estimators_one() -> None:
    """Joint inclusion and the unordered set know the same, if all sets are equally probable."""
    own = toy(0.0)
    for k in (2, 3, 5):
        law = own.law("conditional-poisson", k)
        mine = laws.gradients(law, own.f, own.score, "loo")
        _, theirs = laws.unordered_set(own.outcomes, k, own.f, own.score)
        torch.testing.assert_close(mine.sort(0).values, theirs.sort(0).values)


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_leaving_one_out_of_sbs_has_a_finite_variance_from_four_on(k: int) -> None:
    """The share of the second moment that comes from thresholds which never occur."""
    own = toy(0.0)
    law = own.law("gumbel-top-k", k)
    square = law.probability * laws.gradients(law, own.f, own.score, "loo")[:, 0].square()
    assert law.beams.log_inclusion is not None
    never = law.beams.log_inclusion[:, 0] < -40
    share = float(square[never].sum() / square.sum())
    assert (share > 0.2) == (k < 4)
    assert k < 4 or share < 1e-15


def test_a_beams_own_estimate_biases_by_a_covariance() -> None:
    own = toy(-4.0)
    for k in (2, 3, 5):
        law = own.law("stratified", k)
        found = law.mean(laws.gradients(law, own.f, own.score, "own")) - own.truth
        assert law.beams.log_weight is not None
        weight = law.beams.log_weight.exp()
        value = (weight * own.f[law.picks]).sum(-1)
        score = (weight * own.score[law.picks, 0]).sum(-1)
        covariance = float((law.probability * value * score).sum())
        assert float(found) == pytest.approx(-covariance, rel=1e-6)


@pytest.mark.parametrize("k", range(1, 8))
def test_the_toy_bit_by_bit(k: int) -> None:
    """Conditional Poisson beams of three tokens: 1 is a zero and 2 a one; 0 never comes."""
    own, bits = toy(0.7), laws.bernoulli_toy(0.7)[3]
    sigma = 1 / (1 + math.exp(-0.7))
    row = [0.0, 1 - sigma, sigma]
    prefixes = {tuple(b + 1 for b in y[:n]) for y in bits for n in range(3)}
    table = TableModel(dict.fromkeys(prefixes, row), 0)
    outcomes = laws.Outcomes(
        tuple(tuple(b + 1 for b in y) for y in bits), own.outcomes.log_prob.clone()
    )
    every = paths(table, k, 3, poisson_rule(lambda p: p / (1 - p)))
    law = laws.from_paths(outcomes, every, k, "conditional-poisson")
    for baseline in ("none", 0.8, *(["loo"] if k > 1 else [])):
        mean = law.mean(laws.gradients(law, own.f, own.score, baseline))
        assert float(mean) == pytest.approx(own.truth, abs=1e-10), baseline


# ------------------------------------------------------------------ laws are those of the search


@pytest.mark.parametrize("design", ["stratified", "gumbel-top-k"])
@pytest.mark.parametrize("k", [2, 3, 5])
def test_beams_are_drawn_as_the_law_says(design: str, k: int) -> None:
    draws = 20_000
    beams = search(
        TableModel([{(): SEVEN.p.tolist()}] * draws, 0), k, design, max_length=1, generator=k
    )
    law = (
        laws.gumbel(SEVEN, k)
        if design == "gumbel-top-k"
        else laws.stratified(SEVEN, k, laws.rankings(SEVEN, k))
    )
    codes = (2 ** beams.sequences[..., 0]).sum(-1)
    expected = torch.zeros(128, dtype=torch.float64)
    expected.index_add_(0, (2**law.picks).sum(-1), law.probability)
    hits = torch.bincount(codes, minlength=128)
    assert float(hits[expected == 0].sum()) == 0
    kept = expected * draws >= 5
    merged = [
        torch.cat([x[kept].double(), x[~kept].double().sum()[None]])
        for x in (hits, expected * draws)
    ]
    some = merged[1] > 0
    found = stats.chisquare(merged[0][some].numpy(), merged[1][some].numpy())
    assert found.pvalue > 1e-4
    # A statistic of the weights too, which depend on the threshold.
    assert beams.log_weight is not None
    assert law.beams.log_weight is not None
    mine, theirs = ((-x.exp()).exp().sum(-1) for x in (beams.log_weight, law.beams.log_weight))
    exact = float((law.probability * theirs).sum())
    assert abs(float(mine.mean()) - exact) <= SIGMAS * float(mine.std()) / math.sqrt(draws) + 1e-12


# ------------------------------------------------------------------ a model with parameters


def of_sequences(design: str, k: int) -> laws.Law:
    """Return the law of the beams of the small model."""
    if design == "conditional-poisson":
        return poisson(k)
    if design == "sum-and-sample":
        kept: list[Prefix] = []
        if k > 1:
            beam = search(model(THETA), k - 1, "top-k", max_length=SIZE).tokens(0)
            kept = [tuple(y) for y in beam]
        first = [ALL.sequences.index(y) for y in kept]
        ranking = [*first, *(i for i in range(len(ALL)) if i not in first)]
        return laws.sum_and_sample(ALL, k, [ranking])
    return {"independent": laws.independent, "gumbel-top-k": laws.gumbel}[design](ALL, k)


CASES = [
    (design, k, baseline)
    for design in ("independent", "gumbel-top-k", "conditional-poisson", "sum-and-sample")
    for k in (1, 2, 4)
    for baseline in ("none", 1.7, "loo")
    if baseline != "loo" or (k > 1 and design != "sum-and-sample")
]


@pytest.mark.parametrize(("design", "k", "baseline"), CASES)
@pytest.mark.parametrize("moved", [False, True])
def test_gradients_of_a_model_are_unbiased(design: str, k: int, baseline: Any, moved: bool) -> None:
    """Through teacher forcing and autograd; after the model has moved, for the moved one."""
    law = of_sequences(design, k)
    step = 0.3 * torch.randn(THETA.shape, generator=torch.Generator().manual_seed(9)).double()
    theta = (THETA.detach() + (step if moved else 0)).requires_grad_()
    forced = log_prob(model(theta, len(law.probability)), law.beams)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WeightWarning)
        found = risk(law.beams, F[law.picks.clamp(min=0)], forced, baseline, moved=moved)
    mean = (law.probability * found).sum()
    exact = expectation(theta)
    assert mean.item() == pytest.approx(exact.item(), abs=1e-10)
    (mine,), (theirs,) = (torch.autograd.grad(x, theta) for x in (mean, exact))
    assert float((mine - theirs).abs().max()) < 1e-10
    assert float(theirs.abs().max()) > 0.01


def sampled(design: str, k: int, seed: int, draws: int = 3000) -> cpsbs.Beams:
    generator = torch.Generator().manual_seed(seed)
    joint = design == "conditional-poisson"
    return search(model(THETA, draws), k, design, max_length=SIZE, generator=generator, joint=joint)


def by_source(beams: Sequence[cpsbs.Beams], baseline: Any, direction: Tensor) -> Tensor:
    """Return [B] the gradient of the risk of every source, along a direction."""
    parts = [torch.where(b.present, b.log_prob, 0.0).requires_grad_() for b in beams]
    own: list[Any] = [f] * len(beams[0])
    found = torch.autograd.grad(risk(beams, own, parts, baseline).sum(), parts)
    number = {y: i for i, y in enumerate(ALL.sequences)}
    total = torch.zeros(len(beams[0]), dtype=torch.float64)
    slope = SCORE @ direction
    for b, coefficient in zip(beams, found, strict=True):
        picks = [[number[tuple(y)] for y in b.tokens(i)] for i in range(len(b))]
        total += (coefficient * slope[torch.tensor(picks)]).sum(-1)
    return total


@pytest.mark.parametrize(
    ("design", "k", "baseline"),
    [
        ("stratified", 3, "none"),
        ("stratified", 3, 1.7),
        ("stratified", 2, "cross"),
        ("stratified", 3, "cross"),
        ("gumbel-top-k", 5, "loo"),
        ("gumbel-top-k", 4, "cross"),
        ("calibrated", 3, "none"),
        ("arithmetic", 3, "cross"),
        ("conditional-poisson", 3, "loo"),
    ],
)
def test_gradients_of_drawn_beams_are_unbiased(design: str, k: int, baseline: Any) -> None:
    beams = [sampled(design, k, seed) for seed in range(2 if baseline == "cross" else 1)]
    direction = torch.randn(
        SCORE.shape[-1], generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    found = by_source(beams, baseline, direction)
    error = float(found.std()) / math.sqrt(len(found))
    assert abs(float(found.mean()) - float(TRUTH @ direction)) < SIGMAS * error
    assert error < 0.2 * abs(float(TRUTH @ direction))


DESIGNS = ("independent", "gumbel-top-k", "conditional-poisson", "stratified", "calibrated")


@pytest.mark.parametrize("design", DESIGNS[1:])
@pytest.mark.parametrize(("baseline", "normalize"), [("none", False), ("own", False), (None, True)])
def test_a_beam_of_all_sequences_has_the_exact_gradient(
    design: str, baseline: Any, normalize: bool
) -> None:
    theta = THETA.detach().clone().requires_grad_()
    beams = search(model(theta), 20, design, max_length=SIZE, generator=0)
    found = risk(beams, f, log_prob(model(theta), beams), baseline, normalize=normalize)
    (gradient,) = torch.autograd.grad(found.sum(), theta)
    assert found.item() == pytest.approx(float((ALL.p * F).sum()), rel=1e-9)
    torch.testing.assert_close(gradient.flatten(), TRUTH, atol=1e-8, rtol=1e-6)


def test_normalised_gradients_of_a_moved_model_are_those_of_a_draw_from_it() -> None:
    """If the inclusion probabilities stay what they were, only p counts."""
    law = laws.gumbel(SEVEN, 3)
    some = law[torch.arange(60, len(law.probability), 50)]
    other = torch.tensor([0.2, 0.1, 0.2, 0.2, 0.1, 0.1, 0.1], dtype=torch.float64).log()
    values = torch.arange(7, dtype=torch.float64)[some.picks]
    q = some.beams.log_inclusion
    assert q is not None
    again = laws.make(
        laws.Outcomes(SEVEN.sequences, other),
        "gumbel-top-k",
        some.probability,
        some.picks,
        other[some.picks] - q,
        q,
    )
    now = other[some.picks].requires_grad_()
    pair: list[Callable[[], Tensor]] = [
        partial(risk, some.beams, values, now, normalize=True, moved=True),
        partial(risk, again.beams, values, now, normalize=True),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WeightWarning)
        first, second = (made() for made in pair)
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), now)[0] for x in (first, second)))


def test_what_became_impossible_counts_nothing() -> None:
    law = laws.independent(SEVEN, 2)
    now = law.beams.log_prob.masked_fill(law.picks == 3, -math.inf).requires_grad_()
    found = risk(law.beams, SEVEN.p[law.picks], now, "none", moved=True)
    (gradient,) = torch.autograd.grad(found.sum(), now)
    assert bool(found.isfinite().all())
    assert float(gradient[law.picks == 3].abs().max()) == 0
