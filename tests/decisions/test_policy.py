"""Regularisers, advantages, clipped ratios, errors of gradients, and what is refused."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cpsbs
from cpsbs import Beams, TransformersModel, log_prob, risk, search
from cpsbs.estimation.weights import WeightWarning
from cpsbs.gradients import (
    BaselineWarning,
    divergence,
    entropy,
    gradient_estimate,
    group_advantages,
    policy_loss,
    token_scores,
)
from tests import laws
from tests.decisions.small import ALL, SCORE, SIZE, THETA, F, f, model, parameters, poisson
from tests.models import tiny

OTHER = parameters(8)


@pytest.fixture
def far_sums() -> Iterator[None]:
    """Ignore that the weights of rare beams are far from one; they are listed like others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WeightWarning)
        yield


def drawn(design: str = "stratified", k: int = 3, seed: int = 0, **options: Any) -> Beams:
    generator = torch.Generator().manual_seed(seed)
    sources = options.pop("sources", 2)
    return search(model(THETA, sources), k, design, max_length=SIZE, generator=generator, **options)


def forced(beams: Beams) -> Tensor:
    """Return the log-probabilities as a leaf, so that a gradient shows their coefficients."""
    return torch.where(beams.present, beams.log_prob, 0.0).requires_grad_()


# ------------------------------------------------------------------ entropy and divergence


def exact(name: str, theta: Tensor) -> Tensor:
    """Return H(p) or KL(p ‖ q), from the probabilities of all sequences."""
    beams = search(model(theta), 20, "top-k", max_length=SIZE)
    log_p = log_prob(model(theta), beams)[0][beams.present[0]]
    log_q = log_prob(model(OTHER.detach()), beams)[0][beams.present[0]]
    return (log_p.exp() * (-log_p if name == "entropy" else log_p - log_q)).sum()


@pytest.mark.parametrize("name", ["entropy", "divergence"])
@pytest.mark.parametrize("k", [1, 2, 4, 20])
def test_gradients_of_regularisers_are_unbiased(name: str, k: int, far_sums: None) -> None:
    """Over all paths of conditional Poisson beams; with all sequences, in a single beam."""
    theta = THETA.detach().clone().requires_grad_()
    if k == 20:
        beams = search(model(theta), k, "stratified", max_length=SIZE)
        probability = torch.ones(1, dtype=torch.float64)
    else:
        law = poisson(k)
        beams, probability = law.beams, law.probability
    sources = len(beams)
    other = model(OTHER.detach(), sources)
    scores = token_scores(model(theta, sources), beams, entropy=True, other=other)
    each = (entropy if name == "entropy" else divergence)(beams, scores)
    mean, truth = (probability * each).sum(), exact(name, theta)
    assert mean.item() == pytest.approx(truth.item(), abs=1e-10)
    (mine,), (theirs,) = (torch.autograd.grad(x, theta) for x in (mean, truth))
    assert float((mine - theirs).abs().max()) < 1e-10
    assert float(theirs.abs().max()) > 0.01


# ------------------------------------------------------------------ advantages and clipping


def test_advantages_of_equal_weights_are_those_of_grpo() -> None:
    beams = drawn("independent", 6, sources=5)
    rewards = torch.tensor([[f(y) for y in beams.tokens(b)] for b in range(5)])
    rewards = rewards.double()
    centred = rewards - rewards.mean(-1, keepdim=True)
    expected = centred / (rewards.std(-1, keepdim=True) + 1e-4)
    torch.testing.assert_close(group_advantages(beams, f), expected)
    torch.testing.assert_close(group_advantages(beams, f, scale=False), centred)
    torch.testing.assert_close(group_advantages(beams, rewards), expected)


def test_advantages_are_weighted_and_empty_places_have_none() -> None:
    beams = drawn("stratified", 20, sources=1)
    found = group_advantages(beams, f)[0]
    assert not bool(beams.present.all())
    assert float(found[~beams.present[0]].abs().max()) == 0
    p = beams.log_prob.exp()[0]
    assert float((p * found).sum()) == pytest.approx(0, abs=1e-9)
    assert float(group_advantages(drawn("stratified", 1), f).abs().max()) == 0


def test_the_policy_loss_starts_as_a_policy_gradient() -> None:
    """At the model of the draw: −Σ w A ∇log p, clipped or not."""
    beams = drawn("stratified", 3, sources=4)
    assert beams.log_weight is not None
    advantages = group_advantages(beams, f)
    for clip in (None, 0.2):
        log_p = forced(beams)
        loss = policy_loss(beams, advantages, log_p, clip=clip)
        (gradient,) = torch.autograd.grad(loss.sum(), log_p)
        torch.testing.assert_close(gradient, -beams.log_weight.exp() * advantages)
        torch.testing.assert_close(loss, -(beams.log_weight.exp() * advantages).sum(-1))


