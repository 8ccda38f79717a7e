"""The benchmark's own promises that do not depend on the clock."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import cpsbs
from benchmarks import answers
from benchmarks.conditional_poisson import memory
from cpsbs import ConditionalPoisson
from cpsbs.decisions.keys import key_named
from tests.oracles import textbook_log_normalizer


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_a_sample_of_ten_million_needs_little_memory() -> None:
    assert float(memory(20, 10**7)["copies"]) < 3  # type: ignore[arg-type]


@pytest.mark.parametrize(("n", "k"), [(10, 3), (1000, 400), (5000, 20)])
def test_the_textbook_recurrence_is_a_fair_reference(n: int, k: int) -> None:
    x = 3 * torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    textbook = textbook_log_normalizer(x, k)
    torch.testing.assert_close(
        textbook, ConditionalPoisson(x, k).log_normalizer, rtol=1e-12, atol=0
    )


@pytest.fixture(scope="module")
def asked() -> answers.Asked:
    model = cpsbs.load("en-fr", device="cpu", dtype="float32")
    return answers.Asked(model, answers.translation_questions(2), max_length=32, rows=30)


def test_there_are_sixty_questions_with_keys() -> None:
    questions = answers.short_questions()
    categories = [name for question in questions for name in question.keys]
    assert len(questions) == 60
    assert {categories.count(name) for name in categories} == {15}
    assert len({str(question.prompt) for question in questions}) == 60
    assert len(answers.short_questions(2)) == 8


@pytest.mark.parametrize("design", ["stratified", "independent", "gumbel-top-k", "arithmetic"])
def test_the_benchmark_and_the_library_see_the_same_answers(
    asked: answers.Asked, design: str
) -> None:
    numbers, beams = next(asked.beams(5, design, 0.5, repeats=2, seed=3))
    found = asked.answers(beams, numbers)
    normalize = design == "gumbel-top-k"
    for name, key in asked.questions[0].keys.items():
        theirs = cpsbs.answers(beams, key, decode=asked.model.decode, normalize=normalize)
        for b, own in enumerate(theirs):
            ours = answers.distribution(answers.weights(beams, b), found[b][name])
            assert ours == pytest.approx({a.answer: a.probability for a in own.answers})


def test_beam_search_is_weighted_by_probabilities_that_sum_to_one(asked: answers.Asked) -> None:
    _, beams = next(asked.beams(5, "top-k", 0.5, repeats=1, seed=0))
    weights = answers.weights(beams, 0)
    p = list(answers.probabilities(beams, 0).values())
    assert sum(weights) == pytest.approx(1)
    assert weights == pytest.approx([x / sum(p) for x in p])


def test_slices_do_not_change_a_draw(asked: answers.Asked) -> None:
    whole = answers.Asked(asked.model, asked.questions, asked.max_length, rows=1000)
    ((numbers, once),) = whole.beams(5, "stratified", 0.5, repeats=5, seed=1)
    slices = list(asked.beams(5, "stratified", 0.5, repeats=5, seed=1))
    assert len(slices) == 2
    assert [q for own, _ in slices for q in own] == numbers
    tokens = [beams.tokens(b) for _, beams in slices for b in range(len(beams))]
    assert tokens == [once.tokens(b) for b in range(len(once))]


def test_a_benchmark_of_answers_goes_on_where_it_stopped(
    asked: answers.Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "TRUTH_K", 20)
    monkeypatch.setattr(answers, "TRUTH_SEEDS", 2)
    monkeypatch.setattr(answers, "SIZES", (10,))
    file = tmp_path / "answers.json"
    cells = 0

    def run(stop: int) -> dict[str, Any]:
        nonlocal cells
        results = answers.read(file)

        def keep() -> None:
            nonlocal cells
            cells += 1
            file.write_text(answers.as_json(results), encoding="utf-8")
            if cells == stop:
                raise KeyboardInterrupt

        answers.measure("translation", asked, results, 3, keep)
        return answers.read(file)

    with pytest.raises(KeyboardInterrupt):
        run(stop=3)
    kept = json.loads(file.read_text(encoding="utf-8"))["translation"]
    assert len(kept) == 4  # two cells, two categories each; the truth came first
    results = run(stop=0)
    assert results["translation"][:4] == kept
    assert cells == 1 + len(answers.DESIGNS)
    run(stop=0)
    assert cells == 1 + len(answers.DESIGNS)
    tables = answers.tables(results)
    assert [row["answers"] for row in tables["answers"]] == ["its first word", "whole translation"]
    assert len(tables["answer_entropy"]) == 2


def test_the_truth_is_the_same_from_a_file() -> None:
    answered = {"number": [(2.123456789012, 0.5, 0.1), (None, 0.25, 0.0), (3, 0.125, 0.0)]}
    truth = answers.Truth(answered, {"number": (0.5, 0.0)}, 0.75, 7, [(1.5, 0.25)])
    assert answers.Truth.from_json(json.loads(json.dumps(truth.to_json()))) == truth


def test_error_bars_are_measured_for_every_function(
    asked: answers.Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "TRUTH_K", 20)
    true = answers.truths(asked, 0.5)
    rows = answers.bars(asked, true, 0.5, 5, 4)
    assert [row["f"] for row in rows] == list(answers.FUNCTIONS)
    assert all(0 <= row["coverage"] <= 1 for row in rows)
    assert all(value >= 0 for value, _ in true[0].functions)


def test_independent_samples_are_as_good_as_themselves() -> None:
    plain = {"rmse": 0.1, "entropy": 0.5, "entropy_bias": 0.3}
    assert answers.samples_needed(10, plain, plain) == pytest.approx(10)
    assert answers.samples_needed_for_entropy(10, plain, plain) == pytest.approx(10)
    half = {"rmse": 0.05, "entropy": 0.25}
    assert answers.samples_needed(10, plain, half) == pytest.approx(40)
    # The mean square error at n samples is v (K/n) + b² (K/n)², here 0.16 x + 0.09 x².
    n = answers.samples_needed_for_entropy(10, plain, half)
    x = 10 / n
    assert 0.16 * x + 0.09 * x * x == pytest.approx(0.25**2)
    assert math.isinf(answers.samples_needed(10, plain, {"rmse": 0.0}))


def test_a_missing_chat_model_is_a_reason_to_skip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--json", str(tmp_path / "x.json"), "--device", "cpu", "--task", "short"]
    monkeypatch.setattr(sys, "argv", ["answers", *given, "--model", str(tmp_path / "none")])
    answers.main()
    assert "short: skipped, because there is no" in capsys.readouterr().out


def test_the_first_word_is_found() -> None:
    key = answers.translation_questions(1)[0].keys["its first word"]
    assert key("« L'eau est froide. »") == "L"
    assert key("Un homme") == "Un"
    assert key_named("choice:Yes,No")("Yes, it is.") == "Yes"
