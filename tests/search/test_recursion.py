"""The search with every design, against exact laws on enumerable models.

Chi-square tests have a false-alarm rate of 1e-4 each and fixed seeds.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from scipy import stats

from cpsbs import DESIGNS, Beams, FunctionModel, TableModel, search
from cpsbs.designs import Arithmetic, ConditionalPoissonDesign, Diverse, Selection, TopK
from cpsbs.randomness import split_seed
from tests.exact import Beam, Prefix, beam_law, conditional_poisson, without_replacement

FALSE_ALARM = 1e-4
MODEL = TableModel.random(vocab_size=3, length=3, eos=0, seed=1)
ALL = MODEL.sequences(3)


def copies(model: TableModel, sources: int) -> TableModel:
    """The same distribution for many sources: as many independent searches in one batch."""
    return TableModel(model.tables * sources, model.eos[0])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def beam_sets(beams: Beams) -> list[Beam]:
    return [frozenset(map(tuple, beams.tokens(b))) for b in range(len(beams))]


def assert_law(observed: Counter[Any], law: Mapping[Any, float], draws: int) -> None:
    assert set(observed) <= set(law)
    cells = sorted(law, key=lambda y: law[y])
    pooled: list[list[float]] = [[0.0, 0.0]]
    for cell in cells:
        if pooled[-1][1] >= 5:
            pooled.append([0.0, 0.0])
        pooled[-1][0] += observed[cell]
        pooled[-1][1] += law[cell] * draws
    assert len(pooled) > 2
    statistic = sum((o - e) ** 2 / e for o, e in pooled)
    assert stats.chi2.sf(statistic, len(pooled) - 1) > FALSE_ALARM


# ---------------------------------------------------------------------- the law of the final beam


@pytest.mark.parametrize(("weights", "k"), [("odds", 2), ("odds", 4), ("probability", 3)])
def test_cpsbs_has_the_law_of_the_sum_over_paths(weights: str, k: int) -> None:
    draws = 15_000
    weight = (lambda p: p / (1 - p)) if weights == "odds" else (lambda p: p)
    law = beam_law(MODEL, k, 3, conditional_poisson(weight))
    assert sum(law.values()) == pytest.approx(1)
    design = ConditionalPoissonDesign(weights=weights)  # type: ignore[arg-type]
    beams = search(copies(MODEL, draws), k, design, max_length=3, generator=generator(k))
    assert_law(Counter(beam_sets(beams)), law, draws)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_sbs_samples_whole_sequences_without_replacement(k: int) -> None:
    draws = 15_000
    beams = search(copies(MODEL, draws), k, "gumbel-top-k", max_length=3, generator=generator(k))
    assert_law(Counter(beam_sets(beams)), without_replacement(ALL, k), draws)


@pytest.mark.parametrize("design", ["independent", "arithmetic"])
def test_rows_by_themselves_have_the_law_of_the_model(design: str) -> None:
    draws, k = 4_000, 3
    beams = search(copies(MODEL, draws), k, design, max_length=3, generator=generator(0))
    everything = Counter(tuple(y) for b in range(draws) for y in beams.tokens(b))
    if design == "independent":
        assert_law(everything, ALL, draws * k)
    for y, p in ALL.items():  # arithmetic samples of one source are spread more evenly
        assert everything[y] / (draws * k) == pytest.approx(p, abs=4 * math.sqrt(p / (draws * k)))


def test_arithmetic_samples_are_a_lattice() -> None:
    """K codes 1/K apart: a sequence with probability p is drawn ⌊Kp⌋ or ⌈Kp⌉ times."""
    k = 40
    beams = search(copies(MODEL, 50), k, "arithmetic", max_length=3, generator=generator(1))
    for b in range(50):
        times = Counter(map(tuple, beams.tokens(b)))
        for y, p in ALL.items():
            assert math.floor(k * p - 1e-9) <= times[y] <= math.ceil(k * p + 1e-9)


def test_arithmetic_codes_do_not_run_out_of_bits() -> None:
    """300 fair coins are 300 bits; a code has 53. The last token must still be a fair coin."""
    model = FunctionModel(
        lambda x: torch.tensor([[-math.inf, 0.0, 0.0]]).expand(len(x), 3), 3, eos=0, sources=200
    )
    beams = search(model, 10, Arithmetic(), max_length=300, generator=generator(0))
    ones = (beams.sequences[..., -50:] == 1).double().mean()
    assert float(ones) == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(200 * 10 * 50))
    assert len({tuple(y) for y in beams.sequences.view(-1, 300).tolist()}) == 2000


# ---------------------------------------------------------------------- special cases


def brute_force_beam(model: TableModel, k: int, length: int) -> list[Prefix]:
    """Beam search in a few lines of Python."""
    beam: dict[Prefix, float] = {(): 1.0}
    for _ in range(length):
        candidates: dict[Prefix, float] = {}
        for y, p in beam.items():
            if y and y[-1] in model.eos:
                candidates[y] = p
            else:
                row = model.tables[0][y]
                candidates |= {(*y, v): p * q for v, q in enumerate(row) if q > 0}
        beam = dict(sorted(candidates.items(), key=lambda item: -item[1])[:k])
    return list(beam)


@pytest.mark.parametrize("k", [1, 2, 5, 9])
def test_top_k_is_beam_search(k: int) -> None:
    model = TableModel.random(vocab_size=4, length=4, eos=2, seed=5)
    beams = search(model, k, "top-k", max_length=4)
    assert [tuple(y) for y in beams.tokens(0)] == brute_force_beam(model, k, 4)
    assert beams.log_inclusion is None
    assert beams.log_weight is None


@pytest.mark.parametrize("anneal", [1e-4, 0.0])
def test_annealed_cpsbs_is_beam_search(anneal: float) -> None:
    model = TableModel.random(vocab_size=5, length=4, eos=0, seed=2)
    design = ConditionalPoissonDesign(anneal=anneal)
    expected = search(model, 6, "top-k", max_length=4)
    for seed in range(20):
        beams = search(model, 6, design, max_length=4, generator=generator(seed))
        assert torch.equal(beams.sequences, expected.sequences)


def test_one_row_with_probabilities_as_weights_is_ancestral_sampling() -> None:
    draws = 15_000
    design = ConditionalPoissonDesign(weights="probability")
    beams = search(copies(MODEL, draws), 1, design, max_length=3, generator=generator(0))
    assert_law(Counter(tuple(beams.tokens(b)[0]) for b in range(draws)), ALL, draws)
    assert beams.log_inclusion is not None
    torch.testing.assert_close(beams.log_inclusion, beams.log_prob)


def test_diverse_groups_of_no_strength_repeat_beam_search() -> None:
    model = TableModel.random(vocab_size=5, length=4, eos=0, seed=2)
    alone = search(model, 2, "top-k", max_length=4)
    groups = search(model, 6, Diverse(strength=0.0, groups=3), max_length=4)
    assert Counter(map(tuple, groups.tokens(0))) == {tuple(y): 3 for y in alone.tokens(0)}
    one = search(model, 4, Diverse(strength=9.0, groups=1), max_length=4)
    assert torch.equal(one.sequences, search(model, 4, "top-k", max_length=4).sequences)
    strong = search(model, 4, Diverse(strength=1e3), max_length=1)
    assert len(set(map(tuple, strong.tokens(0)))) == 4


def test_fewer_sequences_than_places() -> None:
    """All of them, with inclusion probability one."""
    for design in ("conditional-poisson", "gumbel-top-k", "top-k"):
        beams = search(copies(MODEL, 2), 100, design, max_length=3, generator=generator(0))
        for b in range(2):
            assert {tuple(y) for y in beams.tokens(b)} == set(ALL)
        assert int(beams.present.sum()) == 2 * len(ALL)
        if beams.log_inclusion is not None and beams.log_weight is not None:
            assert float(beams.log_inclusion[beams.present].abs().max()) < 1e-12
            torch.testing.assert_close(
                beams.log_weight.exp().sum(-1), torch.ones(2, dtype=torch.float64)
            )


# ---------------------------------------------------------------------- probabilities and weights


@pytest.mark.parametrize("design", DESIGNS)
def test_log_prob_is_that_of_the_model(design: str) -> None:
    beams = search(copies(MODEL, 30), 4, design, max_length=3, generator=generator(0))
    for b in range(30):
        for y, log_p in zip(beams.tokens(b), beams.log_prob[b].tolist(), strict=False):
            assert log_p == pytest.approx(math.log(ALL[tuple(y)]), abs=1e-12)
        if DESIGNS[design].distinct:
            assert len(set(map(tuple, beams.tokens(b)))) == 4


@pytest.mark.parametrize("design", [name for name in DESIGNS if name not in ("top-k", "diverse")])
def test_weighted_sums_are_unbiased(design: str) -> None:
    """E f for f = 1 and f = length; within four standard errors."""
    draws = 8_000
    beams = search(copies(MODEL, draws), 3, design, max_length=3, generator=generator(9))
    assert beams.log_weight is not None
    weight = beams.log_weight.exp()
    exact = sum(p * len(y) for y, p in ALL.items())
    for f, truth in ((torch.ones_like(weight), 1.0), (beams.lengths.double(), exact)):
        estimate = (weight * f).sum(-1)
        error = float(estimate.std()) / math.sqrt(draws)
        assert abs(float(estimate.mean()) - truth) < 4 * error + 1e-9


def test_temperature_and_nucleus_change_the_model() -> None:
    tempered = {y: [q**2 for q in row] for y, row in MODEL.tables[0].items()}
    tempered = {y: [q / sum(row) for q in row] for y, row in tempered.items()}
    exact = TableModel(tempered, 0).sequences(3)
    beams = search(MODEL, 100, "top-k", max_length=3, temperature=0.5)
    for y, log_p in zip(beams.tokens(0), beams.log_prob[0].tolist(), strict=False):
        assert log_p == pytest.approx(math.log(exact[tuple(y)]), abs=1e-12)
    narrow = TableModel({(): [0.5, 0.3, 0.2], (1,): [0.9, 0.05, 0.05], (2,): [1, 0, 0]}, 0)
    beams = search(narrow, 10, "top-k", max_length=2, nucleus=0.79)
    assert {tuple(y) for y in beams.tokens(0)} == {(0,), (1, 0)}
    assert float(beams.log_prob[0].exp()[beams.present[0]].sum()) == pytest.approx(1)


def test_joint_inclusion_along_the_path() -> None:
    """Σ_{y,y'} p(y) p(y') / π(y, y') over the beam has expectation one (DESIGN §5)."""
    draws = 6_000
    model = copies(MODEL, draws)
    beams = search(
        model, 3, "conditional-poisson", max_length=3, generator=generator(4), joint=True
    )
    assert beams.joint_log_inclusion is not None
    assert beams.log_inclusion is not None
    diagonal = beams.joint_log_inclusion.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(diagonal, beams.log_inclusion)
    pairs = (beams.log_prob[..., None] + beams.log_prob[:, None] - beams.joint_log_inclusion).exp()
    estimate = pairs.sum((-2, -1))
    error = float(estimate.std()) / math.sqrt(draws)
    assert abs(float(estimate.mean()) - 1) < 4 * error


def test_the_path_leads_to_the_beam() -> None:
    beams = search(copies(MODEL, 5), 3, max_length=3, generator=generator(4), path=True)
    assert beams.path is not None
    for b in range(5):
        hypotheses: list[Prefix] = [()]
        for step in beams.path:
            if b not in step.source.tolist():
                break
            i = step.source.tolist().index(b)
            grown = []
            picks = zip(
                step.parent[i].tolist(),
                step.token[i].tolist(),
                step.present[i].tolist(),
                strict=True,
            )
            for parent, token, present in picks:
                if present:
                    y = hypotheses[parent]
                    grown.append(y if y and y[-1] == 0 else (*y, token))
            hypotheses = grown
        assert set(hypotheses) == {tuple(y) for y in beams.tokens(b)}


# ---------------------------------------------------------------------- batches and results


@pytest.mark.parametrize("design", DESIGNS)
def test_a_source_does_not_depend_on_the_batch(design: str) -> None:
    model = TableModel.random(vocab_size=6, length=4, eos=0, sources=5, seed=3)
    together = search(model, 4, design, max_length=4, generator=split_seed(7, 5))
    for b in range(5):
        alone = TableModel(model.tables[b], 0)
        one = search(alone, 4, design, max_length=4, generator=split_seed(7, 5)[b : b + 1])
        assert one.tokens(0) == together.tokens(b)
        torch.testing.assert_close(one.log_prob[0], together.log_prob[b])


def test_function_models_and_several_ends() -> None:
    def scores(prefix: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        s, total = source.float(), prefix.sum(-1).float()
        return torch.stack([s, -s, total, 0 * s], dim=-1)

    model = FunctionModel(scores, 4, eos=(0, 3), sources=2)
    beams = search(model, 3, "top-k", max_length=5)
    ends = {y[-1] for b in range(2) for y in beams.tokens(b) if len(y) < 5}
    assert ends <= {0, 3}
    assert not torch.equal(beams.sequences[0], beams.sequences[1])
    wrong = FunctionModel(lambda x: torch.zeros(len(x), 5), 4, eos=0)
    with pytest.raises(ValueError, match=r"returned the shape \[1, 5\]"):
        search(wrong, 2, max_length=3)


def test_beams_can_be_sliced_and_written_down() -> None:
    design = "conditional-poisson"
    beams = search(copies(MODEL, 4), 3, design, max_length=3, generator=generator(0), joint=True)
    assert len(beams) == 4
    assert beams[2].tokens(0) == beams.tokens(2)
    assert len(beams[1:3]) == 2
    assert [b.tokens(0) for b in beams] == [beams.tokens(b) for b in range(4)]
    assert beams.decode(lambda rows: [" ".join(map(str, y)) for y in rows])[0][0]
    written = json.loads(beams.to_json())
    assert written["design"] == "conditional-poisson"
    assert written["sources"][1]["sequences"] == beams.tokens(1)
    with pytest.raises(AttributeError):
        beams.pad = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k is 0"),
        ({"max_length": 0}, "max_length is 0"),
        ({"temperature": 0}, "temperature is 0"),
        ({"nucleus": 1.5}, "nucleus is 1.5"),
        ({"design": "beam"}, "design is 'beam'; it must be one of conditional-poisson"),
        ({"design": Diverse(groups=3), "k": 4}, "groups is 3; k = 4 must be a multiple"),
        ({"generator": [torch.Generator()] * 2}, "generator has 2 generators"),
        ({"generator": 1.5}, "generator is 1.5; it must be a seed"),
        ({"generator": "0"}, "generator has a str for a model"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    settings: dict[str, object] = {"k": 2, "max_length": 3, **arguments}
    with pytest.raises(ValueError, match=message):
        search(MODEL, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("design", ["conditional-poisson", "calibrated", "stratified"])
def test_a_source_with_exactly_k_candidates_draws_the_same_alone(design: str) -> None:
    """Where nothing is random no random numbers are used up, whoever else is in the batch."""
    first = torch.tensor([[0.2, 0.3, 0.5, 0], [0.5, 0.5, 0, 0]]).double().log()
    later = torch.tensor([0.1, 0.2, 0.3, 0.4]).double().log()

    def model(sources: int) -> FunctionModel:
        def scores(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
            return first[source] if x.shape[1] == 0 else later.expand(len(x), -1)

        return FunctionModel(scores, 4, 0, sources=sources)

    for seed in range(5):
        alone = search(model(1), 3, design, max_length=4, generator=split_seed(seed, 1))
        batch = search(model(2), 3, design, max_length=4, generator=split_seed(seed, 2))
        assert alone.tokens(0) == batch.tokens(0)


def test_pairs_are_left_out_where_a_design_has_none() -> None:
    table: dict[Prefix, list[float]] = {y: [0.4, 0.3, 0.3] for y in ((1,), (1, 1), (1, 2))}
    model = TableModel([{(): [1.0, 0, 0]}, {**table, (): [0.5, 0.5, 0]}], 0)
    beams = search(model, 2, "stratified", max_length=3, joint=True)
    assert beams.joint_log_inclusion is None
    assert beams.lengths[0].tolist() == [1, 0]


def test_a_seed_is_noted_and_split() -> None:
    by_seed = search(MODEL, 3, max_length=3, generator=5)
    assert by_seed.settings["seed"] == 5
    again = search(MODEL, 3, max_length=3, generator=split_seed(5, 1))
    assert torch.equal(by_seed.sequences, again.sequences)
    with pytest.raises(ValueError, match=r"TransformersModel\(model, \*\*inputs\)"):
        search(object(), 3, max_length=3)  # type: ignore[arg-type]


def test_a_design_that_picks_too_few_columns_is_named() -> None:
    class Narrow(TopK):
        name = "narrow"

        def select(self, *arguments: Any, **keywords: Any) -> Selection:
            found = super().select(*arguments, **keywords)
            return Selection(found.index[:, :-1], found.present[:, :-1])

    with pytest.raises(ValueError, match=r"narrow picked indices of the shape \[1, 2\]"):
        search(MODEL, 3, Narrow(), max_length=3)


@pytest.mark.parametrize("high", [1e10, 1e15, 1e20, 1e30])
def test_one_score_far_above_all_others(high: float) -> None:
    """It is found with certainty, or refused; the search never goes on for ever."""
    table = 4 * torch.randn((50, 300), generator=torch.Generator().manual_seed(0))

    def scores(prefixes: torch.Tensor) -> torch.Tensor:
        found = table[prefixes.sum(-1) % 50].clone()
        found[:, 7] += high
        return found

    model = FunctionModel(scores, 300, eos=0)
    if high <= 1e15:
        beams = search(model, 3, "conditional-poisson", max_length=6, generator=0)
        assert beams.tokens(0)[0] == [7] * 6
        assert float(beams.log_prob[0, 0]) == 0.0
    else:
        with pytest.raises(ValueError, match=r"the scores reach 1e\+\d0, beside which float64"):
            search(model, 3, "conditional-poisson", max_length=6, generator=0)
