"""Distributions over answers: unbiased by enumeration, with covariances, bounds and entropies."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cpsbs
from cpsbs import DESIGNS, TableModel, answers, keys, search
from cpsbs.decisions.entropy import entropy_bounds, plug_in_entropy
from tests.exact import Prefix, paths, poisson_rule

LENGTH = 3
MODEL = TableModel.random(vocab_size=4, length=LENGTH, eos=0, seed=4)
ALL = MODEL.sequences(LENGTH)


def total(y: Any) -> int:
    """The answer of a sequence: the sum of its tokens, by which several sequences agree."""
    return sum(y)


def true_answers() -> dict[int, float]:
    out: dict[int, float] = defaultdict(float)
    for y, p in ALL.items():
        out[total(y)] += p
    return dict(out)


TRUTH = true_answers()


def draws(design: str, k: int, count: int, **options: Any) -> Any:
    copies = TableModel(MODEL.tables * count, 0)
    return search(copies, k, design, max_length=LENGTH, generator=3, **options)


def test_all_sequences_give_the_exact_distribution() -> None:
    found = answers(search(MODEL, 200, max_length=LENGTH), total)[0]
    assert {a.answer: a.probability for a in found.answers} == pytest.approx(TRUTH)
    for a in found.answers:
        assert (a.standard_error, a.lower, a.upper) == (0, a.probability, a.probability)
        assert sum(ALL[y] for y in a.sequences) == pytest.approx(a.probability)
    entropy = -sum(p * math.log(p) for p in TRUTH.values())
    assert found.entropy == pytest.approx(entropy)
    assert found.entropy_bounds == (pytest.approx(entropy), pytest.approx(entropy))
    assert found.certain
    assert found.best.probability == pytest.approx(max(TRUTH.values()))


@pytest.mark.parametrize("name", [n for n in DESIGNS if n not in ("top-k", "diverse")])
def test_probabilities_are_unbiased(name: str) -> None:
    # 5 answers × 7 designs at 4.5 standard errors each: a false alarm in 4,000.
    count = 3000
    found = answers(draws(name, 4, count), total)
    values: dict[int, list[float]] = {a: [] for a in TRUTH}
    for own in found:
        here = {a.answer: a.probability for a in own.answers}
        for a, v in values.items():
            v.append(here.get(a, 0.0))
    for a, v in values.items():
        sample = torch.tensor(v, dtype=torch.float64)
        assert abs(float(sample.mean()) - TRUTH[a]) < 4.5 * float(sample.std()) / math.sqrt(count)


def test_covariances_are_unbiased_by_enumeration_of_all_paths() -> None:
    """For the paper's design, whose joint inclusion probabilities are known.

    The covariance of two answers' estimates, over all paths, is the mean of its estimate, which
    each path tells by its own joint inclusion probabilities.
    """
    small = TableModel.random(vocab_size=3, length=2, eos=0, seed=4)
    p = small.sequences(2)
    truth: dict[int, float] = defaultdict(float)
    mean: dict[tuple[int, int], float] = defaultdict(float)
    product: dict[tuple[int, int], float] = defaultdict(float)
    for y, q in p.items():
        truth[total(y)] += q
    for path in paths(small, 3, 2, poisson_rule(lambda q: q / (1 - q))):
        value: dict[int, float] = defaultdict(float)
        for y, pi in path.inclusion.items():
            value[total(y)] += p[y] / pi
        for a, b in itertools.product(truth, truth):
            pairs = sum(
                p[y] * p[z] / path.joint[y, z]
                for y in path.inclusion
                for z in path.inclusion
                if (total(y), total(z)) == (a, b)
            )
            mean[a, b] += path.probability * (value[a] * value[b] - pairs)
            product[a, b] += path.probability * value[a] * value[b]
    for a, b in itertools.product(truth, truth):
        assert product[a, b] - truth[a] * truth[b] == pytest.approx(mean[a, b], abs=1e-12)


def test_covariance_is_the_formula_of_the_enumeration() -> None:
    beams = draws("conditional-poisson", 3, 1, joint=True)
    found = answers(beams, total)
    own = [a.answer for a in found[0].answers]
    assert beams.joint_log_inclusion is not None
    assert beams.log_weight is not None
    tokens = [tuple(y) for y in beams.tokens(0)]
    weight, log_p = beams.log_weight[0].exp(), beams.log_prob[0]
    ratio = (log_p[:, None] + log_p[None] - beams.joint_log_inclusion[0]).exp()
    covariance = found.covariance(0)
    for (i, a), (j, b) in itertools.product(enumerate(own), enumerate(own)):
        one = torch.tensor([total(y) == a for y in tokens], dtype=torch.float64)
        other = torch.tensor([total(y) == b for y in tokens], dtype=torch.float64)
        expected = float((weight * one).sum() * (weight * other).sum() - one @ ratio @ other)
        if not math.isnan(float(covariance[i, j])):
            assert float(covariance[i, j]) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert not bool(covariance.isnan().all())


def test_the_lead_takes_the_covariance_into_account() -> None:
    found = answers(draws("stratified", 6, 20), total)
    seen = 0
    for b, own in enumerate(found):
        covariance, lead = found.covariance(b), found.lead(b)
        expected = own.answers[0].probability - own.answers[1].probability
        assert float(lead.value[0]) == pytest.approx(expected)
        variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
        if lead.variance is not None and not bool((lead.variance.isnan() | variance.isnan()).any()):
            assert float(lead.variance[0]) == pytest.approx(float(variance), rel=1e-9)
            seen += 1
        assert lead.bounds is not None
        assert float(lead.bounds[0][0]) <= TRUTH[own.best.answer] - TRUTH[own.answers[1].answer]
    assert seen > 10


@pytest.mark.parametrize("name", DESIGNS)
def test_bounds_and_certainty_hold_in_every_beam(name: str) -> None:
    entropy = -sum(p * math.log(p) for p in TRUTH.values())
    certain = 0
    for own in answers(draws(name, 25, 200), total):
        for a in own.answers:
            assert a.lower - 1e-6 <= TRUTH[a.answer] <= a.upper + 1e-6
        assert own.entropy_bounds[0] <= entropy + 1e-6
        if own.certain:
            certain += 1
            assert TRUTH[own.best.answer] == max(TRUTH.values())
    if name == "top-k":
        assert certain == 200


def test_beam_search_gives_bounds_only() -> None:
    own = answers(draws("top-k", 5, 1), total)[0]
    assert math.isnan(own.best.probability)
    assert math.isnan(own.entropy)
    assert own.best.lower > 0
    assert "not estimated" in str(own)


def test_several_beams_and_normalised_ones() -> None:
    several = [search(MODEL, 4, max_length=LENGTH, generator=i) for i in range(8)]
    own = answers(several, total)[0]
    singles = [{a.answer: a.probability for a in answers(b, total)[0].answers} for b in several]
    for a in own.answers:
        expected = sum(one.get(a.answer, 0.0) for one in singles) / 8
        assert a.probability == pytest.approx(expected)
    normal = answers(draws("gumbel-top-k", 4, 1), total, normalize=True)[0]
    assert sum(a.probability for a in normal.answers) == pytest.approx(1)


@given(
    st.lists(st.just(0.0) | st.floats(1e-9, 1), min_size=1, max_size=5),
    st.floats(0, 1),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
@settings(max_examples=100, deadline=None)
def test_entropy_bounds_contain_every_completion(
    weights: list[float], unseen: float, more: int, random: Any
) -> None:
    scale = (1 - unseen) / sum(weights) if sum(weights) > 0 else 0.0
    lower = [w * scale for w in weights]
    unseen = max(0.0, 1 - sum(lower))
    low, high = entropy_bounds(lower, unseen, len(lower) + more)
    assert entropy_bounds(lower, unseen, None)[0] <= low + 1e-12
    for _ in range(20):
        parts = [random.random() ** 3 + 1e-9 for _ in range(len(lower) + more)]
        p = [
            a + unseen * b / sum(parts) for a, b in zip([*lower, *[0.0] * more], parts, strict=True)
        ]
        entropy = -sum(q * math.log(q) for q in p if q > 0)
        assert low - 1e-9 <= entropy <= high + 1e-9


def test_entropy_bounds_are_reached() -> None:
    low, high = entropy_bounds([0.5, 0.1], 0.4, 3)
    assert low == pytest.approx(-0.9 * math.log(0.9) - 0.1 * math.log(0.1))
    assert high == pytest.approx(-0.5 * math.log(0.5) - 2 * 0.25 * math.log(0.25))
    assert entropy_bounds([0.5, 0.1], 0.4, None)[1] == math.inf
    assert math.isnan(plug_in_entropy([math.nan]))


def test_texts_tables_and_records() -> None:
    def decode(rows: Any) -> list[str]:
        return [" ".join("_abc"[t] for t in y) for y in rows]

    beams = search(MODEL, 6, max_length=LENGTH, generator=0)
    found = answers(beams, len, decode=decode)
    own = found[0]
    for a in own.answers:
        assert all(len(text) == a.answer for text in a.texts)
        assert decode(a.sequences) == list(a.texts)
    frame = found.to_pandas()
    assert list(frame["answer"]) == [a.answer for a in own.answers]
    (entry,) = found.to_dicts()
    assert entry["answers"][0]["probability"] == own.best.probability
    assert entry["entropy_bounds"][1] is None
    assert str(own) in str(found)


def _always(answer: Any) -> Any:
    def key(y: Any) -> Any:
        return answer

    return key


def test_what_cannot_be_answered_is_refused() -> None:
    beams = search(MODEL, 3, max_length=LENGTH, generator=0)

    def fails(y: Any) -> Any:
        raise RuntimeError("no idea")

    with pytest.raises(ValueError, match=r"key failed on the sequence \[.*\] of source 0.*no idea"):
        answers(beams, fails)
    with pytest.raises(ValueError, match=r"key returned \['x'\] for the sequence .* hashable"):
        answers(beams, lambda y: ["x"])
    with pytest.raises(ValueError, match="key is the text 'first-line'"):
        answers(beams, "first-line")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="key is the class choice; pass an object"):
        answers(beams, keys.choice)
    for odd in (torch.tensor(True), math.nan, (["a"],)):
        with pytest.raises(ValueError, match="hashable and equal to itself"):
            answers(beams, _always(odd))

    def elsewhere(y: Any) -> str:
        return "siege"

    elsewhere.choices = ["Place"]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"'siege' .* not among its choices, 'Place'"):
        answers(beams, elsewhere)
    with pytest.raises(ValueError, match="it was given tokens; for texts, pass decode"):
        answers(beams, lambda y: y.split())
    with pytest.raises(ValueError, match="decode is a str"):
        answers(beams, total, decode="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="decode returned 1 texts for 3"):
        answers(beams, total, decode=lambda rows: ["a"])
    with pytest.raises(ValueError, match="beams has no sources"):
        answers(beams[0:0], total)
    with pytest.raises(ValueError, match="coefficients is 'x'"):
        answers(beams, total).estimate("x")  # type: ignore[arg-type]

    def short(rows: Any) -> Any:
        return []

    short.batched = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="returned 0 answers for 3 texts"):
        answers(beams, short)
    empty = cpsbs.Beams(
        **{
            **{name: getattr(beams, name) for name in beams.__dataclass_fields__},
            "present": torch.zeros_like(beams.present),
        }
    )
    with pytest.raises(ValueError, match="source 0 has no sequences"):
        answers(empty, total)
    with pytest.raises(ValueError, match="99 is not among the answers"):
        answers(beams, total).estimate({99: 1})


def test_prefixes_are_tuples() -> None:
    """The oracle and the beams agree on what a sequence is."""
    prefix: Prefix = next(iter(ALL))
    assert tuple(map(int, prefix)) in ALL