def test_clipping_is_that_of_ppo() -> None:
    beams = drawn("independent", 6, sources=1)
    advantage = torch.tensor([[1.0, 1.0, 1.0, -1.0, -1.0, -1.0]], dtype=torch.float64)
    ratio = torch.tensor([[0.5, 1.1, 1.5, 0.5, 0.9, 1.5]], dtype=torch.float64)
    log_p = (beams.log_prob + ratio.log()).requires_grad_()
    loss = policy_loss(beams, advantage, log_p, clip=0.2)
    smaller = torch.tensor([[0.5, 1.1, 1.2, -0.8, -0.9, -1.5]], dtype=torch.float64)
    assert loss.item() == pytest.approx(-float(smaller.mean()))
    (gradient,) = torch.autograd.grad(loss.sum(), log_p)
    moving = torch.tensor([[1, 1, 0, 0, 1, 1]], dtype=torch.bool)
    torch.testing.assert_close(gradient, -(ratio * advantage * moving) / 6)


# ------------------------------------------------------------------ the error of a gradient


@pytest.mark.parametrize(
    ("design", "baseline"),
    [("independent", "loo"), ("gumbel-top-k", "none"), ("conditional-poisson", "loo")],
)
def test_the_estimate_is_the_gradient_of_the_risk(design: str, baseline: str) -> None:
    theta = THETA.detach().clone().requires_grad_()
    beams = drawn(design, 4, joint=design == "conditional-poisson", sources=3)
    log_p = log_prob(model(theta, 3), beams)
    found = gradient_estimate(beams, f, log_p, [theta], baseline)
    (gradient,) = torch.autograd.grad(risk(beams, f, log_p, baseline).mean(), theta)
    torch.testing.assert_close(found.value, gradient.flatten())
    assert found.norm == pytest.approx(float(gradient.norm()))
    some = torch.tensor([0, 4])
    part = gradient_estimate(
        beams, f, log_prob(model(theta, 3), beams), [theta], baseline, coordinates=some
    )
    torch.testing.assert_close(part.value, gradient.flatten()[some])
    assert found.variance is not None
    assert found.norm_error is not None


def claims(several: Sequence[laws.Law], baseline: Any, shift: Tensor) -> tuple[float, Tensor]:
    """Return the mean of the variance that beams claim, over their law, and [B] the gradients.

    The gradient is with respect to one coordinate; ``shift`` [N] is by how much the model moved.
    """
    eta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    log_p = ALL.log_prob + shift + eta * SCORE[:, AT]
    total, values = 0.0, []
    for b, probability in enumerate(several[0].probability.tolist()):
        found = gradient_estimate(
            [law.beams[b] for law in several],
            [F[law.picks[b]][None] for law in several],
            [log_p[law.picks[b]][None] for law in several],
            [eta],
            baseline,
            moved=bool(shift.any()),
        )
        # Terms that agree do not tell their variance; here they stand for zero, as for their kind.
        total += probability * (0.0 if found.variance is None else found.variance.item())
        values.append(found.value)
    return total, torch.cat(values)


AT = int(SCORE.abs().sum(0).argmax())
SHIFT = 0.3 * torch.tensor([1.0, -1, 0, 1, 0, -1, 1], dtype=torch.float64)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("design", ["independent", "conditional-poisson"])
def test_the_variance_is_right_on_average(design: str, moved: bool, far_sums: None) -> None:
    """Exactly, with a fixed baseline."""
    law = laws.independent(ALL, 3) if design == "independent" else poisson(3)
    claimed, found = claims([law], 1.7, SHIFT * moved)
    assert claimed == pytest.approx(float(law.variance(found[:, None])), rel=1e-8)


def test_beams_that_are_baselines_of_each_other_claim_a_little_too_little() -> None:
    """By the square of Cov(Σ w f, Σ w ∇log p), their covariance."""
    law = laws.stratified(ALL, 2, laws.rankings(ALL, 2))
    both = laws.pairs(law)
    claimed, found = claims(both, "cross", torch.zeros(7))
    assert law.beams.log_weight is not None
    weight = law.beams.log_weight.exp()
    value, score = ((weight * x[law.picks]).sum(-1) for x in (F, SCORE[:, AT]))
    covariance = float((law.probability * value * score).sum())
    truth = float(both[0].variance(found[:, None]))
    assert claimed == pytest.approx(truth - covariance**2, rel=1e-9)
    assert 0.5 * truth < claimed < truth


