"""``cpsbs answers``: tables for people, records for machines, files that can be resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import cpsbs
from cpsbs import keys
from cpsbs.cli.answers import answer_table
from cpsbs.text import demonstration
from tests.cli.test_commands import records, run

TEXTS = [text for text, _ in demonstration()[:2]]


def test_records_are_those_of_the_library() -> None:
    result = run("answers", *TEXTS, "-k", "4", "--key", r"regex:^(\w+)", "--seed", "3")
    assert result.exit_code == 0, result.output
    model = cpsbs.load("en-fr")
    beams = model.beams(TEXTS, 4, seed=3)
    expected = cpsbs.answers(beams, keys.pattern(r"^(\w+)"), decode=model.decode).to_dicts()
    for record, entry, text in zip(records(result.stdout), expected, TEXTS, strict=True):
        assert record["text"] == text
        assert record["entropy"] == pytest.approx(entry["entropy"])
        assert [a["answer"] for a in record["answers"]] == [a["answer"] for a in entry["answers"]]


def table(record: dict[str, Any]) -> str:
    console = Console(width=100, record=True, force_terminal=False)
    console.print(answer_table(record))
    return console.export_text()


def test_the_table_shows_bars_and_bounds() -> None:
    result = run("answers", TEXTS[0], "-k", "6", "--temperature", "0.3", "--key", "text")
    (record,) = records(result.stdout)
    shown = table(record)
    assert "█" in shown or "#" in shown
    assert "certainly" in shown
    assert record["answers"][0]["answer"] in " ".join(shown.split())
    beams = run("answers", TEXTS[0], "-k", "2", "--design", "top-k")
    assert "█" not in table(records(beams.stdout)[0])


def test_a_file_is_complete_and_recognised(tmp_path: Path) -> None:
    for name in ("out.jsonl", "out.parquet"):
        out = tmp_path / name
        arguments: list[str | Path] = ["answers", *TEXTS, "-k", "3", "--key", "number", "-o", out]
        first = run(*arguments)
        assert first.exit_code == 0, first.output
        again = run(*arguments)
        assert "already complete" in again.output
        other = run(*arguments[:-3], "text", "-o", out)
        assert other.exit_code == 1
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["number"] for line in lines] == [0, 1]


@pytest.mark.parametrize("key", ["nothing", "regex:(", "json:", "meaning:x"])
def test_an_unknown_key_is_refused_before_a_model_is_loaded(key: str) -> None:
    result = run("answers", "Hello.", "--key", key, "-m", "no/such/model")
    assert result.exit_code == 1
    assert "key" in result.output or "expression" in result.output


def test_until_the_answers_are_known() -> None:
    arguments = ("answers", TEXTS[0], "-k", "5", "--temperature", "0.3")
    (once,) = records(run(*arguments).stdout)
    (more,) = records(run(*arguments, "--until-mass", "0.97", "--most", "60").stdout)
    assert more["unseen"] < once["unseen"]
    assert more["settings"]["rounds"] > 1
    assert sum(a["probability"] for a in more["answers"]) == pytest.approx(1, abs=1e-4)
