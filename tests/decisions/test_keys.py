"""Keys: what counts as the same answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpsbs import keys
from cpsbs.decisions.keys import key_named


def test_text_and_first_line() -> None:
    assert keys.text("  a\n b\t c ") == "a b c"
    assert keys.first_line("\n \n Paris. \nIt is …") == "Paris."
    assert keys.first_line(" \n") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("6 × 7 = 42.", 42),
        ("42.0", 42),
        ("It costs 1,234,567 francs", 1234567),
        ("−3.5", -3.5),
        ("about -2e3 or so", -2000),
        ("one", None),
        ("", None),
        ("3, 4", 4),
        ("1,23", 23),
        (".5", 0.5),
        ("9e999", None),
        ("12345678901234567891", 12345678901234567891),
        ("10-12", 12),
        ("pages 3-4", 4),
        ("CO2", None),
        ("It is -7", -7),
    ],
)
def test_number(text: str, value: float | None) -> None:
    assert keys.number(text) == value


@given(st.integers(-(10**12), 10**12))
def test_number_reads_what_python_writes(value: int) -> None:
    assert keys.number(f"It is {value}.") == value
    assert keys.number(f"It is {value:,}") == value


def test_choice() -> None:
    letter = keys.choice("ABCD")
    assert letter("The answer is (B), not C.") == "B"
    assert letter("BAD") is None
    assert letter.choices == ("A", "B", "C", "D")
    assert keys.choice(["yes", "no"])("well, no") == "no"
    with pytest.raises(ValueError, match="options is"):
        keys.choice([])


def test_pattern() -> None:
    assert keys.pattern(r"answer: (\w+)")("my answer: Paris!") == "Paris"
    assert keys.pattern(r"\d+")("a 12 b") == "12"
    assert keys.pattern("x(y)?")("x") is None
    assert keys.pattern("q")("a") is None
    with pytest.raises(ValueError, match="no regular expression"):
        keys.pattern("(")


@given(st.recursive(st.none() | st.booleans() | st.text(max_size=5) | st.integers(), st.lists))
def test_json_field_reads_what_json_writes(value: Any) -> None:
    found = keys.json_field("a.b")("Here: " + json.dumps({"a": {"b": value}}) + " done")
    as_json = json.dumps(value, ensure_ascii=False)
    assert found == (as_json if isinstance(value, list | bool) else value)


def test_json_field_finds_nothing_where_there_is_nothing() -> None:
    field = keys.json_field("a")
    for text in ("", "{", "{}", '{"b": 1}', "[1]", '{"a"', "{" * 3000):
        assert field(text) is None
    assert field('{x} {"a": 1}') == 1
    with pytest.raises(ValueError, match="path is empty"):
        keys.json_field("")


def embed(texts: list[str]) -> Any:
    """Vectors by hand: directions for two meanings, and one of its own for all else."""
    table = {"Paris": [1.0, 0.1], "It is Paris": [1.0, 0.0], "Lyon": [0.0, 1.0]}
    return [table.get(t, [-1.0, -1.0]) for t in texts]


def test_meaning_groups_what_is_close() -> None:
    group = keys.meaning(embed, 0.9)
    assert group(["Paris", "Lyon", "It is Paris", "?", "Paris "]) == [
        "Paris",
        "Lyon",
        "Paris",
        "?",
        "Paris",
    ]
    assert keys.meaning(embed, -1)(["Paris", "Lyon", "?"]) == ["Paris"] * 3
    for bad in (2.0, "x"):
        with pytest.raises((ValueError, TypeError)):
            keys.meaning(embed, bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one vector for each"):
        keys.meaning(lambda texts: torch.zeros(1, 3))(["a", "b"])
    with pytest.raises(ValueError, match="not finite"):
        keys.meaning(lambda texts: torch.full((len(texts), 2), torch.nan))(["a", "b"])


def test_a_real_embedding_model_groups_answers_by_meaning() -> None:
    pytest.importorskip("wordllama", reason="needs the extra meaning")
    group = keys.meaning(keys.word_embeddings(), 0.6)
    texts = ["The capital is Paris.", "Paris", "Lyon is a city", "Paris is the capital."]
    assert group(texts) == [texts[0], texts[0], texts[2], texts[0]]


def test_keys_by_name() -> None:
    assert key_named("first-line") is keys.first_line
    assert key_named("choice")("C") == "C"
    assert key_named("choice:yes, no")("no!") == "no"
    assert key_named("regex:a:(b)")("a:b") == "b"
    assert key_named("json:x.y")('{"x": {"y": 2}}') == 2
    for bad in ("", "firstline", "regex:", "json:", "text:x", "choice:Yes", "meaning:high"):
        with pytest.raises(ValueError, match="key is"):
            key_named(bad)
