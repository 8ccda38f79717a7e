"""The examples run, and what they print is right."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NUMBERS = re.compile(
    r"E\[.*?\](?: over \d+ sources)? = (\S+) ± (\S+) .*?(?:\nexactly (\S+))?(?=\n\n|\nE|\n?\Z)",
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
