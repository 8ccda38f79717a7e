"""Where nothing is left out, every design says "exactly", and nowhere else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cpsbs import DESIGNS, FunctionModel, TableModel, estimate, search

ESTIMATING = [name for name, design in DESIGNS.items() if design.estimates]
DISTINCT = [name for name in ESTIMATING if DESIGNS[name].distinct]
MODEL = TableModel.random(vocab_size=2, length=3, sources=3, seed=5)
"""Three sources with four sequences each."""
CERTAIN = TableModel({(): [0.0, 1.0], (1,): [1.0, 0.0]}, eos=0)
"""A single sequence."""


def f(y: list[int]) -> float:
    return float(2 * len(y) + y[0])


def truth(source: int) -> float:
    return sum(p * f(list(y)) for y, p in MODEL.sequences(3, source).items())


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("k", [4, 7])
@pytest.mark.parametrize("design", DISTINCT)
def test_a_beam_that_holds_everything_is_exact(design: str, k: int, normalize: bool) -> None:
    beams = search(MODEL, k, design, max_length=3, generator=0)
    result = estimate(beams, f, normalize=normalize)
    assert result.exact.tolist() == [True] * 3
    assert result.standard_error is not None
    assert result.standard_error.tolist() == [0.0] * 3
    for line in str(result).splitlines():
        assert " exactly (" in line
        assert "±" not in line
        assert "not known" not in line
    for source, entry in enumerate(result.to_dicts()):
        assert entry["value"] == pytest.approx(truth(source), rel=1e-12)
        assert entry["exact"] is True
        assert entry["standard_error"] == 0.0
        assert entry["interval_95"] == [entry["value"]] * 2
        assert " exactly (" in entry["line"]


@pytest.mark.parametrize("design", ESTIMATING)
def test_the_only_sequence_is_exact(design: str) -> None:
    for beams in (
        search(CERTAIN, 3, design, max_length=2, generator=0),
        [search(CERTAIN, 3, design, max_length=2, generator=seed) for seed in range(2)],
    ):
        result = estimate(beams, lambda y: [len(y), sum(y)])
        assert str(result).startswith("E[<lambda>] = [2, 1] exactly (")
        assert result.standard_error is not None
        assert result.standard_error.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("design", ["independent", "arithmetic"])
def test_samples_with_replacement_are_not_exact_because_they_have_seen_everything(
    design: str,
) -> None:
    """Σp is 1, but the weights are counts, and the estimate has an error."""
    beams = search(MODEL, 200, design, max_length=3, generator=0)
    result = estimate(beams, f)
    assert result.captured.tolist() == pytest.approx([1.0] * 3)
    assert not bool(result.exact.any())
    assert "exactly" not in str(result)
    assert float((result.value - torch.tensor([truth(b) for b in range(3)])).abs().max()) > 1e-4


@pytest.mark.parametrize("design", ESTIMATING)
def test_a_beam_that_leaves_something_out_is_not_exact(design: str) -> None:
    for k in (1, 2, 3):
        result = estimate(search(MODEL, k, design, max_length=3, joint=True, generator=1), f)
        assert not bool(result.exact.any())
        assert "exactly" not in str(result)
        assert result.to_dicts()[0]["exact"] is False


@pytest.mark.parametrize("design", ["stratified", "conditional-poisson", "gumbel-top-k"])
@pytest.mark.parametrize("left_out", [1e-4, 1e-7])
def test_a_little_that_is_left_out_is_noticed(design: str, left_out: float) -> None:
    """Rare sequences may be all that matters, so that Σp = 1 to six digits is no proof."""
    rare = left_out / 4
    row = [1 - 10 * rare, *[rare] * 10]
    beams = search(TableModel({(): row}, eos=0), 8, design, max_length=1, generator=0, joint=True)
    result = estimate(beams, f)
    assert abs(float(result.captured[0]) - 1) < left_out
    assert not bool(result.exact[0])


@pytest.mark.parametrize("design", DISTINCT)
def test_probabilities_in_float32_may_be_exact(design: str) -> None:
    scores = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))

    def next_scores(prefix: Tensor) -> Tensor:
        return scores[prefix[:, -1] if prefix.shape[1] else torch.zeros(len(prefix)).long()]

    model = FunctionModel(next_scores, 6, eos=0)
    beams = search(model, 200, design, max_length=3, temperature=0.7, generator=0)
    assert beams.log_prob.exp().sum() != 1
    assert bool(estimate(beams, f).exact[0])


@pytest.mark.parametrize("design", ["gumbel-top-k", "stratified", "conditional-poisson"])
@pytest.mark.parametrize("normalize", [False, True])
def test_terms_that_agree_do_not_make_an_error_of_zero(design: str, normalize: bool) -> None:
    """An event that no sequence of the beam shows may have any probability that is left."""
    model = TableModel.random(6, 3, seed=2)
    beams = search(model, 5, design, max_length=3, joint=True, generator=0)
    result = estimate(beams, lambda y: 0.0, normalize=normalize)
    assert result.standard_error is not None
    assert math.isnan(float(result.standard_error[0]))
    assert "error not known" in str(result)


def test_what_is_exact_and_what_is_not_may_be_mixed() -> None:
    """A design that does not tell its error from one beam still knows where there is none."""
    tables = [*CERTAIN.tables, {(): [0.5, 0.5], (1,): [0.5, 0.5]}]
    beams = search(TableModel(tables, 0), 2, "calibrated", max_length=2, generator=0)
    result = estimate(beams, f)
    assert result.exact.tolist() == [True, False]
    assert result.standard_error is not None
    assert float(result.standard_error[0]) == 0
    assert math.isnan(float(result.standard_error[1]))
    known, unknown = str(result).splitlines()
    assert " exactly (" in known
    assert "error not known (search with joint=True)" in unknown
    assert [entry["standard_error"] for entry in result.to_dicts()] == [0.0, None]
