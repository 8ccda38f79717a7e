"""Minimum Bayes risk decisions: equal to estimates, exact where all is known, and errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import cpsbs
from cpsbs import Beams, TableModel, estimate, mbr, search
from cpsbs.decisions.expected import WeightedTexts
from cpsbs.decisions.mbr import _pooled
from cpsbs.decisions.plan import Part, Plan
from cpsbs.utilities import Function

LENGTH = 3
MODEL = TableModel.random(vocab_size=4, length=LENGTH, eos=0, seed=4)
ALL = MODEL.sequences(LENGTH)


def decode(sequences: Sequence[Sequence[int]]) -> list[str]:
    return ["".join(map(str, y)) for y in sequences]


def overlap(candidate: str, text: str) -> float:
    """A utility between 0 and 1: the share of equal places."""
    return sum(a == b for a, b in zip(candidate, text, strict=False)) / LENGTH


UTILITY = Function(overlap, bounds=(0.0, 1.0))
CANDIDATES = ["123", "110", "0", "230", "333"]
TRUTH = {c: sum(p * overlap(c, "".join(map(str, y))) for y, p in ALL.items()) for c in CANDIDATES}


def draws(design: str, k: int, count: int, seed: int = 3, **options: Any) -> Beams:
    copies = TableModel(MODEL.tables * count, 0)
    return search(copies, k, design, max_length=LENGTH, generator=seed, **options)


def test_evidence_of_all_sequences_gives_the_exact_decision() -> None:
    (found,) = mbr([CANDIDATES], draws("stratified", 200, 1), UTILITY, decode=decode)
    assert {c.text: c.utility for c in found.candidates} == pytest.approx(TRUTH)
    assert found.text == max(TRUTH, key=lambda c: TRUTH[c])
    assert found.certain
    assert all(c.standard_error == 0 and c.behind_error == 0 for c in found.candidates)
    assert found.captured == pytest.approx(1)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    "design", ["stratified", "gumbel-top-k", "conditional-poisson", "independent", "arithmetic"]
)
def test_figures_are_those_of_estimate(design: str, normalize: bool) -> None:
    beams = draws(design, 4, 30, joint=design == "conditional-poisson")
    found = mbr([CANDIDATES] * 30, beams, UTILITY, decode=decode, normalize=normalize)
    for b, decision in enumerate(found):
        for c in decision.candidates:

            def utility(y: list[int], c: str = c.text) -> float:
                return overlap(c, decode([y])[0])

            def lead(y: list[int], c: str = c.text, best: str = decision.text) -> float:
                return overlap(best, decode([y])[0]) - overlap(c, decode([y])[0])

            for f, value, error, bounds in (
                (utility, c.utility, c.standard_error, (0.0, 1.0)),
                (lead, c.behind, c.behind_error, (-1.0, 1.0)),
            ):
                if f is lead and c.text == decision.text:
                    continue
                expected = estimate(beams[b], f, normalize=normalize, bounds=bounds)
                assert value == pytest.approx(float(expected.value), abs=1e-9)
                known = expected.standard_error
                if known is None or math.isnan(float(known)):
                    assert error is None
                else:
                    assert error == pytest.approx(float(known), rel=1e-6, abs=1e-9)
                assert expected.bounds is not None
                low, high = (float(end) for end in expected.bounds)
                if f is utility:
                    assert (c.lower, c.upper) == pytest.approx((low, high), abs=1e-7)
                else:
                    assert c.certainly_behind == (low > 0)


@pytest.mark.parametrize("design", ["stratified", "gumbel-top-k", "independent"])
def test_bounds_contain_the_truth_and_what_is_certain_is_true(design: str) -> None:
    beams = draws(design, 24, 200)
    certain = 0
    for decision in mbr([CANDIDATES] * 200, beams, UTILITY, decode=decode):
        for c in decision.candidates:
            assert c.lower - 1e-6 <= TRUTH[c.text] <= c.upper + 1e-6
            if c.certainly_behind:
                certain += 1
                assert TRUTH[decision.text] > TRUTH[c.text]
    assert certain > 0


def test_expected_utilities_are_unbiased() -> None:
    # 5 candidates at 4.5 standard errors each: a false alarm in 29,000.
    found = mbr([CANDIDATES] * 4000, draws("stratified", 3, 4000), UTILITY, decode=decode)
    for c in CANDIDATES:
        values = torch.tensor([x.utility for d in found for x in d.candidates if x.text == c])
        error = float(values.std()) / math.sqrt(len(values))
        assert abs(float(values.mean()) - TRUTH[c]) < 4.5 * error


def test_texts_with_equal_weights_are_independent_samples() -> None:
    texts = ["123", "120", "123", "000"]
    (found,) = mbr([["123"]], [texts], UTILITY)
    values = torch.tensor([overlap("123", y) for y in texts], dtype=torch.float64)
    assert found.utility == pytest.approx(float(values.mean()))
    assert found.standard_error == pytest.approx(float(values.std()) / 2)
    assert found.captured is None
    assert found.runner_up is None
    assert found.certain


def test_texts_with_weights() -> None:
    (found,) = mbr([["12", "21"]], [["12", "21"]], UTILITY, weights=[[1.0, 3.0]])
    assert found.text == "21"
    assert found.utility == pytest.approx(0.75 * 2 / 3)
    assert found.standard_error is None


def test_beam_search_weighted_by_probability() -> None:
    beams = draws("top-k", 3, 1)
    (found,) = mbr(beams, None, UTILITY, decode=decode, weights="probability")
    texts, p = decode(beams.tokens(0)), beams.log_prob[0].exp().tolist()
    for c in found.candidates:
        expected = sum(q * overlap(c.text, y) for q, y in zip(p, texts, strict=True)) / sum(p)
        assert c.utility == pytest.approx(expected)


def test_joined_candidates_are_distinct_and_the_first_of_equal_ones_wins() -> None:
    beams, more = draws("top-k", 3, 1), draws("stratified", 3, 1)
    found = mbr([beams, more], more, lambda c, y: 1.0, decode=decode)
    texts = list(dict.fromkeys([*decode(beams.tokens(0)), *decode(more.tokens(0))]))
    assert found.candidates == [texts]
    assert found[0].text == texts[0]


def test_results_as_rows_and_as_a_frame() -> None:
    found = mbr([CANDIDATES] * 2, draws("stratified", 4, 2), UTILITY, decode=decode)
    rows = found.to_rows()
    assert [row["rank"] for row in rows] == [0, 1, 2, 3, 4] * 2
    frame = found.to_pandas()
    assert frame["text"].tolist() == [row["text"] for row in rows]
    assert found.texts == [found[0].text, found[1].text]
    assert str(found).startswith("[0] E[overlap] of '")
    entry = found.to_dicts()[0]
    assert entry["chosen"] == found[0].text
    assert entry["lead"] == found[0].candidates[1].behind


def adaptive(count: int, seed: int, rounds: int, confidence: float, k: int = 3) -> cpsbs.Decisions:
    def draw(sources: list[int], number: int) -> Beams:
        return draws("stratified", k, len(sources), seed=seed + number)

    first = draws("stratified", k, count, seed=seed)
    return mbr(
        [CANDIDATES] * count,
        first,
        UTILITY,
        decode=decode,
        confidence=confidence,
        draw=draw,
        rounds=rounds,
    )


def test_only_unclear_decisions_get_more_evidence() -> None:
    found = adaptive(50, 0, 6, 0.95, k=12)
    rounds = [decision.rounds for decision in found]
    assert 1 in rounds
    assert max(rounds) <= 6
    assert [decision.source for decision in found] == list(range(50))
    for decision in found:
        for c in decision.candidates:
            assert 0 <= c.utility <= 1
            assert c.behind >= 0 or not c.compared


def test_rivals_that_cannot_be_told_apart_ask_for_no_evidence() -> None:
    def draw(sources: list[int], number: int) -> Beams:
        raise AssertionError("no evidence is needed")

    best = max(TRUTH, key=lambda c: TRUTH[c])
    own = [[best, best + "4"]]  # the utility looks at no more than three places
    first = draws("stratified", 20, 1)
    (found,) = mbr(own, first, UTILITY, decode=decode, confidence=0.9, draw=draw)
    assert found.rounds == 1
    assert found.text == best


def test_more_rounds_have_more_degrees_of_freedom() -> None:
    values = torch.rand(3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    texts = WeightedTexts([["a"] * 4] * 3, None)
    means = [texts.means(values), texts.means(values.flip(1)), texts.means(values / 2)]
    pooled = _pooled(means)
    assert bool((pooled.freedom > means[0].freedom).all())
    assert bool((pooled.half_width(0.95) < means[0].half_width(0.95)).all())


def test_certain_bounds_of_exact_evidence_need_no_bounds_of_the_utility() -> None:
    (found,) = mbr([CANDIDATES], draws("stratified", 200, 1), overlap, decode=decode)
    assert found.certain
    assert all(c.lower == c.upper == pytest.approx(c.utility) for c in found.candidates)


def test_dropped_candidates_keep_their_figures() -> None:
    found = adaptive(40, 5, 6, 0.8, k=8)
    dropped = [c for d in found for c in d.candidates if not c.compared]
    assert dropped
    for c in dropped:
        assert c.lower - 1e-6 <= TRUTH[c.text] <= c.upper + 1e-6


def test_a_better_candidate_is_seldom_dropped() -> None:
    # At confidence 0.9 at most 30 of 300 decisions may have dropped a better candidate. More than
    # 50 of 300 have a probability below 2e-4 then.
    wrong = 0
    for decision in adaptive(300, 100, 5, 0.9, k=5):
        gone = [c.text for c in decision.candidates if not c.compared]
        wrong += any(TRUTH[c] > TRUTH[decision.text] + 1e-9 for c in gone)
    assert wrong <= 50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"candidates": [["a"], []]}, "source 1 has no candidates"),
        ({"candidates": "a text"}, "candidates is 'a text'; it must be Beams, or a list"),
        ({"candidates": ["a"]}, "candidates of source 0 are 'a'; they must be a list of texts"),
        ({"candidates": [["a", 3]]}, "candidates of source 0 have 3; every one must be a text"),
        ({"candidates": [["a"]], "evidence": [[]]}, "source 0 has no evidence"),
        ({"candidates": [["a"]], "evidence": [["a"], ["b"]]}, "1 sources with candidates and 2"),
        ({"candidates": [["a"]], "weights": [[1.0, 2.0]]}, "2 weights for 1 texts"),
        ({"candidates": [["a"]], "weights": [[-1.0]]}, "must be finite, at least 0"),
        ({"candidates": [["a"]], "weights": [[math.nan]]}, "must be finite, at least 0"),
        ({"candidates": [["a"]], "confidence": 0.9}, "confidence needs evidence that can be drawn"),
        (
            {"candidates": [["a"]], "confidence": 1.5},
            "confidence is 1.5; it must be a number between",
        ),
        ({"candidates": [["a"]], "evidence": 3}, "evidence is 3; it must be Beams, or a list"),
        ({"candidates": [["a"]], "weights": 3}, "weights is 3; it must have a list of numbers"),
        ({"candidates": [["a"]], "weights": [3]}, "it must have a list of numbers for each"),
        ({"candidates": [["a"]], "confidence": "x"}, "confidence is 'x'; it must be a number"),
        (
            {"candidates": [["a"]], "rounds": 0},
            "rounds is 0; it must be a whole number, at least 1",
        ),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mbr(**arguments)


def test_beams_need_decode_and_evidence_needs_weights() -> None:
    with pytest.raises(ValueError, match="candidates are Beams; texts need decode"):
        mbr(draws("stratified", 3, 1))
    with pytest.raises(ValueError, match="drawn by top-k, has no weights; draw the evidence with"):
        mbr(draws("top-k", 3, 1), decode=decode)


def test_plans() -> None:
    plan = Plan.parse("beam:16 + stratified:4+evidence", 32)
    assert plan.parts == (Part("beam", 16), Part("stratified", 4))
    assert plan.with_evidence
    assert not Plan.parse("beam:3").with_evidence


@pytest.mark.parametrize("candidates", ["", "beam", "beam:0", "beam:x", "beam:4+", "evidence:3"])
def test_plans_that_cannot_be_read(candidates: str) -> None:
    with pytest.raises(ValueError, match="it must be a sum of parts such as beam:16"):
        Plan.parse(candidates)


def test_plans_name_unknown_designs() -> None:
    with pytest.raises(ValueError, match="stratifed"):
        Plan.parse("stratifed:3")
    with pytest.raises(ValueError, match="design is 'top-k', which has no weights"):
        Plan.parse("evidence", design="top-k")


def test_confidence_needs_a_design_with_an_error() -> None:
    with pytest.raises(ValueError, match="design is 'arithmetic', a single beam of which gives no"):
        Plan.parse("evidence", design="arithmetic", confidence=0.9)


def test_plans_may_weight_by_probability() -> None:
    plan = Plan.parse("evidence", design="top-k", weights="probability")
    settings = plan.evidence_settings(4, 1.0)
    assert not settings.joint

    def never(numbers: list[int], settings: Any, seed_offset: int) -> Any:
        raise AssertionError("nothing more is drawn")

    beams = draws("top-k", 3, 2)
    found = plan.decide([beams], [0, 1], never, settings, "chrf", decode)
    assert found.to_dicts() == mbr(beams, decode=decode, weights="probability").to_dicts()
    with pytest.raises(ValueError, match="weights is 'p'; it must be 'probability' or None"):
        Plan.parse("evidence", weights="p")
    with pytest.raises(ValueError, match=r"confidence is 0\.9, but evidence with weights"):
        Plan.parse("evidence", weights="probability", confidence=0.9)
