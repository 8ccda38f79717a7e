"""``cpsbs sample --until-mass``: rounds on the command line, resumable like the rest."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from typer.testing import CliRunner, Result

import cpsbs
from cpsbs.cli import batches
from cpsbs.cli.commands import app
from cpsbs.text import TextModel


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_rounds_go_on_until_the_mass_is_captured() -> None:
    texts = ["The dog is red.", "The room was too warm."]
    result = run(
        *("sample", *texts, "-k", "4", "--until-mass", "0.9", "--temperature", "0.5"),
        *("--most", "20", "--seed", "3"),
    )
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in result.stdout.splitlines()]
    beams = cpsbs.load("en-fr").until(texts, 0.9, 4, most=20, seed=3, temperature=0.5)
    for b, record in enumerate(found):
        assert record["sequences"] == beams.tokens(b)
        assert math.fsum(map(math.exp, record["log_prob"])) >= 0.9
        assert math.fsum(map(math.exp, record["log_weight"])) == pytest.approx(1, abs=1e-5)
    assert found[0]["settings"]["mass"] == 0.9


def test_what_makes_no_sense_is_refused_before_a_model_is_loaded() -> None:
    for options, message in (
        (["--most", "5"], "--most is 5, which needs --until-mass"),
        (["--until-mass", "1.5"], "--until-mass is 1.5; it must be above 0 and at most 1"),
        (["--until-mass", "0.5", "--design", "independent"], "may draw a sequence twice"),
    ):
        result = run("sample", "A dog.", *options, "--model", "no such model")
        assert result.exit_code == 1
        assert message in " ".join(result.stderr.split())


def test_a_stopped_command_goes_on(causal: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("the dog\nthe cat sees\na dog\n")
    arguments = [
        *("sample", "-f", str(tmp_path / "texts"), "-m", str(causal), "-k", "3"),
        *("--until-mass", "0.2", "--most", "9", "--max-length", "4", "--batch-size", "1"),
    ]
    assert run(*arguments, "-o", tmp_path / "whole.jsonl").exit_code == 0
    until, calls = TextModel.until, list[int]()

    def stops(self: TextModel, *given: object, **options: object) -> cpsbs.Beams:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return until(self, *given, **options)  # type: ignore[arg-type]

    with patch.object(TextModel, "until", stops):
        assert run(*arguments, "-o", tmp_path / "part.jsonl").exit_code == 130
    resumed = run(*arguments, "-o", tmp_path / "part.jsonl")
    assert resumed.exit_code == 0
    assert "2 of 3 are done" in resumed.stderr
    assert (tmp_path / "part.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    other = run(*arguments, "--most", "8", "-o", tmp_path / "part.jsonl")
    assert other.exit_code == 1  # another limit is another job


def test_the_progress_bar_shows_the_captured_mass() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    with patch("sys.stderr", Terminal()) as told, batches.progress_bar(wanted=True) as bar:
        task = bar.add_task("", total=2, note="")
        note = batches.Note()
        note.captured(torch.ones(1))  # nothing to show it on yet
        note.show = lambda words: bar.update(task, note=words)
        note.captured(torch.tensor([0.5, 0.75]))
        bar.refresh()
    assert "captured 0.625" in told.getvalue()
