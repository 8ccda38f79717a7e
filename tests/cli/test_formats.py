"""Long results, conversations and means on the command line."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import cpsbs
from cpsbs.cli import formats
from cpsbs.cli.commands import app
from cpsbs.search.export import COLUMNS
from tests.models.folders import causal_folder, with_settings

TEXTS = ["one old dog", "the cat sees", "two red house"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} and {% endfor %}the"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = causal_folder(tmp_path_factory.mktemp("model"))
    return with_settings(made, "tokenizer_config.json", chat_template=TEMPLATE)


def run(folder: Path, *arguments: str, k: int = 4) -> str:
    common = ["--model", str(folder), "-k", str(k), "--max-length", "5"]
    result = CliRunner().invoke(app, [*arguments, *common])
    assert result.exit_code == 0, result.output
    return result.stdout


def long_file(folder: Path, file: Path, *more: str) -> None:
    run(folder, "sample", *TEXTS, "--format", "long", "--output", str(file), *more)


def rows_of(lines: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.splitlines()]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[dict[str, Any]]:
    """What Python gives for the same draw."""
    model = cpsbs.load(folder)
    beams = model.beams(TEXTS, 4, max_length=5, seed=0)
    return beams.to_rows(model.texts(beams))


def same(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for row, wanted in zip(found, expected, strict=True):
        numbers = {name: wanted[name] for name in ("p", "pi", "weight")}
        # The number of threads, which differs here, changes the order in which floats are added up.
        assert {name: row[name] for name in numbers} == pytest.approx(numbers, rel=1e-5)
        others = [name for name in COLUMNS if name not in numbers]
        assert [row[name] for name in others] == [wanted[name] for name in others]


def test_a_line_for_each_sequence(folder: Path, expected: list[dict[str, Any]]) -> None:
    same(rows_of(run(folder, "sample", *TEXTS, "--format", "long")), expected)


def test_json_lines(folder: Path, tmp_path: Path, expected: list[dict[str, Any]]) -> None:
    long_file(folder, tmp_path / "long.jsonl")
    same(rows_of((tmp_path / "long.jsonl").read_text()), expected)


def test_csv(folder: Path, tmp_path: Path, expected: list[dict[str, Any]]) -> None:
    long_file(folder, tmp_path / "long.csv")
    with (tmp_path / "long.csv").open(newline="") as file:
        found = [
            {
                **row,
                **{name: int(row[name]) for name in ("source", "rank", "length")},
                **{name: float(row[name]) for name in ("p", "pi", "weight")},
                "tokens": json.loads(row["tokens"]),
                "finished": row["finished"] == "True",
            }
            for row in csv.DictReader(file)
        ]
    same(found, expected)


def test_parquet(
    folder: Path, tmp_path: Path, expected: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    for size in (formats.GROUP, 1):
        monkeypatch.setattr(formats, "GROUP", size)
        file = tmp_path / f"{size}.parquet"
        long_file(folder, file)
        same(parquet.read_table(file).to_pylist(), expected)


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_a_complete_file_is_recognised(folder: Path, tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"long.{ending}"
    long_file(folder, file)
    before = file.read_bytes()
    long_file(folder, file)
    assert file.read_bytes() == before
    if ending == "parquet":
        file.write_bytes(before[: len(before) // 2])
    else:
        kept = before.splitlines(keepends=True)
        file.write_bytes(b"".join(kept[:2] + kept[3:]))
    arguments = ["sample", *TEXTS, "--format", "long", "--output", str(file), "-k", "4"]
    result = CliRunner().invoke(app, [*arguments, "-m", str(folder), "--max-length", "5"])
    assert result.exit_code == 1
    assert "is not what this command writes" in " ".join(result.stderr.split())


def test_csv_needs_long_rows(folder: Path, tmp_path: Path) -> None:
    arguments = ["sample", "one", "--output", str(tmp_path / "x.csv"), "--model", str(folder)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "--format long" in result.stderr


def test_a_reference_adds_a_column(folder: Path, tmp_path: Path) -> None:
    found = rows_of(run(folder, "sample", "one", "--reference", "dog", "--format", "long"))
    assert all(0 <= row["bleu"] <= 1 for row in found)


def test_chat(folder: Path) -> None:
    """A text is a user's message, and a JSON list a conversation."""
    messages = [{"role": "user", "content": "one dog"}, {"role": "user", "content": "red cat"}]
    plain = rows_of(run(folder, "sample", "one dog and the", "one dog and red cat and the"))
    chat = rows_of(run(folder, "sample", "--chat", "one dog", json.dumps(messages)))
    assert [record["texts"] for record in chat] == [record["texts"] for record in plain]
    assert chat[0]["text"] == "one dog"
    wrapped = rows_of(run(folder, "sample", "--chat", json.dumps({"messages": messages})))
    alone = rows_of(run(folder, "sample", "one dog and red cat and the"))
    assert wrapped[0]["texts"] == alone[0]["texts"]
    result = CliRunner().invoke(app, ["sample", "--chat", "[1, 2", "-m", str(folder)])
    assert result.exit_code == 1
    assert "begins like a JSON list of messages" in " ".join(result.stderr.split())


@pytest.mark.parametrize("file", [None, "all.jsonl", "all.parquet"])
def test_the_mean_over_texts(folder: Path, tmp_path: Path, file: str | None) -> None:
    # So many sequences that their lengths differ, without which there is no error bar.
    each = rows_of(run(folder, "estimate", "length", *TEXTS, k=100))
    to_file = [] if file is None else ["--output", str(tmp_path / file)]
    found = rows_of(run(folder, "estimate", "length", *TEXTS, "--mean", *to_file, k=100))
    assert len(found) == 1
    assert found[0]["value"] == pytest.approx(sum(entry["value"] for entry in each) / 3)
    errors = [entry["standard_error"] for entry in each]
    assert None not in errors
    assert found[0]["standard_error"] == pytest.approx(math.hypot(*errors) / 3)
    assert (found[0]["mean_of"], found[0]["errors_known"]) == (3, 3)
    if file is not None:  # the file has the texts one by one, and is not computed again
        again = rows_of(run(folder, "estimate", "length", *TEXTS, "--mean", *to_file, k=100))
        assert again == found
