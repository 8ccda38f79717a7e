"""The JSON that feeds the page says what ``Beams`` says."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest

import cpsbs
from cpsbs import DESIGNS
from cpsbs.explore.explorer import Cancelled, Explorer, together
from cpsbs.explore.record import ITSELF
from cpsbs.explore.scene import Scene

SCENE = Scene("the dog", k=6, max_length=5)


def drawn(explorer: Explorer, design: str, scene: Scene = SCENE, seed: int = 1) -> Any:
    document = explorer.document(scene)
    explorer.draw(document, design, seed)
    return json.loads(json.dumps(document.as_record(), allow_nan=False))


def kept_prefixes(run: Any) -> list[list[tuple[int, ...]]]:
    """The prefixes that a run kept at every step, by following the parents."""
    steps, before = [], [tuple[int, ...]()]
    for step in run["steps"]:
        grown = []
        for parent, token in zip(step["parent"], step["token"], strict=True):
            grown.append(before[parent] if token == ITSELF else (*before[parent], token))
        steps.append(grown)
        before = grown
    return steps


@pytest.mark.parametrize("design", DESIGNS)
def test_a_run_has_the_sequences_probabilities_and_weights_of_the_beam(
    explorer: Explorer, design: str
) -> None:
    record = drawn(explorer, design)
    (run,) = record["runs"]
    beams = explorer.model.beams([SCENE.text], SCENE.k, design, max_length=SCENE.max_length, seed=1)
    copies = Counter(map(tuple, beams.tokens(0)))
    found = {tuple(record["outputs"][y]["tokens"]): i for i, y in enumerate(run["y"])}
    assert found.keys() == copies.keys()
    texts = dict(zip(map(tuple, beams.tokens(0)), explorer.model.texts(beams)[0], strict=True))
    for place, tokens in enumerate(map(tuple, beams.tokens(0))):
        i = found[tokens]
        output = record["outputs"][run["y"][i]]
        assert run["count"][i] == copies[tokens]
        assert output["log_p"] == pytest.approx(float(beams.log_prob[0, place]), rel=1e-5)
        assert output["finished"] == bool(beams.finished[0, place])
        assert output["text"] == texts[tokens]
        if beams.log_weight is None:
            assert run["w"][i] is None
        else:
            weight = copies[tokens] * math.exp(float(beams.log_weight[0, place]))
            assert run["w"][i] == pytest.approx(weight, rel=1e-5)
        if beams.log_inclusion is not None:
            pi = math.exp(float(beams.log_inclusion[0, place]))
            assert run["pi"][i] == pytest.approx(pi, rel=1e-5)
    assert run["estimate"]["captured"] == pytest.approx(
        sum(math.exp(record["outputs"][y]["log_p"]) for y in run["y"]), rel=1e-5
    )


@pytest.mark.parametrize("design", DESIGNS)
def test_the_steps_lead_to_the_sequences_and_account_for_all_probability(
    explorer: Explorer, design: str
) -> None:
    record = drawn(explorer, design)
    (run,) = record["runs"]
    steps = kept_prefixes(run)
    outputs = {tuple(record["outputs"][y]["tokens"]) for y in run["y"]}
    assert set(steps[-1]) == outputs
    mass = 1.0
    for step, prefixes in zip(run["steps"], steps, strict=True):
        assert len(set(prefixes)) == len(prefixes)
        assert not {*step["lost"]["token"]} & {None}
        kept = math.fsum(map(math.exp, step["log_p"]))
        lost = math.fsum(map(math.exp, step["lost"]["log_p"]))
        rest = math.fsum(math.exp(x) for x in step["log_rest"] if x is not None)
        assert kept + lost + rest == pytest.approx(mass, rel=1e-5)
        taken = set(zip(step["parent"], step["token"], strict=True))
        assert not taken & set(zip(step["lost"]["parent"], step["lost"]["token"], strict=True))
        assert sum(step["count"]) <= SCENE.k
        mass = kept


@pytest.mark.parametrize("design", ["stratified", "conditional-poisson", "calibrated"])
def test_the_product_of_the_steps_is_the_inclusion_probability(
    explorer: Explorer, design: str
) -> None:
    record = drawn(explorer, design)
    (run,) = record["runs"]
    product: dict[tuple[int, ...], float] = {(): 1.0}
    for step, prefixes in zip(run["steps"], kept_prefixes(run), strict=True):
        before = list(product)
        product = {
            prefix: product[before[parent]] * pi
            for prefix, parent, pi in zip(prefixes, step["parent"], step["pi"], strict=True)
        }
    for i, y in enumerate(run["y"]):
        assert product[tuple(record["outputs"][y]["tokens"])] == pytest.approx(
            run["pi"][i], rel=1e-5
        )


def test_copies_are_one_node_with_an_expected_number(explorer: Explorer) -> None:
    record = drawn(explorer, "independent", Scene("the dog", k=30, max_length=3))
    (run,) = record["runs"]
    first = run["steps"][0]
    assert sum(first["count"]) == 30
    assert len(first["token"]) < 30
    for log_p, pi in zip(first["log_p"], first["pi"], strict=True):
        assert pi == pytest.approx(30 * math.exp(log_p), rel=1e-5)
    for i, y in enumerate(run["y"]):
        assert run["pi"][i] == pytest.approx(30 * math.exp(record["outputs"][y]["log_p"]), rel=1e-5)
        assert run["w"][i] == pytest.approx(run["count"][i] / 30, rel=1e-5)


@pytest.mark.parametrize("design", ["stratified", "gumbel-top-k", "independent"])
def test_many_seeds_give_the_beams_of_single_ones(explorer: Explorer, design: str) -> None:
    several = explorer.document(SCENE)
    explorer.redraw(several, design, [5, 1, 7])
    together_record = several.as_record()
    for number, seed in enumerate([5, 1, 7]):
        alone = drawn(explorer, design, seed=seed)
        run, same = together_record["runs"][number], alone["runs"][0]
        assert run["seed"] == seed
        assert run["steps"] is None
        ours = [together_record["outputs"][y]["tokens"] for y in run["y"]]
        assert ours == [alone["outputs"][y]["tokens"] for y in same["y"]]
        assert run["w"] == pytest.approx(same["w"], rel=1e-4)
        assert run["estimate"]["value"] == pytest.approx(same["estimate"]["value"], rel=1e-4)


def test_a_branch_has_the_probabilities_of_whole_sequences(explorer: Explorer) -> None:
    scene = Scene("the dog", k=8, max_length=4, temperature=0.8)
    whole = explorer.document(scene)
    explorer.draw(whole, "top-k", 0)
    best = whole.as_record()["outputs"][0]
    prefix = best["tokens"][:2]
    below = explorer.document(scene)
    explorer.draw(below, "top-k", 0, prefix=prefix)
    record = below.as_record()
    (run,) = record["runs"]
    assert run["prefix"] == prefix
    assert run["estimate"] is None
    assert all(output["tokens"][:2] == prefix for output in record["outputs"])
    same = next(o for o in record["outputs"] if o["tokens"] == best["tokens"])
    assert same["log_p"] == pytest.approx(best["log_p"], rel=1e-4)
    assert same["f"] == pytest.approx(best["f"], rel=1e-4)
    kept = math.fsum(map(math.exp, run["steps"][0]["log_p"]))
    lost = math.fsum(map(math.exp, run["steps"][0]["lost"]["log_p"]))
    rest = math.fsum(math.exp(x) for x in run["steps"][0]["log_rest"] if x is not None)
    assert kept + lost + rest == pytest.approx(math.exp(run["log_prefix"]), rel=1e-4)


def test_weights_of_a_branch_are_those_of_whole_sequences(explorer: Explorer) -> None:
    """Here w = p/π, and all weights together stand for the probability of the prefix."""
    below = explorer.document(SCENE)
    explorer.draw(below, "stratified", 0, prefix=[3, 4])
    record = below.as_record()
    (run,) = record["runs"]
    for y, pi, w in zip(run["y"], run["pi"], run["w"], strict=True):
        assert w * pi == pytest.approx(math.exp(record["outputs"][y]["log_p"]), rel=1e-4)
    assert math.fsum(run["w"]) == pytest.approx(math.exp(run["log_prefix"]), rel=1e-4)


def test_the_exact_value_is_that_of_enumeration(explorer: Explorer) -> None:
    """With two tokens there are fewer sequences than are drawn, so that nothing is left."""
    scene = Scene("the dog", k=4, max_length=2, function="length")
    document = explorer.document(scene)
    explorer.exact(document)
    exact = document.as_record()["exact"]
    everything = explorer.model.beams(["the dog"], 500, "top-k", max_length=2)
    p = everything.log_prob[0].exp()
    value = float((p * everything.lengths[0]).sum())
    assert exact["captured"] == pytest.approx(1, abs=1e-5)
    assert exact["low"] == pytest.approx(value, rel=1e-4)
    assert exact["high"] == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize(
    ("function", "argument", "values"),
    [
        ("length", "", lambda o: len(o["tokens"])),
        ("entropy", "", lambda o: -o["log_p"]),
        ("contains", "dog", lambda o: float("dog" in o["text"])),
        ("bleu", "the dog sees", lambda o: cpsbs.sentence_bleu(o["text"], "the dog sees")),
    ],
)
def test_f_is_what_it_is_called(
    explorer: Explorer, function: str, argument: str, values: Any
) -> None:
    record = drawn(explorer, "stratified", Scene("the dog", 6, 1.0, None, 5, function, argument))
    for output in record["outputs"]:
        assert output["f"] == pytest.approx(values(output), rel=1e-5)


def test_a_search_can_be_stopped(explorer: Explorer) -> None:
    lengths = []

    def watch(length: int) -> None:
        lengths.append(length)
        if length == 2:
            raise Cancelled

    document = explorer.document(SCENE)
    with pytest.raises(Cancelled):
        explorer.draw(document, "stratified", 0, watch=watch)
    assert lengths == [0, 1, 2]
    assert document.runs == []


def test_large_beams_are_searched_one_seed_at_a_time() -> None:
    assert together(Scene("a", k=200)) == 1
    assert together(Scene("a", k=1)) == 100


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, 'an object with a "text"'),
        ([], 'an object with a "text"'),
        ({"text": 3}, "text is 3; it must be str"),
        ({"text": "a", "k": True}, "k is True; it must be int"),
        ({"text": "a", "k": 0}, "k is 0; it must be from 1 to 200"),
        ({"text": "a", "k": 201}, "k is 201"),
        ({"text": "a", "max_length": 0}, "max_length is 0"),
        ({"text": "a" * 20_001}, "20,001 characters"),
        ({"text": "a", "function": "eval"}, "one of entropy, length"),
        ({"text": "a", "function": "bleu"}, "needs a reference"),
        ({"text": "a", "colour": "red"}, "the scene has 'colour'"),
    ],
)
def test_bad_scenes_are_refused(given: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason.replace("(", r"\(")):
        Scene.from_record(given)


def test_a_scene_is_read_as_it_was_written() -> None:
    scene = Scene("a text", 3, 0.5, 0.9, 7, "bleu", "ein Text")
    assert Scene.from_record(scene.as_record()) == scene


def test_a_text_that_the_model_cannot_take_is_refused(explorer: Explorer) -> None:
    with pytest.raises(ValueError, match="the text is empty"):
        explorer.document(Scene("  ", max_length=4))
    with pytest.raises(ValueError, match="prefix has 5 tokens"):
        explorer.draw(explorer.document(SCENE), "stratified", 0, prefix=[3] * 5)
