"""The examples that train: they learn, and their gradients are those of what they say."""

from __future__ import annotations

import lzma
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import cpsbs
from cpsbs.text import demonstration
from examples import minimum_risk, policy_gradient
from examples.adding import exact_reward, make_model, make_tokenizer, read_sums


@pytest.fixture(scope="module")
def adder() -> tuple[Any, Any]:
    tokenizer = make_tokenizer()
    return read_sums(make_model(tokenizer), tokenizer), tokenizer


def test_reading_sums_stops_in_time(adder: tuple[Any, Any]) -> None:
    assert 0.25 <= exact_reward(*adder) < 0.5


@pytest.mark.parametrize("name", policy_gradient.METHODS)
def test_rewards_rise(adder: tuple[Any, Any], name: str) -> None:
    found = policy_gradient.train(*adder, policy_gradient.METHODS[name], steps=40, every=40, k=8)
    assert found[0] == pytest.approx(exact_reward(*adder))
    assert found[1] > found[0]


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str]]:
    return demonstration()[:2]


@pytest.mark.parametrize("name", ["RLOO", "CPSBS", "stratified, cross"])
def test_steps_of_minimum_risk_raise_the_expected_bleu(
    name: str, pairs: list[tuple[str, str]]
) -> None:
    model = cpsbs.load("en-fr", device="cpu", dtype="float32")
    learner = minimum_risk.MinimumRisk(model, minimum_risk.METHODS[name], k=4, rate=1e-4, steps=9)
    before = learner.expected_reward(pairs, 100).item()
    for seed in range(3):
        learner.step(pairs, seed)
    assert learner.expected_reward(pairs, 100).item() > before
    latest = [p.detach().clone() for p in learner.parameters]
    with learner.averaged():
        moved = [not torch.equal(p, own) for p, own in zip(learner.parameters, latest, strict=True)]
        assert any(moved)
    assert all(torch.equal(p, own) for p, own in zip(learner.parameters, latest, strict=True))


def test_the_spread_is_that_of_the_gradients(pairs: list[tuple[str, str]]) -> None:
    model = cpsbs.load("en-fr", device="cpu", dtype="float32")
    learner = minimum_risk.MinimumRisk(model, minimum_risk.METHODS["RLOO"], k=4)
    every = torch.stack([learner._gradient(pairs, 10**6 + seed) for seed in range(3)])
    norm, spread = learner.gradient_spread(pairs, 3)
    assert norm == pytest.approx(float(every.double().mean(0).norm()), rel=1e-3)
    assert spread == pytest.approx(float(every.double().var(0).sum().sqrt()), rel=1e-3)


def test_the_command_trains_and_writes_what_it_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = [[pair[i] for pair in demonstration()[:6]] for i in (0, 1)]
    with lzma.open(tmp_path / "pairs.tsv.xz", "wt", encoding="utf-8") as out:
        out.writelines("\t".join(pair) + "\n" for pair in demonstration())
    files = [tmp_path / name for name in ("test.en", "test.fr")]
    for file, lines in zip(files, sides, strict=True):
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    test_set = [str(file) for file in files]
    files_of = ["--train", str(tmp_path / "pairs.tsv.xz"), "--dev", *test_set, "--test", *test_set]
    few = ["--steps", "2", "--every", "2", "--batch", "2", "--k", "4", "--draws", "2"]
    others = ["--limit", "2", "--device", "cpu", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["minimum_risk", *files_of, *few, *others])
    minimum_risk.main()
    text = (tmp_path / "out.json").read_text()
    assert '"BLEU"' in text
    assert text.count('"spread"') == 2
