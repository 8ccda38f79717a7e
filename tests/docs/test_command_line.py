"""The reference of the command line, which is written when the site is built."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from cpsbs.cli.commands import app

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    specification = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    assert specification
    assert specification.loader
    module = importlib.util.module_from_spec(specification)
    with patch.dict(sys.modules, {"hooks": module}):  # dataclasses look their module up
        specification.loader.exec_module(module)
    return module


def test_every_command_is_on_the_page(hooks: ModuleType) -> None:
    page = (DOCS / "reference/command-line.md").read_text(encoding="utf-8")
    assert re.findall(r"<!-- command: (\w+) -->", page) == list(hooks.commands())


def test_every_option_is_in_the_table(hooks: ModuleType) -> None:
    for name in hooks.commands():
        told = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
        options = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", _option_column(told.stdout)))
        shown = set(
            re.findall(r"`(--?[\w-]+)`", hooks.on_page_markdown(f"<!-- command: {name} -->"))
        )
        assert options - {"-h", "--help"} <= shown, name


def _option_column(help_text: str) -> str:
    """Return the flags that stand at the beginning of the lines of a help text."""
    starts = (
        re.match(r"[│|*\s]*((?:--?[a-z][\w-]*[,\s]*)+)", line) for line in help_text.splitlines()
    )
    return "\n".join(found[1] for found in starts if found)
