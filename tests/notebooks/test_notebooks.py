"""The notebooks run from top to bottom, and what they store is what they print."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cpsbs
from tests.models.tiny import make

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
NAMES = ["causal", "translation"]
LARGEST = 300_000
"""Bytes of a notebook with its figures."""

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]\d+)?")


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.ipynb").read_text(encoding="utf-8"))


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(cell: Any) -> str:
    """Return the text that a cell prints and returns, without figures."""
    found = []
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" not in data:
            found += output.get("text") or data["text/plain"]
    return "".join(found)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_prints_what_it_stores(name: str, tmp_path: Path) -> None:
    """Another processor may round the numbers in another way."""
    program = [sys.executable, str(NOTEBOOKS / "execute.py"), name, "--into", str(tmp_path)]
    done = subprocess.run(program, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    cells, stored = (code_cells(read(folder, name)) for folder in (tmp_path, NOTEBOOKS))
    for now, then in zip(cells, stored, strict=True):
        texts = [printed(now), printed(then)]
        words = [NUMBER.sub("#", " ".join(text.split())) for text in texts]
        assert words[0] == words[1]
        numbers = [[float(number) for number in NUMBER.findall(text)] for text in texts]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.05, abs=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_stored_with_its_outputs_and_nothing_else(name: str) -> None:
    assert (NOTEBOOKS / f"{name}.ipynb").stat().st_size < LARGEST
    notebook = read(NOTEBOOKS, name)
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    assert not any(cell["metadata"] for cell in notebook["cells"])
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not any(output.get("name") == "stderr" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1


def test_the_lines_for_a_real_model_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a tiny model that has a chat template."""
    tokenizer = cpsbs.load("en-fr").tokenizer
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    small = cpsbs.TextModel("small", make("gpt2", vocab_size=len(tokenizer)), tokenizer)
    monkeypatch.setattr(cpsbs, "load", lambda name: small)
    shown = ["".join(cell["source"]) for cell in read(NOTEBOOKS, "causal")["cells"]]
    (block,) = re.findall(r"```python\n(.*?)```", "\n".join(shown), re.DOTALL)
    exec(compile(block, "causal.ipynb", "exec"), {"cpsbs": cpsbs})
    assert "\nE[15] = " in capsys.readouterr().out
