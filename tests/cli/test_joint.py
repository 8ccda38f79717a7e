"""Commands ask for joint inclusion only where a design needs it for its error bar.

Joint inclusion keeps a search from being recorded on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from cpsbs import DESIGNS, Beams, TextModel
from cpsbs.cli.commands import app
from cpsbs.search.settings import SearchSettings


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The design of every search, and whether it was asked for joint inclusion."""
    searches: list[tuple[str, bool]] = []
    draw = TextModel.draw

    def spy(
        self: TextModel, texts: Any, settings: SearchSettings, **options: Any
    ) -> Iterator[Beams]:
        searches.append((settings.design.name, settings.joint))
        return draw(self, texts, settings, **options)

    monkeypatch.setattr(TextModel, "draw", spy)
    return searches


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("design", "more", "joint"),
    [
        ("stratified", (), False),
        ("gumbel-top-k", (), False),
        ("conditional-poisson", (), True),
        ("calibrated", (), True),
        ("conditional-poisson", ("-k", "1"), False),
        ("conditional-poisson", ("--repeats", "2"), False),
        ("conditional-poisson", ("--estimator", "hindsight"), False),
    ],
)
def test_estimate_asks_for_it_where_it_is_needed(
    asked: list[tuple[str, bool]], design: str, more: tuple[str, ...], joint: bool
) -> None:
    output = run("estimate", "length", "A dog.", "-k", "3", "--design", design, *more)
    assert set(asked) == {(design, joint)}
    assert ('"standard_error": null' in output) == ("1" in more or "hindsight" in more)


def test_compare_and_demo_ask_for_it_where_it_is_needed(asked: list[tuple[str, bool]]) -> None:
    run("compare", "A dog.", "-k", "2")
    run("demo", "-k", "2")
    assert set(asked) == {(name, design.needs_joint) for name, design in DESIGNS.items()}
