"""The mean over sources, and its error.

Coverage tests count intervals of 200 independent corpora. If 95% cover, fewer than 178 of 200 do
with a chance of 1e-4 (3.9 standard deviations), which is the false-alarm rate of each test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch

from cpsbs import Estimate, TableModel, estimate, search

LENGTH, SOURCES, CORPORA = 3, 20, 200
CORPUS = TableModel.random(vocab_size=5, length=LENGTH, sources=SOURCES, seed=11)
LEAST = round(CORPORA * 0.95 - 3.9 * math.sqrt(CORPORA * 0.95 * 0.05))
MOST = round(CORPORA * 0.95 + 3.9 * math.sqrt(CORPORA * 0.95 * 0.05))


def f(y: Sequence[int]) -> float:
    return 1.0 + sum((i + 1) * token**2 for i, token in enumerate(y)) / 7


def at_temperature(p: Sequence[float], temperature: float) -> list[float]:
    powers = [x ** (1 / temperature) for x in p]
    return [x / sum(powers) for x in powers]


@cache
def truth(temperature: float, g: Callable[[Sequence[int]], float] = f) -> float:
    """Return the exact mean over the corpus."""
    tables = [
        {y: at_temperature(row, temperature) for y, row in table.items()} for table in CORPUS.tables
    ]
    cooled = TableModel(tables, 0)
    each = (cooled.sequences(LENGTH, b) for b in range(SOURCES))
    return sum(sum(p * g(y) for y, p in known.items()) for known in each) / SOURCES


def means(design: str, k: int, temperature: float = 1.0, **more: bool) -> list[Estimate]:
    """Return the means of many independent searches of the corpus."""
    model = TableModel(CORPUS.tables * CORPORA, 0)
    generator = torch.Generator().manual_seed(k)
    beams = search(
        model, k, design, max_length=LENGTH, temperature=temperature, generator=generator, **more
    )
    starts = range(0, SOURCES * CORPORA, SOURCES)
    return [estimate(beams[b : b + SOURCES], f).mean() for b in starts]


def covered(found: Sequence[Estimate], exact: float) -> int:
    ends = [mean.interval(0.95) for mean in found]
    return sum(float(low) <= exact <= float(high) for low, high in ends)


def made(variance: list[float] | None, freedom: list[float], exact: list[bool]) -> Estimate:
    """Return an estimate with the values 1, 2, … and these variances."""
    count = len(freedom)
    ones = torch.ones(count)
    return Estimate(
        value=torch.arange(1.0, count + 1, dtype=torch.float64),
        variance=None if variance is None else torch.tensor(variance, dtype=torch.float64),
        freedom=torch.tensor(freedom),
        exact=torch.tensor(exact),
        distinct=3 * ones.long(),
        effective_size=2 * ones,
        captured=0.5 * ones,
        sum_of_weights=ones,
        function="f",
        estimator="unbiased weights",
        repeats=1,
        settings={"design": "some", "k": 3, "seed": 7, "model": "table"},
    )


# ------------------------------------------------------------------------------------- arithmetic


def test_the_mean_of_independent_estimates_has_the_sum_of_their_variances() -> None:
    mean = made([4.0, 1.0, 1.0, 3.0], [math.inf] * 4, [False] * 4).mean()
    assert mean.value.tolist() == [2.5]
    assert mean.standard_error is not None
    assert mean.standard_error.tolist() == [math.sqrt(4 + 1 + 1 + 3) / 4]
    assert mean.freedom.tolist() == [math.inf]
    assert (mean.mean_of, mean.errors_known) == (4, 4)
    assert mean.distinct.tolist() == [12]
    assert mean.effective_size.tolist() == [8]
    assert mean.captured.tolist() == [0.5]
    line = "mean E[f] over 4 sources = 2.50 ± 0.75 (some, K=3, unbiased weights, 12 distinct, "
    assert str(mean).startswith(line)
    assert str(mean).endswith("seed 7, model table)")
    assert "error from" not in str(mean)


def test_a_source_whose_error_is_not_known_is_taken_for_an_average_one() -> None:
    mean = made([4.0, math.nan, 2.0, 0.0], [math.inf] * 4, [False, False, False, True]).mean()
    assert mean.value.tolist() == [2.5]
    assert mean.variance is not None
    # The exact one is known not to be like the one that is not known.
    assert mean.variance.tolist() == [(4 + 3 + 2 + 0) / 16]
    assert (mean.mean_of, mean.errors_known) == (4, 3)
    assert "error from 3 of 4 sources" in str(mean)
    (entry,) = mean.to_dicts()
    assert (entry["mean_of"], entry["errors_known"]) == (4, 3)
    assert entry["standard_error"] == 0.75
    assert entry["exact"] is False


@pytest.mark.parametrize("variance", [None, [math.nan] * 3, [math.nan, math.nan, 0.0]])
def test_if_no_error_is_known_that_of_the_mean_is_not(variance: list[float] | None) -> None:
    mean = made(variance, [math.inf] * 3, [False, False, variance == [math.nan, math.nan, 0.0]])
    assert mean.mean().variance is None
    assert mean.mean().value.tolist() == [2.0]
    assert "error not known" in str(mean.mean())
    assert mean.mean().to_dicts()[0]["standard_error"] is None


def test_unbiased_variances_that_came_out_negative_are_added_as_they_are() -> None:
    mean = made([4.0, -1.0, 3.0], [math.inf] * 3, [False] * 3).mean()
    assert mean.variance is not None
    assert mean.variance.tolist() == [6 / 9]
    assert mean.errors_known == 3
    negative = made([1.0, -2.0], [math.inf] * 2, [False] * 2).mean()
    assert "error not known" in str(negative)


def test_degrees_of_freedom_are_those_of_welch_and_satterthwaite() -> None:
    assert made([1.0] * 5, [4.0] * 5, [False] * 5).mean().freedom.tolist() == [20.0]
    mean = made([3.0, 1.0, math.nan], [2.0, 4.0, 9.0], [False] * 3).mean()
    assert mean.freedom.tolist() == pytest.approx([16 / (9 / 2 + 1 / 4)])
    mixed = made([1.0, 1.0], [3.0, math.inf], [False] * 2).mean()
    assert mixed.freedom.tolist() == [12.0]


def test_the_mean_of_one_source_is_itself() -> None:
    one = made([4.0], [2.0], [False])
    assert one.mean() is one
    several = made([4.0, 4.0], [2.0] * 2, [False] * 2).mean()
    assert several.mean() is several


# ------------------------------------------------------------------------------- against the truth


def test_the_mean_of_everything_is_exact() -> None:
    result = estimate(search(CORPUS, 200, max_length=LENGTH), f).mean()
    assert float(result.value[0]) == pytest.approx(truth(1.0), rel=1e-12)
    assert result.exact.tolist() == [True]
    assert str(result).startswith(f"mean E[f] over {SOURCES} sources = ")
    assert " exactly (" in str(result)


def test_intervals_of_independent_samples_cover() -> None:
    assert LEAST <= covered(means("independent", 8), truth(1.0)) <= MOST


def test_intervals_of_stratified_samples_cover() -> None:
    """Their errors are on the safe side."""
    assert covered(means("stratified", 8), truth(1.0)) >= LEAST


def test_intervals_cover_where_some_errors_are_not_known() -> None:
    """At a low temperature the samples of many sources agree, and tell no error."""
    found = means("independent", 8, 0.3)
    known = [mean.errors_known for mean in found]
    assert 0 < min(known) <= max(known) < SOURCES
    assert covered(found, truth(0.3)) >= LEAST


def test_repeated_beams_of_any_design_have_a_mean_that_covers() -> None:
    hits = 0
    model = TableModel(CORPUS.tables * CORPORA, 0)
    beams = [
        search(
            model,
            3,
            "arithmetic",
            max_length=LENGTH,
            generator=torch.Generator().manual_seed(r),
        )
        for r in range(3)
    ]
    for b in range(0, SOURCES * CORPORA, SOURCES):
        mean = estimate([x[b : b + SOURCES] for x in beams], f).mean()
        assert mean.repeats == 3
        low, high = mean.interval()
        hits += float(low) <= truth(1.0) <= float(high)
    assert hits >= LEAST


def test_vectors_have_a_mean_too() -> None:
    beams = search(CORPUS, 6, "stratified", max_length=LENGTH, generator=0)
    both = estimate(beams, lambda y: [f(y), len(y)]).mean()
    assert both.value.shape == (1, 2)
    assert both.standard_error is not None
    for i, g in enumerate((f, len)):
        single = estimate(beams, g).mean()
        assert float(both.value[0, i]) == pytest.approx(float(single.value[0]))
        assert single.standard_error is not None
        if single.errors_known == both.errors_known:
            assert float(both.standard_error[0, i]) == pytest.approx(float(single.standard_error))
    low, high = both.interval()
    for i, g in enumerate((f, len)):
        assert float(low[0, i]) - 0.2 < truth(1.0, g) < float(high[0, i]) + 0.2
    assert str(both).startswith(f"mean E[<lambda>] over {SOURCES} sources = [")


def test_an_estimate_can_be_written_down_and_read_again() -> None:
    """Source by source, also from several estimates; negative variances and vectors included."""
    beams = search(CORPUS, 3, "conditional-poisson", max_length=LENGTH, generator=0, joint=True)
    for g in (f, lambda y: [f(y), len(y)]):
        whole = estimate(beams, g)
        halves = [estimate(beams[:8], g), estimate(beams[8:], g)]
        assert whole.variance is not None
        assert bool((whole.variance < 0).any())
        again = Estimate.from_dicts(entry for half in halves for entry in half.to_dicts())
        torch.testing.assert_close(again.value, whole.value)
        torch.testing.assert_close(again.variance, whole.variance, equal_nan=True)
        assert again.freedom.tolist() == whole.freedom.tolist()
        assert str(again.mean()) == str(whole.mean())
    unknown = estimate(beams, f, log_inclusion=beams.log_inclusion)
    assert Estimate.from_dicts(unknown.to_dicts()).variance is None
    with pytest.raises(ValueError, match="entries is empty"):
        Estimate.from_dicts([])


def test_estimates_of_several_batches_are_joined() -> None:
    """As if all sources had been estimated at once, also where an error or a bound is missing."""

    def part(values: list[float], variance: float | None, bounds: list[float] | None) -> Estimate:
        shared = {"function": "f", "exact": False, "degrees_of_freedom": None, "distinct": 2}
        shared |= {"effective_size": 2.0, "captured": 0.5, "sum_of_weights": 1.0}
        shared |= {"estimator": "unbiased", "repeats": 1, "settings": {}}
        return Estimate.from_dicts(
            {**shared, "value": value, "variance": variance, "bounds": bounds} for value in values
        )

    parts = [part([1.0, 2.0], 0.25, [0.0, 3.0]), part([4.0], None, [1.0, 9.0])]
    joined = Estimate.joined(parts)
    expected = Estimate.from_dicts(entry for own in parts for entry in own.to_dicts())
    assert joined.mean().to_dicts() == expected.mean().to_dicts()
    assert joined.mean().errors_known == 2
    assert joined.bounds is not None
    assert Estimate.joined([parts[1], part([1.0], None, None)]).bounds is None
    assert Estimate.joined([parts[1], part([1.0], None, None)]).variance is None
    with pytest.raises(ValueError, match="estimates is empty"):
        Estimate.joined([])