def test_all_sequences_leave_no_error() -> None:
    theta = THETA.detach().clone().requires_grad_()
    beams = drawn("stratified", 20, sources=1)
    found = gradient_estimate(beams, f, log_prob(model(theta), beams), [theta], "none")
    assert found.standard_error is not None
    assert float(found.standard_error.max()) == 0
    assert found.norm_error == 0


def test_what_is_not_known_of_the_error_is_said() -> None:
    """Nothing for a design whose beams do not tell; and nothing where no sequence has a part."""
    theta = THETA.detach().clone().requires_grad_()
    alone = drawn("arithmetic", 3)
    log_p = log_prob(model(theta, 2), alone)
    none = gradient_estimate(alone, f, log_p, [theta], "none")
    assert none.variance is None
    assert none.standard_error is None
    assert none.norm_error is None
    beams = drawn("independent", 3, sources=1)
    found = gradient_estimate(beams, f, log_prob(model(theta), beams), [theta], "none")
    assert found.standard_error is not None
    never = found.value == 0
    assert bool(never.any())
    assert bool(found.standard_error[never].isnan().all())
    several = drawn("independent", 3, sources=40)
    found = gradient_estimate(several, f, log_prob(model(theta, 40), several), [theta], "none")
    assert found.standard_error is not None
    assert bool(found.standard_error[found.value != 0].isfinite().all())


# ------------------------------------------------------------------ which baseline is chosen


def test_the_best_unbiased_baseline_is_chosen() -> None:
    for design, k in (("independent", 2), ("gumbel-top-k", 4), ("conditional-poisson", 3)):
        beams = drawn(design, k, joint=True)
        pairs = [forced(beams), forced(beams)]
        both = [risk(beams, f, x, b) for x, b in zip(pairs, ("auto", "loo"), strict=True)]
        one, other = (torch.autograd.grad(r.sum(), x)[0] for r, x in zip(both, pairs, strict=True))
        assert torch.equal(one, other)
    several = [drawn("stratified", 2, seed) for seed in range(3)]
    found = [[forced(b) for b in several] for _ in range(2)]
    risks = [risk(several, f, x, b) for x, b in zip(found, ("auto", "cross"), strict=True)]
    torch.testing.assert_close(
        *(torch.autograd.grad(r.sum(), x) for r, x in zip(risks, found, strict=True))
    )


@pytest.mark.parametrize(
    ("design", "k", "reason"),
    [
        ("stratified", 3, "a single beam of stratified has no unbiased baseline of its own"),
        ("independent", 1, "a beam with k = 1 has nothing to leave out"),
        ("conditional-poisson", 3, "search with joint=True"),
        ("gumbel-top-k", 3, "the variance larger; it needs k of at least 4"),
    ],
)
def test_where_there_is_none_a_warning_says_why(design: str, k: int, reason: str) -> None:
    beams = drawn(design, k)
    with pytest.warns(BaselineWarning, match=reason) as caught:
        risk(beams, f, forced(beams))
    assert caught[0].filename == __file__
    if design != "gumbel-top-k":
        with pytest.raises(ValueError, match=f"baseline is 'loo', but .*{reason}"):
            risk(beams, f, forced(beams), "loo")


def test_a_pair_of_conditional_poisson_sampling_is_not_its_own_baseline() -> None:
    beams = drawn("conditional-poisson", 2, joint=True)
    with pytest.warns(BaselineWarning, match="it needs k of at least 3"):
        risk(beams, f, forced(beams))
    risk(beams, f, forced(beams), "loo")


def test_rounds_have_no_baseline_of_their_own() -> None:
    beams = replace(drawn("independent", 3), latest=torch.tensor([3, 3]))
    with pytest.raises(ValueError, match="beams of several rounds have no unbiased baseline"):
        risk(beams, f, forced(beams), "loo")


# ------------------------------------------------------------------ bad input


def test_bad_beams_and_functions_are_refused() -> None:
    beams = drawn()
    log_p = forced(beams)
    ranked = drawn("top-k")
    for baseline in ("auto", "none", "own", "loo", 1.0):
        with pytest.raises(ValueError, match="'top-k' has no inclusion probabilities"):
            risk(ranked, f, forced(ranked), baseline)
    with pytest.raises(ValueError, match="nan on the sequence"):
        risk(beams, lambda y: math.nan, log_p, "none")
    values = torch.ones(2, 3)
    values[1, 2] = math.inf
    with pytest.raises(ValueError, match="f is inf for sequence 2 of source 1; it must be finite"):
        risk(beams, values, log_p, "none")
    with pytest.raises(ValueError, match=r"shape \[2, 4\]; it must be \[B, K\] = \[2, 3\]"):
        risk(beams, torch.ones(2, 4), log_p, "none")
    with pytest.raises(ValueError, match="f is 2 tensors for 1 beams"):
        risk(beams, [torch.ones(2, 3)] * 2, log_p, "none")
    with pytest.raises(ValueError, match="f returned vectors; a risk needs a number"):
        risk(beams, lambda y: [1.0, 2.0], log_p, "none")
    with pytest.raises(ValueError, match="f is the text 'bleu'"):
        risk(beams, "bleu", log_p, "none")
    with pytest.raises(ValueError, match="same seed"):
        risk([beams, beams], f, [log_p, log_p])
    with pytest.raises(ValueError, match="same seed"):
        gradient_estimate([beams, beams], f, [log_p, log_p], [THETA])


