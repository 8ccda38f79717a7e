"""Estimates: unbiased by enumeration of all paths, and what ``estimate`` makes of beams.

Statistical tests have fixed seeds and a false-alarm rate of 1e-4 each (3.9 standard deviations).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats

from cpsbs import DESIGNS, Beams, FunctionModel, TableModel, estimate, search, split_seed
from cpsbs.designs import Calibrated, ConditionalPoissonDesign, Design
from cpsbs.estimation.functions import Bleu, Entropy, KullbackLeibler, Length, Probability
from cpsbs.estimation.uncertainty import student_quantile
from tests.exact import Path, Prefix, StepRule, calibrated_rule, paths, poisson_rule

SIGMAS = 3.9
LENGTH = 3
MODEL = TableModel.random(vocab_size=3, length=LENGTH, eos=0, seed=1)
ALL = MODEL.sequences(LENGTH)

RULES: dict[str, tuple[Design, StepRule]] = {
    "odds": (ConditionalPoissonDesign(), poisson_rule(lambda p: p / (1 - p))),
    "probability": (ConditionalPoissonDesign("probability"), poisson_rule(lambda p: p)),
    "calibrated": (Calibrated(), calibrated_rule),
}
UNBIASED = [name for name in DESIGNS if name not in ("top-k", "diverse")]


def f(y: Sequence[int]) -> float:
    """Something that depends on all tokens."""
    return 1.0 + sum((i + 1) * token**2 for i, token in enumerate(y)) / 7


TRUTH = sum(p * f(y) for y, p in ALL.items())


def copies(model: TableModel, sources: int) -> TableModel:
    return TableModel(model.tables * sources, model.eos[0])


def many(design: str | Design, k: int, draws: int, seed: int = 0, **kwargs: Any) -> Beams:
    """Independent searches, a source each."""
    generator = torch.Generator().manual_seed(seed)
    model = copies(MODEL, draws)
    return search(model, k, design, max_length=LENGTH, generator=generator, **kwargs)


def horvitz_thompson(path: Path) -> float:
    return sum(ALL[y] * f(y) / pi for y, pi in path.inclusion.items())


# ------------------------------------------------------------------ by enumeration of all paths


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_own_path_estimator_is_unbiased(name: str, k: int) -> None:
    everything = list(paths(MODEL, k, LENGTH, RULES[name][1]))
    assert math.fsum(path.probability for path in everything) == pytest.approx(1, abs=1e-12)
    mean = math.fsum(path.probability * horvitz_thompson(path) for path in everything)
    assert mean == pytest.approx(TRUTH, rel=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_the_variance_estimator_is_unbiased(name: str) -> None:
    """Where every two sequences can come together; a calibrated step with one light place left
    never takes two light candidates, and then the estimate is too large (f is positive).
    """
    mean = square = estimated = 0.0
    for path in paths(MODEL, 2, LENGTH, RULES[name][1]):
        g = horvitz_thompson(path)
        pairs = sum(ALL[y] * ALL[z] * f(y) * f(z) / q for (y, z), q in path.joint.items())
        mean += path.probability * g
        square += path.probability * g * g
        estimated += path.probability * (g * g - pairs)
    if name == "calibrated":
        assert estimated > square - mean**2
    else:
        assert estimated == pytest.approx(square - mean**2, rel=1e-10)


@pytest.mark.parametrize("name", RULES)
def test_the_search_reports_the_inclusion_of_its_path(name: str) -> None:
    """Every final beam with its products, single and joint, is one of the enumerated paths."""
    design, rule = RULES[name]

    def key(inclusion: dict[Prefix, float], joint: dict[Any, float]) -> Any:
        singles = tuple(sorted((y, f"{pi:.6g}") for y, pi in inclusion.items()))
        return singles, tuple(sorted((pair, f"{pi:.6g}") for pair, pi in joint.items()))

    known = {key(path.inclusion, path.joint) for path in paths(MODEL, 2, LENGTH, rule)}
    beams = many(design, 2, 300, joint=True)
    assert beams.log_inclusion is not None
    assert beams.joint_log_inclusion is not None
    for b in range(len(beams)):
        y: list[Prefix] = [tuple(t) for t in beams.tokens(b)]
        pi = beams.log_inclusion[b].exp().tolist()
        pairs = beams.joint_log_inclusion[b].exp().tolist()
        joint = {(y[i], y[j]): pairs[i][j] for i in range(2) for j in range(2)}
        assert key(dict(zip(y, pi, strict=True)), joint) in known


@pytest.mark.parametrize("k", [2, 3, 5, 8])
def test_stratified_keeps_a_sequence_with_the_probability_that_it_aims_at(k: int) -> None:
    """π(y) = min(1, c p(y)) with Σ_y π(y) = K, whatever the path; how often agrees with it."""
    draws = 20_000
    beams = many("stratified", k, draws)
    assert beams.log_inclusion is not None
    pi: dict[Prefix, float] = {}
    hits: dict[Prefix, int] = {}
    for b in range(draws):
        for y, log_pi in zip(beams.tokens(b), beams.log_inclusion[b].tolist(), strict=True):
            value = math.exp(log_pi)
            assert pi.setdefault(tuple(y), value) == pytest.approx(value, rel=1e-9)
            hits[tuple(y)] = hits.get(tuple(y), 0) + 1
    light = [pi[y] / ALL[y] for y in pi if pi[y] < 1 - 1e-9]
    assert max(light) == pytest.approx(min(light), rel=1e-9)
    c = light[0]
    assert sum(min(1.0, c * p) for p in ALL.values()) == pytest.approx(k, rel=1e-9)
    for sequence, q in pi.items():
        sigma = math.sqrt(draws * q * (1 - q))
        assert abs(hits[sequence] - draws * q) <= SIGMAS * sigma + 1e-6


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_weights_of_stratified_beams_sum_to_one(k: int) -> None:
    beams = many("stratified", k, 200)
    assert beams.log_weight is not None
    assert float((beams.log_weight.exp().sum(-1) - 1).abs().max()) < 1e-9


def test_the_sample_of_sum_and_sample_is_drawn_from_the_rest() -> None:
    draws, k = 15_000, 4
    beams = many("sum-and-sample", k, draws)
    best = search(MODEL, k - 1, "top-k", max_length=LENGTH).tokens(0)
    rest = {y: p for y, p in ALL.items() if list(y) not in best}
    assert beams.log_weight is not None
    observed = dict.fromkeys(rest, 0)
    for b in range(draws):
        extra = [y for y in beams.tokens(b) if y not in best]
        assert len(extra) == 1
        observed[tuple(extra[0])] += 1
    total = sum(rest.values())
    assert float((beams.log_weight.exp().sum(-1) - 1).abs().max()) < 1e-12
    expected = [draws * p / total for p in rest.values()]
    assert stats.chisquare(list(observed.values()), expected).pvalue > 1e-4


def test_both_entropies_have_the_same_expectation() -> None:
    """E[Σ_t H(p(· | y_<t))] = E[−log p(y)], over all sequences."""
    plain = -math.fsum(p * math.log(p) for p in ALL.values())
    steps = 0.0
    for y, p in ALL.items():
        for t in range(len(y)):
            row = MODEL.tables[0][y[:t]]
            steps -= p * math.fsum(q * math.log(q) for q in row)
    assert steps == pytest.approx(plain, rel=1e-12)


# ------------------------------------------------------------------ by simulation


@pytest.mark.parametrize("design", UNBIASED)
@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.filterwarnings("ignore::cpsbs.estimation.WeightWarning")
def test_estimates_are_unbiased(design: str, k: int) -> None:
    """Every design, by ``estimate`` itself; for SBS and sum-and-sample there is no enumeration."""
    value = estimate(many(design, k, 3000), f).value
    error = float(value.std()) / math.sqrt(len(value))
    assert abs(float(value.mean()) - TRUTH) < SIGMAS * error + 1e-9


@pytest.mark.parametrize("design", ["conditional-poisson", "gumbel-top-k"])
@pytest.mark.parametrize("k", [2, 6])
def test_the_variance_from_one_beam_is_the_variance(design: str, k: int) -> None:
    result = estimate(many(design, k, 4000, joint=True), f)
    assert result.variance is not None
    error = float(result.variance.std()) / math.sqrt(4000)
    # The sample variance of the values has an error of its own.
    centred = (result.value - result.value.mean()).square()
    error = math.hypot(error, float(centred.std()) / math.sqrt(4000))
    assert abs(float(result.variance.mean()) - float(result.value.var())) < SIGMAS * error


COVERED = [
    ("independent", 10, False),
    ("gumbel-top-k", 8, True),
    ("stratified", 10, False),
    ("calibrated", 8, True),
]
"""Cases whose 95% intervals cover 90 to 98%; where they do not, the documentation says so."""


@pytest.mark.parametrize(("design", "k", "normalize"), COVERED)
def test_intervals_cover(design: str, k: int, normalize: bool) -> None:
    model = TableModel.random(vocab_size=6, length=4, eos=0, seed=4)
    truth = sum(p * f(y) for y, p in model.sequences(4).items())
    generator = torch.Generator().manual_seed(1)
    draws = 600
    beams = search(copies(model, draws), k, design, max_length=4, generator=generator, joint=True)
    low, high = estimate(beams, f, normalize=normalize).interval(0.95)
    covered = float(((low <= truth) & (truth <= high)).double().mean())
    slack = 3 * math.sqrt(0.05 * 0.95 / draws)
    assert 0.90 - slack < covered < 0.98 + slack


def test_repeated_beams_tell_the_error_of_any_design() -> None:
    for design in ("arithmetic", "sum-and-sample", "stratified", "conditional-poisson"):
        result = estimate([many(design, 3, 60, seed=r) for r in range(12)], f)
        low, high = result.interval()
        covered = int(((low <= TRUTH) & (high >= TRUTH)).sum())
        assert result.repeats == 12
        assert covered >= 48, design  # a chance of 1e-4 or so at 95%; less is heavy tails


def test_rao_blackwell_has_less_variance() -> None:
    for design in ("independent", "stratified", "arithmetic"):
        beams = many(design, 3, 2000, entropy=True)
        plain = estimate(beams, Entropy()).value
        better = estimate(beams, Entropy(rao_blackwell=True)).value
        truth = -sum(p * math.log(p) for p in ALL.values())
        assert float(better.mean()) == pytest.approx(truth, abs=4 * float(better.std()) / 44)
        assert float(better.var()) < float(plain.var())


@pytest.mark.parametrize("temperature", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("k", [2, 5, 10])
def test_the_table_in_small(temperature: float, k: int) -> None:
    """Bias and RMSE of every estimator, as on the translation model, where the truth is known.

    Designs without heavy tails are within 4.5 standard errors of the truth. ``stratified`` leads in
    most cells, is nowhere more than 25% behind the best of these, and never behind independent
    samples by more than 10%. (The other designs miss rare
    events of great weight at low temperature in as many draws as this.)
    """
    model, draws = TableModel.random(vocab_size=5, length=4, eos=0, seed=2), 1500
    exact = search(model, 1000, "top-k", max_length=4, temperature=temperature)
    log_p = exact.log_prob[exact.present]
    truth = float(-(log_p.exp() * log_p).sum())
    rmse = {}
    for design in UNBIASED:
        generator = torch.Generator().manual_seed(k)
        beams = search(
            copies(model, draws),
            k,
            design,
            max_length=4,
            temperature=temperature,
            generator=generator,
        )
        value = estimate(beams, Entropy()).value
        rmse[design] = float((value - truth).square().mean().sqrt())
        if design in ("stratified", "independent", "arithmetic", "sum-and-sample"):
            error = float(value.std()) / math.sqrt(draws)
            assert abs(float(value.mean()) - truth) < 4.5 * error + 1e-9, design
    best = min(rmse[design] for design in ("independent", "arithmetic", "sum-and-sample"))
    assert rmse["stratified"] <= 1.25 * best, rmse
    assert rmse["stratified"] <= 1.1 * rmse["independent"], rmse


def test_equal_spacing_does_not_keep_step_with_f() -> None:
    """Candidates of nearly equal weight, f alternating along them, in rank and in token order."""
    weights = [0.0] + [1 - 0.001 * i for i in range(20)]
    table: dict[Prefix, list[float]] = {(): [w / sum(weights) for w in weights]}
    generator = torch.Generator().manual_seed(0)
    beams = search(
        TableModel([table] * 2000, 0), 10, "stratified", max_length=1, generator=generator
    )
    result = estimate(beams, lambda y: float(y[0] % 2))
    assert result.variance is not None
    assert float(result.value.var()) < 0.025  # of ten independent samples
    assert float(result.variance.nanmean()) > float(result.value.var())


def test_samples_that_agree_do_not_tell_their_error() -> None:
    """Not zero: unknown, and the line says so."""
    beams = many("independent", 2, 300, temperature=0.1)
    result = estimate(beams, f)
    assert result.standard_error is not None
    same = torch.tensor([len(set(map(tuple, beams.tokens(b)))) == 1 for b in range(300)])
    assert bool(same.any())
    assert bool(result.standard_error[same].isnan().all())
    assert "error not known" in str(estimate(beams[int(same.nonzero()[0, 0])], f))
    assert "search with joint=True" in str(estimate(many("conditional-poisson", 3, 1), f))


@pytest.mark.filterwarnings("ignore::cpsbs.estimation.WeightWarning")
def test_a_normalised_error_bar_is_given_only_where_it_is_known() -> None:
    """Long sequences whose pairs say nothing: none, rather than one of next to nothing."""
    logits = 2 * torch.randn(50, generator=torch.Generator().manual_seed(0)).double()
    logits[0] = -99.0
    model = FunctionModel(lambda x: logits.expand(len(x), -1), 50, eos=0, sources=20)
    generator = torch.Generator().manual_seed(1)
    beams = search(model, 10, "conditional-poisson", max_length=40, generator=generator, joint=True)
    result = estimate(beams, lambda y: sum(t % 7 for t in y) / len(y), normalize=True)
    assert result.standard_error is not None
    known = result.standard_error.isfinite()
    assert float(known.double().mean()) < 0.2


def test_one_place_of_sbs_does_not_tell_its_error() -> None:
    for normalize in (False, True):
        assert estimate(many("gumbel-top-k", 1, 2), f, normalize=normalize).variance is None


@pytest.mark.filterwarnings("ignore::cpsbs.estimation.WeightWarning")
def test_weights_too_small_for_a_float_are_normalised_all_the_same() -> None:
    beams = many("conditional-poisson", 3, 4, joint=True)
    assert beams.log_weight is not None
    assert beams.joint_log_inclusion is not None
    tiny = replace(
        beams,
        log_weight=beams.log_weight - 800,
        log_prob=beams.log_prob - 800,
    )
    expected, got = estimate(beams, f, normalize=True), estimate(tiny, f, normalize=True)
    torch.testing.assert_close(got.value, expected.value)
    torch.testing.assert_close(got.variance, expected.variance)
    torch.testing.assert_close(got.effective_size, expected.effective_size)


def test_normalised_estimates_divide_by_the_sum_of_the_weights() -> None:
    beams = many("conditional-poisson", 3, 50, joint=True)
    assert beams.log_weight is not None
    plain, normal = estimate(beams, f), estimate(beams, f, normalize=True)
    torch.testing.assert_close(normal.value, plain.value / beams.log_weight.exp().sum(-1))
    one = estimate(beams, lambda y: 1.0, normalize=True)
    torch.testing.assert_close(one.value, torch.ones_like(one.value))
    # It would be 1 whatever the beams are, but beams cannot tell that f is constant elsewhere.
    assert one.standard_error is not None
    assert bool(one.standard_error.isnan().all())


# ------------------------------------------------------------------ what an estimate is made of


def test_f_is_called_once_for_each_different_sequence() -> None:
    seen: list[tuple[int, ...]] = []

    def counted(y: list[int]) -> float:
        seen.append(tuple(y))
        return f(y)

    beams = many("independent", 50, 1)
    result = estimate([beams, many("independent", 50, 1, seed=1)], counted)
    assert len(seen) == len(set(seen)) == int(result.distinct[0])


def test_vectors_texts_and_batches() -> None:
    beams = many("stratified", 4, 3)
    scalar = estimate(beams, f)
    pair = estimate(beams, lambda y: [f(y), len(y)])
    assert pair.value.shape == (3, 2)
    torch.testing.assert_close(pair.value[:, 0], scalar.value)
    torch.testing.assert_close(pair.value[:, 1], estimate(beams, Length()).value)

    def batched(ys: list[list[int]]) -> list[float]:
        return [f(y) for y in ys]

    batched.batched = True  # type: ignore[attr-defined]
    torch.testing.assert_close(estimate(beams, batched).value, scalar.value)
    texts = estimate(
        beams,
        lambda text: f([int(c) for c in text]),
        decode=lambda ys: ["".join(map(str, y)) for y in ys],
    )
    torch.testing.assert_close(texts.value, scalar.value)


def test_a_function_for_each_source_and_a_decoder_for_all() -> None:
    beams = many("stratified", 4, 2)
    both = estimate(beams, [f, len], name="mine")
    torch.testing.assert_close(both.value[0], estimate(beams, f).value[0])
    torch.testing.assert_close(both.value[1], estimate(beams, len).value[1])
    assert str(both).startswith("E[mine][0]")
    assert repr(both) == str(both)

    def words(ys: Sequence[Sequence[int]]) -> list[str]:
        return ["".join("abc"[t] for t in y) for y in ys]

    one = estimate(beams, Probability(lambda text: "b" in text), decode=words)
    other = estimate(beams, Probability(lambda text: "b" in text, decode=words))
    assert torch.equal(one.value, other.value)
    assert 0 < float(one.value[0]) < 1
    assert repr(beams) == "Beams(stratified, sources=2, k=4, length=3)"


def test_ready_made_functions() -> None:
    everything = search(MODEL, 100, "conditional-poisson", max_length=LENGTH, entropy=True)
    assert float(estimate(everything, Entropy()).captured[0]) == pytest.approx(1)

    def exact(g: Callable[[Prefix, float], float]) -> float:
        return sum(p * g(y, p) for y, p in ALL.items())

    def value(g: Any) -> float:
        return float(estimate(everything, g).value[0])

    entropy = exact(lambda y, p: -math.log(p))
    assert value(Entropy()) == pytest.approx(entropy)
    assert value(Entropy(rao_blackwell=True)) == pytest.approx(entropy)
    assert value(Length()) == pytest.approx(exact(lambda y, p: len(y)))
    assert value(Probability(lambda y: 2 in y)) == pytest.approx(exact(lambda y, p: float(2 in y)))

    def text(ys: Sequence[Sequence[int]]) -> list[str]:
        return [" ".join(["the", "cat", "sat"][t] for t in y) for y in ys]

    spoken = Probability(lambda t: "cat" in t, name="cat", decode=text)
    assert value(spoken) == pytest.approx(exact(lambda y, p: float(1 in y)))
    pytest.importorskip("sacrebleu")
    from cpsbs import sentence_bleu

    reference = "the cat sat"
    expected = exact(lambda y, p: sentence_bleu(text([y])[0], reference))
    assert value(Bleu([reference], text)) == pytest.approx(expected)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_kl_to_another_model(temperature: float) -> None:
    other = TableModel.random(vocab_size=3, length=LENGTH, eos=0, seed=8)
    q = other.sequences(LENGTH)
    beams = search(MODEL, 100, "stratified", max_length=LENGTH, temperature=temperature)
    p = {tuple(y): math.exp(x) for y, x in zip(beams.tokens(0), beams.log_prob[0], strict=False)}
    exact = sum(p[y] * (math.log(p[y]) - math.log(q[y])) for y in p)
    plain = KullbackLeibler(lambda: other)
    steps = KullbackLeibler(lambda: other, own=lambda: MODEL)
    for form in (plain, steps):
        assert float(estimate(beams, form).value[0]) == pytest.approx(exact, rel=1e-10)


def test_an_estimate_says_how_it_was_made() -> None:
    beams = many("conditional-poisson", 3, 2, joint=True, temperature=0.5)
    result = estimate(beams, Entropy())
    lines = str(result).splitlines()
    assert len(lines) == 2
    for part in (
        "E[entropy][0] = ",
        " ± ",
        "conditional-poisson",
        "K=3",
        "temperature 0.5",
        "max_length 3",
        "seed ",
        "3 distinct",
        "ESS ",
        "Σp ",
        "TableModel",
    ):
        assert part in lines[0]
    seed = beams.settings["seed"]
    again = search(
        copies(MODEL, 2),
        3,
        "conditional-poisson",
        max_length=3,
        temperature=0.5,
        generator=split_seed(seed, 2),
        joint=True,
    )
    assert torch.equal(again.sequences, beams.sequences)
    assert torch.equal(estimate(again, Entropy()).value, result.value)


def test_quantiles_of_student() -> None:
    freedom = torch.tensor([1, 1.6, 2, 2.25, 3, 9, 30.5, 400, 999, math.inf])
    for p in (0.025, 0.3, 0.9, 0.975):
        expected = stats.t.ppf(p, freedom.double().numpy())
        assert student_quantile(p, freedom).tolist() == pytest.approx(expected, rel=1e-4)


# ------------------------------------------------------------------ bad input


def test_what_cannot_be_estimated_is_refused() -> None:
    beams = many("conditional-poisson", 3, 1)
    first = str(beams.tokens(0)[0]).replace("[", r"\[").replace("]", r"\]")

    def broken(y: list[int]) -> float:
        raise KeyError("no such word")

    with pytest.raises(ValueError, match=f"sequence {first} of source 0: KeyError"):
        estimate(beams, broken)
    with pytest.raises(ValueError, match=rf"nan on the sequence {first} of source 0"):
        estimate(beams, lambda y: math.nan)
    with pytest.raises(ValueError, match="different lengths"):
        estimate(beams, lambda y: [1.0] * sum(y))
    with pytest.raises(ValueError, match="a number or a vector"):
        estimate(beams, lambda y: [[1.0]])
    with pytest.raises(ValueError, match="'top-k' has no inclusion probabilities"):
        estimate(many("top-k", 3, 1), f)
    with pytest.raises(ValueError, match="entropy=True"):
        estimate(beams, Entropy(rao_blackwell=True))
    with pytest.raises(ValueError, match="does not tell its error; search with joint=True"):
        estimate(beams, f).interval()
    with pytest.raises(ValueError, match="independent beams"):
        estimate(many("arithmetic", 3, 1), f).interval()
    with pytest.raises(ValueError, match="cannot be mixed"):
        estimate([beams, many("independent", 3, 1)], f)
    with pytest.raises(ValueError, match=r"settings of temperature .* \[1.0, 0.5\]"):
        estimate([beams, many("conditional-poisson", 3, 1, seed=1, temperature=0.5)], f)
    with pytest.raises(ValueError, match="same seed"):
        estimate([beams, beams], f)
    with pytest.raises(ValueError, match="it returned 'good'"):
        estimate(beams, lambda y: "good")
    with pytest.raises(ValueError, match="for texts, pass decode"):
        estimate(beams, lambda y: y.split())
    with pytest.raises(ValueError, match="cannot be weighted"):
        estimate(beams, f, log_inclusion=torch.full((1, 3), 0.5))
    frozen = many(ConditionalPoissonDesign(anneal=0), 3, 1)
    with pytest.raises(ValueError, match="no inclusion probabilities"):
        estimate(frozen, f)
    with pytest.raises(ValueError, match=r"class Entropy; pass an object of it"):
        estimate(beams, Entropy)
    with pytest.raises(ValueError, match=r"f is the text 'bleu'; .* Bleu\(references\)$"):
        estimate(beams, "bleu")
    with pytest.raises(ValueError, match=r"such as Length\(\)$"):
        estimate(beams, ["lenght"])
    with pytest.raises(ValueError, match=r"f is the text 'chrf'; .* Bleu\(.*, Entropy\(\)"):
        estimate(beams, "chrf")
    with pytest.raises(ValueError, match="f is 3; it must be a function of a sequence"):
        estimate(beams, 3)
    with pytest.raises(ValueError, match="list of 2 functions for 1 sources"):
        estimate(beams, [f, f])
    with pytest.raises(ValueError, match="texts need decode"):
        estimate(beams, Bleu(["a"]))
    with pytest.raises(ValueError, match="one text for each source"):
        Bleu([["a", "b"]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="other is a model; it must be a function"):
        KullbackLeibler(MODEL)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be Beams"):
        estimate(f, beams)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one object"):
        estimate(beams, KullbackLeibler(lambda: MODEL, own=lambda: MODEL))
    with pytest.raises(ValueError, match="not empty"):
        estimate([], f)
    with pytest.raises(ValueError, match=r"must be \[B, K\] = \[1, 3\]"):
        estimate(beams, f, log_inclusion=torch.zeros(1, 2))
    with pytest.raises(ValueError, match="cannot be weighted"):
        estimate(beams, f, log_inclusion=torch.full((1, 3), math.nan))
    with pytest.raises(ValueError, match="references"):
        estimate(beams, Bleu(["a", "b"], lambda ys: ["a"] * len(ys)))
    with pytest.raises(ValueError, match="level is 2"):
        estimate(beams, f).interval(2)
