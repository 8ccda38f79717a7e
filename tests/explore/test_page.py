"""The page as one file: nothing in it can run, or reach out, but its own script."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cpsbs.cli.commands import app
from cpsbs.explore import page

try:
    EMPTY = page.html({"mode": "file", "documents": []})
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(1)">\u2028<!--'


def data_of(html: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert found is not None
    return json.loads(found[1])


def test_data_cannot_leave_their_element() -> None:
    html = page.html({"mode": "file", "text": HOSTILE})
    assert data_of(html)["text"] == HOSTILE
    assert html.count("<script") == 2
    assert html.count("</script") == 2
    assert "<img" not in html


def test_the_policy_names_exactly_the_script_and_the_style_that_are_there() -> None:
    policy = re.search(r'Security-Policy" content="([^"]*)"', EMPTY)
    assert policy is not None
    for kind, pattern in (("script", r"<script>(.*?)</script>"), ("style", "<style>(.*?)</style>")):
        content = re.search(pattern, EMPTY, re.S)
        assert content is not None
        digest = base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy[1]
    assert "default-src 'none'" in policy[1]
    assert "connect-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]


def test_the_page_names_no_address_but_those_of_xml() -> None:
    addresses = set(re.findall(r"https?://[\w./-]+", EMPTY))
    assert all(address.startswith("http://www.w3.org/") for address in addresses)


def test_the_designs_are_on_the_page() -> None:
    names = [design["name"] for design in data_of(EMPTY)["designs"]]
    assert "stratified" in names
    assert "top-k" in names


# ---------------------------------------------------------------------- the command


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["explore", *arguments])


def test_a_file_holds_all_runs_of_all_texts(tmp_path: Path) -> None:
    file = tmp_path / "tree.html"
    result = run(
        *("Hello.", HOSTILE, "-k", "3", "--max-length", "6", "--redraws", "4", "--seed", "7"),
        *("--design", "stratified", "--design", "top-k", "--html", str(file)),
    )
    assert result.exit_code == 0, result.output
    data = data_of(file.read_text(encoding="utf-8"))
    assert data["chosen"] == ["stratified", "top-k"]
    assert [document["scene"]["text"] for document in data["documents"]] == ["Hello.", HOSTILE]
    for document in data["documents"]:
        runs = [(run["design"], run["seed"], run["steps"] is None) for run in document["runs"]]
        assert runs == [
            (design, seed, seed > 7) for design in ("stratified", "top-k") for seed in range(7, 11)
        ]
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_of_twenty_sequences_stays_small(tmp_path: Path) -> None:
    file = tmp_path / "tree.html"
    designs = ("stratified", "conditional-poisson", "gumbel-top-k", "independent")
    options = [word for design in designs for word in ("--design", design)]
    result = run(
        "He forgot his keys on the kitchen table.",
        *("-k", "20", "--redraws", "10", *options, "--html", str(file)),
    )
    assert result.exit_code == 0, result.output
    assert file.stat().st_size < 2_000_000


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["Hi.", "--design", "no-such"], "design is 'no-such'"),
        (["Hi.", "--html", "/no/such/folder/a.html"], "is not a folder"),
        (["Hi.", "-r", "a", "-r", "b"], "2 references for 1 texts"),
        (["-r", "a"], "without a text"),
        (["Hi.", "-r", "a", "--contains", "b"], "both --contains and --reference"),
        (["Hi.", "--html", "a.html", "-k", "500"], "k is 500"),
        (["", "--html", "a.html"], "is empty"),
        (["Hi.", "--host", "no.such.host.invalid", "--no-browser"], "cannot listen on"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    arguments: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 1
    assert reason in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1 or "cannot listen" in reason
    assert list(tmp_path.iterdir()) == []


def test_a_missing_server_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    result = run("Hi.", "--no-browser")
    assert result.exit_code == 1
    assert "pip install 'cpsbs[explore]'" in result.stderr


def test_a_page_that_is_not_built_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "files", lambda _: Path("/nonexistent"))
    with pytest.raises(ImportError, match="make page"):
        page.html({})
