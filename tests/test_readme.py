"""What the README shows is what the code does."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

from benchmarks.conditional_poisson import into_readme
from benchmarks.estimators import tables

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_examples_run_as_written() -> None:
    found = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.DOTALL)
    assert len(found) == README.count("```python") >= 2
    names: dict[str, object] = {}
    for code, shown in found:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "README.md", "exec"), names)
        assert printed.getvalue() == shown


def test_the_tables_are_those_of_the_last_benchmark() -> None:
    results = json.loads((ROOT / "benchmarks/results/conditional_poisson.json").read_text())
    assert "<!-- table: topk -->\n|" in README
    assert into_readme(README, results) == README
    estimators = tables(json.loads((ROOT / "benchmarks/results/estimators.json").read_text()))
    page = (ROOT / "docs/estimation.md").read_text()
    assert "<!-- table: summary -->\n|" in README
    assert "<!-- table: rmse_BLEU -->\n|" in page
    assert into_readme(README, estimators) == README
    assert into_readme(page, estimators) == page


def test_the_layout_names_what_exists() -> None:
    found = re.search(r"```\n(src/cpsbs/\n.*?)```", README, re.DOTALL)
    assert found
    names = re.findall(r"[\w/]+\.py", found[1])
    assert len(names) >= 8
    existing = [str(path.relative_to(ROOT)) for path in ROOT.glob("*/**/*.py")]
    for name in names:
        assert any(path.endswith(name) for path in existing), name