def test_bad_log_probs_are_refused() -> None:
    beams = drawn()
    log_p = forced(beams)
    with pytest.raises(ValueError, match="log_prob has no gradient"):
        risk(beams, f, beams.log_prob, "none")
    with torch.no_grad():  # an estimate only
        torch.testing.assert_close(
            risk(beams, f, beams.log_prob, "none"), cpsbs.estimate(beams, f).value
        )
    with pytest.raises(ValueError, match=r"shape \[2, 2\]; it must be \[B, K\] = \[2, 3\]"):
        risk(beams, f, log_p[:, :2], "none")
    with pytest.raises(ValueError, match="log_prob is 2 tensors for 1 beams"):
        risk(beams, f, [log_p, log_p], "none")
    with pytest.raises(ValueError, match="log_prob is a NoneType; it must be what"):
        risk(beams, f, None, "none")  # type: ignore[arg-type]
    other = log_prob(model(OTHER, 2), beams)
    with pytest.raises(ValueError, match=r"where the search found .* it is of another model"):
        risk(beams, f, other, "none")
    with pytest.raises(ValueError, match="it is of another model"):
        gradient_estimate(beams, f, other, [OTHER], "none")
    risk(beams, f, other, "none", moved=True)
    risk(beams, f, other, "none", tolerance=100)
    with pytest.raises(ValueError, match="log_prob is nan for sequence 0 of source 0"):
        risk(beams, f, log_p + math.nan, "none", moved=True)


def test_log_probs_computed_with_dropout_are_refused() -> None:
    network = tiny.make("gpt2")
    own = TransformersModel(network, **tiny.prompts(network))
    beams = search(own, 4, max_length=6, generator=0)
    right = log_prob(own, beams)
    noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="was computed with dropout"):
        risk(beams, len, right + noise, "none")
    assert bool(risk(beams, len, right, 2.0).isfinite().all())


def test_bad_baselines_are_refused() -> None:
    beams = drawn()
    log_p = forced(beams)
    with pytest.raises(ValueError, match="baseline is 'mean'; it must be one of auto, none, loo"):
        risk(beams, f, log_p, "mean")
    with pytest.raises(ValueError, match="baseline is 'cross', but there is one Beams"):
        risk(beams, f, log_p, "cross")
    with pytest.raises(ValueError, match=r"baseline has the shape \[3\]; it must be a number"):
        risk(beams, f, log_p, torch.ones(3))
    with pytest.raises(ValueError, match=r"baseline has the shape \[2, 3\]"):
        risk(beams, f, log_p, torch.ones(2, 3))
    with pytest.raises(ValueError, match="baseline is nan; it must be finite"):
        risk(beams, f, log_p, math.nan)
    for baseline in ("own", 1.0, torch.ones(2)):
        with pytest.raises(ValueError, match="normalize=True brings its own"):
            risk(beams, f, log_p, baseline, normalize=True)


def test_bad_scores_and_clips_are_refused() -> None:
    beams = drawn()
    scores = token_scores(model(THETA, 2), beams)
    with pytest.raises(ValueError, match=r"no entropies; compute it by token_scores\(…, entropy"):
        entropy(beams, scores)
    with pytest.raises(ValueError, match=r"no divergences; compute it by token_scores\(…, other"):
        divergence(beams, scores)
    with pytest.raises(ValueError, match=r"\[2, 3, 2\], but the beams have \[1, 3, 2\]"):
        entropy(beams[0], token_scores(model(THETA, 2), beams, entropy=True))
    for clip in (0.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="it must be above 0, or None"):
            policy_loss(beams, torch.ones(2, 3), forced(beams), clip=clip)
    with pytest.raises(ValueError, match="advantages is nan for sequence 0 of source 0"):
        policy_loss(beams, torch.full((2, 3), math.nan), forced(beams))
    with pytest.raises(ValueError, match=r"advantages is a tensor of the shape \[2\]"):
        policy_loss(beams, torch.ones(2), forced(beams))
