"""One value holds the settings of a search, and everyone passes it on."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, FrozenInstanceError, fields
from typing import Any

import pytest

from cpsbs import TableModel, search
from cpsbs.designs import design_named
from cpsbs.search.settings import SearchOptions, SearchSettings

STRATIFIED = design_named("stratified")


def test_options_and_signature_say_what_the_settings_say() -> None:
    optional = {f.name: f.default for f in fields(SearchSettings) if f.default is not MISSING}
    assert set(SearchOptions.__annotations__) == set(optional)
    parameters = inspect.signature(search).parameters
    assert {name: parameters[name].default for name in optional} == optional


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("k", 0),
        ("k", True),
        ("k", 2.0),
        ("max_length", 0),
        ("temperature", 0.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("nucleus", 0.0),
        ("nucleus", 1.5),
    ],
)
def test_what_no_search_can_have_is_refused_by_name(name: str, value: Any) -> None:
    given: dict[str, Any] = {"k": 2, "design": STRATIFIED, "max_length": 3, name: value}
    with pytest.raises(ValueError, match=f"^{name} is {value!r}; it must be"):
        SearchSettings(**given)


def test_they_are_a_value() -> None:
    settings = SearchSettings(2, STRATIFIED, 3)
    assert settings == SearchSettings(2, design_named("stratified"), 3)
    assert hash(settings) == hash(SearchSettings(2, design_named("stratified"), 3))
    with pytest.raises(FrozenInstanceError):
        settings.k = 3  # type: ignore[misc]


def test_beams_are_labelled_with_them() -> None:
    model = TableModel.random(vocab_size=4, length=3, seed=0)
    beams = search(model, 2, STRATIFIED, max_length=3, temperature=0.5, nucleus=0.9, generator=7)
    settings = SearchSettings(2, STRATIFIED, 3, 0.5, 0.9)
    assert beams.settings == {**settings.as_record(), "seed": 7, "model": "TableModel"}
