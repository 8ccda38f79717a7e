"""Long and endless inputs on the command line, plain or compressed."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner, Result

from cpsbs.cli import inputs
from cpsbs.cli.commands import app

LINES = [f"the {a} sees {b}" for a in ("dog", "old cat") for b in ("it", "a house", "two", "red")]
FEW = ("-k", "2", "--max-length", "4")


def run(*arguments: str | Path, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)


def records(lines: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.splitlines()]


def test_a_pipe_without_an_end(causal: Path) -> None:
    """In processes of their own, with a reader that has enough after three lines."""
    command = f'yes "the dog" | {sys.executable} -m cpsbs sample -m {causal} -k 2 --max-length 4'
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -3"], capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
    assert [record["number"] for record in records(done.stdout)] == [0, 1, 2]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_draws_do_not_depend_on_windows(size: int, causal: Path) -> None:
    """Every text keeps the stream of its number."""
    found = records(run("sample", *LINES, "-m", causal, *FEW, "--batch-size", str(size)).stdout)
    alone = records(run("sample", *LINES, "-m", causal, *FEW).stdout)
    assert [record["sequences"] for record in found] == [record["sequences"] for record in alone]
    assert [record["text"] for record in found] == LINES


@pytest.mark.parametrize(
    "command",
    [("sample",), ("estimate", "length"), ("answers",), ("mbr", "--candidates", "beam:2")],
)
@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_compressed_input_and_output(
    command: tuple[str, ...], ending: str, causal: Path, tmp_path: Path
) -> None:
    content = "".join(f"{line}\n" for line in LINES).encode()
    (tmp_path / "plain").write_bytes(content)
    compressed = tmp_path / f"in.txt.{ending}"
    if ending == "gz":
        compressed.write_bytes(gzip.compress(content))
    else:
        zstandard: Any = pytest.importorskip("zstandard")
        compressed.write_bytes(zstandard.compress(content))
    plain, output = tmp_path / "out.jsonl", tmp_path / f"out.jsonl.{ending}"
    common: tuple[str | Path, ...] = (*command, "-m", causal, *FEW, "--batch-size", "2")
    assert run(*common, "-f", tmp_path / "plain", "-o", plain).exit_code == 0
    result = run(*common, "-f", compressed, "-o", output)
    assert result.exit_code == 0, result.output
    data = output.read_bytes()
    opened = (
        gzip.decompress(data)
        if ending == "gz"
        else zstandard.ZstdDecompressor().decompressobj().decompress(data)
    )
    assert opened == plain.read_bytes()
    assert "already complete" in run(*common, "-f", compressed, "-o", output).stderr


def test_zst_without_its_package_is_told(causal: Path, tmp_path: Path) -> None:
    with patch.dict(sys.modules, {"zstandard": None}):
        result = run("sample", "dog", "-m", causal, "-o", tmp_path / "x.jsonl.zst")
        assert result.exit_code == 1
        assert "pip install 'cpsbs[zst]'" in result.stderr
        (tmp_path / "x.zst").touch()
        assert "cpsbs[zst]" in run("sample", "-f", tmp_path / "x.zst", "-m", causal).stderr


def test_lines_that_are_no_text_are_skipped_on_request(causal: Path) -> None:
    stdin = b"the dog\n\xff\xfe\n\nthe cat\n"
    result = run("sample", "-m", causal, *FEW, "--skip", stdin=stdin)
    assert result.exit_code == 3
    assert [record["number"] for record in records(result.stdout)] == [0, 3]
    first, second, last = result.stderr.splitlines()
    assert first.startswith("note: line 2 cannot be read: ")
    assert "0xff" in first
    assert second == "note: line 3 is empty; it is skipped"
    assert "2 of 4 lines were skipped" in last


def test_references_are_read_along(causal: Path, tmp_path: Path) -> None:
    texts, references = tmp_path / "texts", tmp_path / "references"
    texts.write_text("".join(f"{line}\n" for line in LINES))
    common: tuple[str | Path, ...] = (
        "sample",
        "-f",
        texts,
        "--reference-file",
        references,
        "-m",
        causal,
        *FEW,
    )
    for count, reason in ((7, "there are 7 references for more texts"), (9, "more than 8 refe")):
        references.write_text("the dog\n" * count)
        result = run(*common, "--batch-size", "1")
        assert result.exit_code == 1
        assert reason in result.stderr
    references.write_text("the dog\n" * 8)
    output = ("-o", tmp_path / "out.jsonl")
    assert run(*common, *output).exit_code == 0
    references.write_text("the cat\n" * 8)
    assert "was computed from another input" in run(*common, *output).stderr


def test_the_total_is_counted_or_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "texts"
    file.write_bytes(b"ten bytes\n" * 99_999 + b"ten bytes.")
    assert inputs.read_texts(None, file).total(0) == 100_000
    monkeypatch.setattr(inputs, "COUNTED", 10)
    lines = inputs.open_lines(file, "--file", False)
    assert sum(1 for _ in islice(lines.found, 50_000)) == 50_000
    assert lines.total(50_000) == pytest.approx(100_000, rel=0.03)
    assert sum(1 for _ in lines.found) == 50_000
    assert lines.total(100_000) == 100_000


def test_the_bar_shows_rate_and_captured_mass(causal: Path, tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    file = tmp_path / "texts"
    file.write_text("".join(f"{line}\n" for line in LINES * 8))
    arguments = ["sample", "-f", str(file), "-m", str(causal), *FEW, "--batch-size", "4"]
    with patch("sys.stderr", Terminal()) as told, pytest.raises(SystemExit) as end:
        app([*arguments, "-o", str(tmp_path / "out.jsonl")])
    assert end.value.code == 0
    assert "/64" in told.getvalue()
    assert "/s" in told.getvalue()
    assert "remaining" in told.getvalue()
    assert "captured 0." in told.getvalue()
