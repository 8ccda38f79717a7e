"""More sequences, never a repeat: unbiased by enumeration, for every design, and to the last one.

Statistical tests have fixed seeds and a false-alarm rate of 1e-4 each (3.9 standard deviations).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cpsbs
from cpsbs import DESIGNS, Beams, Design, FunctionModel, TableModel, TransformersModel, search
from cpsbs.functions import Entropy
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Candidates, Selection
from tests.exact import Prefix
from tests.models.tiny import alone, make, prompts, teacher_forced

SIGMAS = 3.9
SMALL = TableModel.random(vocab_size=3, length=2, eos=0, seed=3)
"""Seven sequences."""
LARGE = TableModel.random(vocab_size=3, length=3, eos=0, seed=1)
"""Fifteen sequences."""
DISTINCT = [name for name, design in DESIGNS.items() if design.distinct]
WEIGHTED = [name for name in DISTINCT if DESIGNS[name].estimates]


def f(y: Sequence[int]) -> float:
    """Something that depends on all tokens."""
    return 1.0 + sum((i + 1) * token**2 for i, token in enumerate(y)) / 7


def mean_of_f(p: Mapping[Prefix, float]) -> float:
    return math.fsum(q * f(y) for y, q in p.items())


def copies(model: TableModel, sources: int) -> TableModel:
    return TableModel(model.tables * sources, model.eos[0])


def sums(beams: Beams) -> Tensor:
    """[B] Σ w f, by hand."""
    assert beams.log_weight is not None
    totals = [
        math.fsum(
            math.exp(w) * f(y) for y, w in zip(entry["sequences"], entry["log_weight"], strict=True)
        )
        for entry in beams.to_dict()["sources"]
    ]
    return torch.tensor(totals, dtype=torch.float64)


def assert_no_repeats(beams: Beams) -> None:
    for b in range(len(beams)):
        tokens = list(map(tuple, beams.tokens(b)))
        assert len(set(tokens)) == len(tokens)


# ---------------------------------------------- by enumeration, through the code that draws


class Scripted(Design):
    """Draws one sequence: in its round r, the r-th one in the script of each source.

    It says how likely that was, as an ancestral sample.
    """

    name = "scripted"

    def __init__(self, scripts: Sequence[Sequence[Prefix]], length: int) -> None:
        padded = [[[*y, *[0] * (length - len(y))] for y in script] for script in scripts]
        self._scripts = torch.tensor(padded)
        self._round = -1

    def begin(self, k: int, streams: Streams, sources: Tensor) -> Mapping[str, Tensor]:
        self._round += 1
        return {"row": sources[:, None], "step": torch.zeros_like(sources)[:, None]}

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        row, step = candidates.state["row"], candidates.state["step"]
        token = self._scripts[row, self._round, step.clamp(max=self._scripts.shape[-1] - 1)]
        token = torch.where(candidates.finished, 0, token)
        log_p = candidates.log_conditional()[:, 0]
        token = torch.where(log_p.gather(-1, token) > -math.inf, token, log_p.argmax(-1)[:, None])
        state = {"row": row, "step": step + 1}
        inclusion = log_p.gather(-1, token)
        return Selection(token, torch.ones_like(token, dtype=torch.bool), inclusion, state=state)


def in_turn(p: Mapping[Prefix, float], order: Sequence[Prefix]) -> float:
    """The probability to draw these sequences one after the other, without replacement."""
    left, q = 1.0, 1.0
    for y in order:
        q *= p[y] / left
        left -= p[y]
    return q


def test_more_is_unbiased_after_one_two_and_five_rounds() -> None:
    """Exactly: all orders in which five sequences can be drawn, each as a source of its own."""
    p = SMALL.sequences(2)
    orders = list(itertools.permutations(p, 5))
    chance = torch.tensor([in_turn(p, order) for order in orders], dtype=torch.float64)
    assert float(chance.sum()) == pytest.approx(1, abs=1e-12)
    model, scripted = copies(SMALL, len(orders)), Scripted(orders, 2)
    beams = search(model, 1, scripted, max_length=2)
    for count in range(1, 6):
        if count > 1:
            beams = cpsbs.more(model, beams, 1, generator=0)
        drawn = [set(order[:count]) for order in orders]
        assert [set(map(tuple, beams.tokens(b))) for b in range(len(orders))] == drawn
        if count in (1, 2, 5):
            mean = float((chance * sums(beams)).sum())
            assert mean == pytest.approx(mean_of_f(p), rel=1e-12)
    assert beams.settings["rounds"] == 5
    assert beams.settings["k"] == beams.k == 5


@pytest.mark.parametrize(("mass", "bias"), [(0.3, -0.168), (0.7, -0.038)])
def test_until_is_unbiased_because_it_draws_once_more(mass: float, bias: float) -> None:
    """Exactly; if it stopped as soon as the mass is captured, its mean would be off by this."""
    p = SMALL.sequences(2)
    orders = list(itertools.permutations(p))
    chance = [in_turn(p, order) for order in orders]
    scripted = Scripted(orders, 2)
    model = copies(SMALL, len(orders))
    beams = cpsbs.until(model, mass, 1, scripted, max_length=2, most=len(p))
    truth = mean_of_f(p)
    ours = math.fsum(q * g for q, g in zip(chance, sums(beams).tolist(), strict=True))
    assert ours == pytest.approx(truth, rel=1e-12)
    at_once = []
    for order, drawn in zip(orders, beams.present.sum(-1).tolist(), strict=True):
        captured = list(itertools.accumulate(p[y] for y in order))
        first = next(r for r, c in enumerate(captured) if c >= mass - 1e-12)
        assert drawn == min(first + 2, len(order))
        before = math.fsum(p[y] * f(y) for y in order[:first])
        left = 1 - math.fsum(p[y] for y in order[:first])
        at_once.append(before + left * f(order[first]))
    naive = math.fsum(q * g for q, g in zip(chance, at_once, strict=True))
    assert naive / truth - 1 == pytest.approx(bias, abs=1e-3)


# ------------------------------------------------------------------ statistically, every design


@pytest.mark.parametrize("name", WEIGHTED)
def test_every_design_is_unbiased_together_with_what_was_found_before(name: str) -> None:
    draws, truth = 800, mean_of_f(LARGE.sequences(3))
    model = copies(LARGE, draws)
    beams = search(model, 2, name, max_length=3, generator=1)
    for count in range(2, 6):
        beams = cpsbs.more(model, beams, 2, generator=1)
        if count in (2, 5):
            g = sums(beams)
            assert abs(float(g.mean()) - truth) <= SIGMAS * float(g.std()) / math.sqrt(draws)
            assert_no_repeats(beams)
    assert int(beams.present.sum(-1).min()) == 10


@pytest.mark.parametrize("name", WEIGHTED)
def test_until_is_unbiased_for_every_design(name: str) -> None:
    draws, truth = 800, mean_of_f(LARGE.sequences(3))
    beams = cpsbs.until(copies(LARGE, draws), 0.6, 2, name, max_length=3, generator=2, most=12)
    g = sums(beams)
    assert abs(float(g.mean()) - truth) <= SIGMAS * float(g.std()) / math.sqrt(draws)
    assert len(set(beams.present.sum(-1).tolist())) > 1  # sources stop at different times


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", ["conditional-poisson", "calibrated", "gumbel-top-k"])
def test_the_error_is_that_of_the_latest_round(name: str, normalize: bool) -> None:
    """The estimated variance has the variance as its mean: exactly, and nearly if normalised."""
    draws, truth = 2000, mean_of_f(LARGE.sequences(3))
    model = copies(LARGE, draws)
    first = search(model, 3, name, max_length=3, generator=5)
    beams = cpsbs.more(model, first, 4, generator=5, joint=DESIGNS[name].needs_joint)
    found = cpsbs.estimate(beams, f, normalize=normalize)
    assert found.variance is not None
    known = ~found.variance.isnan()
    assert float(known.double().mean()) > 0.99
    error, variance = (found.value - truth)[known], found.variance[known]
    off = variance - error.square()
    slack = 0.25 * float(variance.mean()) if normalize else 0.0
    assert abs(float(off.mean())) <= SIGMAS * float(off.std()) / math.sqrt(draws) + slack


def test_the_error_of_stratified_is_on_the_safe_side() -> None:
    draws = 1000
    model = copies(LARGE, draws)
    first = search(model, 3, max_length=3, generator=6)
    found = cpsbs.estimate(cpsbs.more(model, first, 5, generator=6), f)
    truth = mean_of_f(LARGE.sequences(3))
    assert found.variance is not None
    known = found.variance.nanmean()
    assert float((found.value - truth).square().mean()) < 1.1 * float(known)
    one = cpsbs.estimate(cpsbs.more(model, first, 1, "gumbel-top-k", generator=6), f)
    assert one.variance is None  # a single pick of stochastic beam search does not tell


# ------------------------------------------------------------------ what is in the result


@pytest.mark.parametrize("name", DISTINCT)
def test_all_sequences_are_found_and_estimates_are_exact(name: str) -> None:
    model = TableModel.random(vocab_size=3, length=3, sources=2, seed=4)
    beams = cpsbs.until(model, 1, 4, name, max_length=3, generator=0)
    for b in range(2):
        p = model.sequences(3, b)
        assert {tuple(y) for y in beams.tokens(b)} == p.keys()
        for y, log_p in zip(beams.tokens(b), beams.log_prob[b].tolist(), strict=False):
            assert math.exp(log_p) == pytest.approx(p[tuple(y)], rel=1e-12)
    if DESIGNS[name].estimates:
        found = cpsbs.estimate(beams, f)
        assert found.exact.all()
        assert "exactly" in str(found)
        assert float(found.value[1]) == pytest.approx(mean_of_f(model.sequences(3, 1)), rel=1e-12)
        if beams.log_inclusion is not None:
            assert (beams.log_inclusion[beams.present] == 0).all()
    else:
        assert beams.log_weight is None
    last = cpsbs.more(model, beams, 3, generator=0)
    assert last.tokens(0) == beams.tokens(0)
    assert last.k == beams.k + 3
    assert int(last.present.sum()) == int(beams.present.sum())


def test_until_is_a_search_and_more_with_the_same_seed() -> None:
    model = TableModel.random(vocab_size=5, length=4, sources=2, seed=0)
    beams = search(model, 4, max_length=4, generator=7, temperature=0.8, nucleus=0.95)
    for _ in range(2):
        beams = cpsbs.more(model, beams, 4, generator=7)
    whole = cpsbs.until(
        model, 0.99, 4, max_length=4, generator=7, temperature=0.8, nucleus=0.95, most=12
    )
    assert whole.tokens(0) == beams.tokens(0)
    assert whole.log_weight is not None
    torch.testing.assert_close(whole.log_weight, beams.log_weight)
    torch.testing.assert_close(whole.log_prob, beams.log_prob)
    assert whole.settings["seed"] == beams.settings["seed"] == 7
    assert whole.settings["rounds"] == beams.settings["rounds"] == 3
    assert (beams.log_prob.diff(dim=-1) <= 0).all()  # the most probable first
    assert "rounds 3, mass 0.99" in str(cpsbs.estimate(whole, len))


def test_a_draw_does_not_depend_on_the_other_sources() -> None:
    """Also where these have ended, or have nothing left."""
    model = TableModel.random(vocab_size=4, length=3, sources=3, seed=8)
    peaked = {prefix: [0.0, 0.0, 0.0, 1.0] for prefix in model.tables[0]}
    model.tables[0] = peaked
    batch = cpsbs.until(model, 0.7, 3, max_length=3, generator=cpsbs.split_seed(0, 3), most=30)
    for b in (1, 2):
        single = TableModel(model.tables[b], 0)
        generator = cpsbs.split_seed(0, 3)[b : b + 1]
        own = cpsbs.until(single, 0.7, 3, max_length=3, generator=generator, most=30)
        assert own.tokens(0) == batch.tokens(b)
    assert batch.tokens(0) == [[3, 3, 3]]


def test_sources_that_are_done_cost_nothing() -> None:
    rows: list[list[int]] = []

    def next_log_probs(prefix: Tensor, source: Tensor) -> Tensor:
        rows.append(source.tolist())
        scores = torch.zeros(len(prefix), 5)
        scores[source == 0, 1] = 60.0
        return scores

    model = FunctionModel(next_log_probs, 5, eos=0, sources=2)
    captured: list[Tensor] = []
    beams = cpsbs.until(model, 0.9, 3, max_length=4, generator=0, most=30, progress=captured.append)
    assert int(beams.present[1].sum()) == 30
    firsts = [i for i, at in enumerate(rows) if at == [0, 1]]
    assert len(captured) == 10
    assert all(0 not in at for at in rows[firsts[2] + 1 :] if at != [0, 1])
    assert all((after >= before).all() for before, after in itertools.pairwise(captured))


@pytest.mark.parametrize("name", ["llama", "gpt2", "marian", "t5"])
def test_transformers_models(name: str) -> None:
    model = make(name)
    inputs = prompts(model)
    wrapped = TransformersModel(model, **inputs)
    first = search(wrapped, 3, max_length=5, generator=0, temperature=0.6, entropy=True)
    beams = cpsbs.more(wrapped, first, 4, generator=0)
    again = cpsbs.until(
        wrapped, 0.4, 6, max_length=5, generator=0, temperature=0.6, most=40, entropy=True
    )
    for found in (beams, again):
        assert_no_repeats(found)
        assert found.log_weight is not None
        assert found.log_weight.exp().sum(-1).tolist() == pytest.approx([1] * 3, abs=1e-5)
    assert set(map(tuple, first.tokens(1))) < set(map(tuple, beams.tokens(1)))
    plain = cpsbs.more(wrapped, search(wrapped, 2, max_length=5, generator=0), 3, generator=1)
    for b in range(3):
        for y, log_p in zip(plain.tokens(b), plain.log_prob[b].tolist(), strict=True):
            assert log_p == pytest.approx(teacher_forced(model, alone(inputs, b), y), abs=1e-3)
    assert plain.settings["seed"] == (0, 1)
    assert cpsbs.estimate(beams, Entropy(rao_blackwell=True)).value.isfinite().all()


def test_step_entropies_are_those_of_the_model() -> None:
    """Not those of what is left of it; the first beams need not have them."""
    model = TableModel.random(vocab_size=4, length=3, sources=2, seed=9)
    first = search(model, 3, max_length=3, generator=0)
    for beams in (
        cpsbs.more(model, first, 5, generator=0, entropy=True),
        cpsbs.until(model, 0.8, 4, max_length=3, generator=0, entropy=True),
    ):
        assert beams.entropy is not None
        for b in range(2):
            for y, found in zip(beams.tokens(b), beams.entropy[b].tolist(), strict=False):
                rows = [model.tables[b][tuple(y[:t])] for t in range(len(y))]
                expected = -sum(q * math.log(q) for row in rows for q in row)
                assert found == pytest.approx(expected, rel=1e-9)
    assert cpsbs.more(model, first, 5, generator=0).entropy is None


def test_beam_search_may_come_first_and_go_on() -> None:
    """The K most probable sequences count with certainty; the rest is a sample."""
    model = copies(LARGE, 800)
    best = search(model, 4, "top-k", max_length=3)
    beams = cpsbs.more(model, best, 3, "stratified", generator=3)
    g = sums(beams)
    truth = mean_of_f(LARGE.sequences(3))
    assert abs(float(g.mean()) - truth) <= SIGMAS * float(g.std()) / math.sqrt(len(g))
    assert cpsbs.estimate(beams, f).variance is not None
    further = cpsbs.more(model, best, 3)
    assert further.log_weight is None
    assert further.tokens(0)[:4] == best.tokens(0)  # beam search of what is left
    assert int(further.present[0].sum()) == 7
    assert_no_repeats(further)


def test_beam_search_may_find_everything() -> None:
    """Then the probabilities are the weights, even though beam search has none."""
    beams = cpsbs.more(SMALL, search(SMALL, 7, "top-k", max_length=2), 3, "stratified")
    found = cpsbs.estimate(beams, f)
    assert found.exact.all()
    assert float(found.value) == pytest.approx(mean_of_f(SMALL.sequences(2)))


def test_repeats_of_independent_samples_count_once() -> None:
    first = search(LARGE, 20, "independent", max_length=3, generator=0)
    beams = cpsbs.more(LARGE, first, 2, "stratified", generator=0)
    assert_no_repeats(beams)
    distinct = set(map(tuple, first.tokens(0)))
    assert int(beams.present.sum()) == len(distinct) + 2
    assert beams.log_weight is not None
    assert float(beams.log_weight.exp().sum()) == pytest.approx(1)


def test_seeds_of_rounds_have_nothing_in_common() -> None:
    """A second round with the random numbers of the first would depend on it."""
    model = copies(LARGE, 400)
    first = search(model, 1, "gumbel-top-k", max_length=3, generator=0)
    second = cpsbs.more(model, first, 1, generator=0)
    other = cpsbs.more(model, first, 1, generator=1)
    assert second.settings["seed"] == 0
    assert other.settings["seed"] == (0, 1)
    ours = search(model, 1, "gumbel-top-k", max_length=3, generator=2)
    cpsbs.estimate([first, ours], f)
    with pytest.raises(ValueError, match="same seed"):
        cpsbs.estimate([second, other], f)
    cpsbs.estimate([second, cpsbs.more(model, ours, 1, generator=2)], f)


# ------------------------------------------------------------------ what is refused


def test_bad_input_is_refused_by_name() -> None:
    beams = search(LARGE, 3, max_length=3, generator=0)
    two = TableModel.random(vocab_size=3, length=3, sources=2, seed=1)
    larger = TableModel.random(vocab_size=9, length=2, eos=0, seed=0)
    tokens = search(larger, 30, max_length=2, generator=0)
    empty = replace(beams, present=torch.zeros_like(beams.present))
    cut = replace(beams, finished=torch.zeros_like(beams.finished))
    foreign = replace(beams, settings={})
    wrong: list[tuple[Any, str]] = [
        ((LARGE, [1], 2), r"beams is a list; it must be the result of a search"),
        ((LARGE, foreign, 2), r"beams.settings has no max_length, temperature, nucleus"),
        ((LARGE, beams, 0), r"k is 0; it must be an integer of at least 1"),
        ((LARGE, beams, 2, "independent"), r"design is independent, .* without replacement"),
        ((LARGE, replace(beams, made_by=None), 2), r"design is None"),
        ((two, beams, 2), r"beams has 1 sources; it must have those of the model, 2"),
        ((LARGE, empty, 2), r"beams holds no sequence"),
        ((LARGE, tokens, 2), r"beams holds the token 8; the model's tokens are 0 to V - 1 = 2"),
        ((LARGE, cut, 2), r"it must have ended, or have max_length = 3"),
        (
            (TableModel.random(vocab_size=3, length=3, eos=0, seed=77), beams, 2),
            r"beams holds the sequence .* with log p = .*; under this model it is",
        ),
        ((object(), beams, 2), r"model is a object, which has no start"),
    ]
    for given, message in wrong:
        with pytest.raises(ValueError, match=message):
            cpsbs.more(*given)
    for settings, message in [
        ({"mass": 0.0}, r"mass is 0.0; it must be above 0 and at most 1"),
        ({"mass": 1.5}, r"mass is 1.5"),
        ({"mass": math.nan}, r"mass is nan"),
        ({"most": 0}, r"most is 0; it must be an integer of at least 1"),
        ({"k": 0}, r"k is 0"),
        ({"design": "arithmetic"}, r"design is arithmetic, which may draw a sequence twice"),
    ]:
        with pytest.raises(ValueError, match=message):
            cpsbs.until(LARGE, max_length=3, **settings)  # type: ignore[arg-type]


def test_inclusion_probabilities_belong_to_one_search() -> None:
    beams = search(LARGE, 3, "conditional-poisson", max_length=3, generator=0)
    beams = cpsbs.more(LARGE, beams, 2, generator=0)
    with pytest.raises(ValueError, match="beams were drawn in several rounds"):
        cpsbs.monte_carlo_inclusion(lambda i: copies(LARGE, len(i)), beams, 10)


def test_rounds_that_share_their_random_numbers_are_not_independent() -> None:
    """Of beams with other first seeds the last rounds may still be the same."""
    model = TableModel.random(vocab_size=4, length=4, eos=0, seed=1)

    def rounds(*seeds: int) -> Beams:
        beams = search(model, 2, max_length=4, generator=seeds[0])
        for seed in seeds[1:]:
            beams = cpsbs.more(model, beams, 2, generator=seed)
        return beams

    for one, other in (((0, 0, 5), (1, 2, 5)), ((5, 5), (3, 5))):
        with pytest.raises(ValueError, match="drawn with the same seed"):
            cpsbs.estimate([rounds(*one), rounds(*other)], len)
    assert cpsbs.estimate([rounds(0, 0, 5), rounds(1, 2, 6)], len).standard_error is not None
