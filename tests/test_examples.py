"""The examples run, and what they print is right."""

from __future__ import annotations

import math
import re
import runpy
from pathlib import Path

import pytest

import cpsbs
from cpsbs import keys
from cpsbs.decisions.keys import Key
from examples.polygraph import answer_stats, polygraph_inputs, semantic_entropy

EXAMPLES = Path(__file__).parent.parent / "examples"
NUMBERS = re.compile(
    r"E\[.*?\](?: over \d+ sources)? = (\S+) ± ([\d.e-]+),? .*?"
    r"(?:\nexactly (\S+))?(?=\n\n|\nE|\n?\Z)",
    re.DOTALL,
)


def printed(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["own_design", "own_function"])
def test_estimates_are_near_what_is_exact(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(name, capsys)
    known = [found for found in NUMBERS.findall(out) if found[2]]
    assert len(known) == out.count("exactly") > 0
    for value, error, exact in known:
        assert abs(float(value) - float(exact)) < 4 * float(error)


def test_a_model_of_ones_own_spells_words(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed("own_model", capsys).splitlines()
    spelled = [line.split()[1].rstrip("$") for line in lines[:-1]]
    assert len(set(spelled)) == len(spelled) == 8
    assert lines[-1].startswith("E[length] = ")
    assert " ± " in lines[-1]


def test_the_design_by_itself_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed("inclusion", capsys)
    assert "Sum of π: 3.000000000000." in out


def beams_and_key(design: str) -> tuple[cpsbs.Beams, Key, cpsbs.TextModel]:
    model = cpsbs.load("en-fr", device="cpu")
    sources = ["The room was too warm.", "Is this seat free?"]
    beams = model.beams(sources, 10, design, temperature=0.7, seed=0)
    return beams, keys.choice(["pièce", "chambre", "place", "siège"]), model


@pytest.mark.parametrize("design", ["stratified", "independent", "gumbel-top-k"])
def test_weights_make_a_semantic_entropy_that_of_the_answers(design: str) -> None:
    """By lm-polygraph's formula, as the example states it."""
    beams, key, model = beams_and_key(design)
    given = polygraph_inputs(beams, key, model.decode)
    for b, own in enumerate(cpsbs.answers(beams, key, decode=model.decode, normalize=True)):
        members, to_class = given.class_to_sample[b], given.sample_to_class[b]
        assert sorted(j for each in members for j in each) == list(range(len(given.texts[b])))
        log_p = [math.log(sum(math.exp(given.log_likelihoods[b][j]) for j in m)) for m in members]
        weights = given.log_weights[b]
        terms = [math.exp(v) * log_p[to_class[j]] for j, v in enumerate(weights)]
        assert -sum(terms) / len(terms) == pytest.approx(own.entropy, abs=1e-9)
        for i, answer in enumerate(own.answers):
            assert math.exp(log_p[i]) == pytest.approx(answer.probability)
            assert {key(given.texts[b][j]) for j in members[i]} == {answer.answer}


def test_beams_without_weights_have_no_semantic_entropy() -> None:
    beams, key, model = beams_and_key("top-k")
    with pytest.raises(ValueError, match="has no weights"):
        polygraph_inputs(beams, key, model.decode)


@pytest.mark.filterwarnings("default")  # those of its many imports are not ours
@pytest.mark.parametrize("design", ["stratified", "independent", "gumbel-top-k"])
def test_lm_polygraph_finds_the_same_entropy(design: str) -> None:
    estimators = pytest.importorskip("lm_polygraph.estimators", reason="lm-polygraph is missing")
    beams, key, model = beams_and_key(design)
    found = cpsbs.answers(beams, key, decode=model.decode)
    ours = [own.entropy for own in found]
    by_samples = semantic_entropy(polygraph_inputs(beams, key, model.decode))
    assert by_samples == pytest.approx(ours, abs=1e-9)
    direct = estimators.SemanticEntropy(entropy_estimation="direct")
    assert list(direct(answer_stats(found))) == pytest.approx(ours, abs=1e-9)


def test_the_example_for_lm_polygraph_runs(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split(": ")[-1].split() for line in printed("polygraph", capsys).splitlines()]
    assert lines[0] == lines[1] or lines[1][-1] == "installed"
