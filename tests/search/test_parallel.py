"""Searches in several threads find what one after the other finds, in the same order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from importlib import import_module
from itertools import repeat
from typing import Any

import pytest
import torch

import cpsbs
from cpsbs import TransformersModel, search_each
from cpsbs.search import parallel
from tests.models.tiny import alone, prompts
from tests.models.wide import wide

api = import_module("cpsbs.search.api")


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def models(count: int = 7, bad: int | None = None) -> Iterator[TransformersModel]:
    model = wide("marian")
    inputs = prompts(model)
    for i in range(count):
        if i == bad:
            raise ValueError("this one cannot be made")
        yield TransformersModel(model, **(alone(inputs, i % 3) if i % 2 else inputs))


def test_the_order_and_the_draws_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    right: Any = api.map_in_threads

    def noted(*given: Any) -> Iterator[cpsbs.Beams]:
        used.append(given[-1])
        found: Iterator[cpsbs.Beams] = right(*given)
        return found

    monkeypatch.setattr(api, "map_in_threads", noted)
    found = list(search_each(models(), 6, max_length=12, generator=0))
    assert used == [2]
    monkeypatch.setattr(TransformersModel, "concurrent", False)
    expected = list(search_each(models(), 6, max_length=12, generator=0))
    assert used == [2]
    assert [len(x) for x in found] == [3, 1, 3, 1, 3, 1, 3]
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x.sequences, y.sequences)
        torch.testing.assert_close(x.log_prob, y.log_prob, rtol=0, atol=1e-4)


@pytest.mark.parametrize("bad", [0, 1, 4])
def test_an_error_comes_after_what_was_before_it(bad: int) -> None:
    found = search_each(models(bad=bad), 2, max_length=5, generator=0)
    for _ in range(bad):
        next(found)
    with pytest.raises(ValueError, match="cannot be made"):
        next(found)


def test_an_error_inside_a_search_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: TransformersModel) -> torch.Tensor:
        raise RuntimeError("no scores")

    monkeypatch.setattr(TransformersModel, "start", fail)
    with pytest.raises(RuntimeError, match="no scores"):
        list(search_each(models(), 2, max_length=5, generator=0))


@pytest.mark.parametrize("design", ["stratified", "conditional-poisson", "independent"])
def test_models_that_share_a_generator_draw_in_turns(design: str) -> None:
    """As they do one after the other; otherwise some of them would get the same numbers."""

    def found() -> list[torch.Tensor]:
        own, other = (torch.Generator().manual_seed(seed) for seed in (1, 2))
        given = [[own] if i % 3 else [other] for i in range(60)]
        model = wide("marian", 2000)
        inputs = alone(prompts(model), 0)
        every = (TransformersModel(model, **inputs) for _ in given)
        some = search_each(every, 3, design, max_length=20, generator=given)
        return [beams.sequences for beams in some]

    both = found()
    torch.set_num_threads(1)
    expected = found()
    torch.set_num_threads(2)
    for x, y in zip(both, expected, strict=True):
        assert torch.equal(x, y)
    assert len({str(x.tolist()) for x in both}) > 55


@pytest.mark.parametrize("bad", [0, 1, 5])
def test_an_error_in_a_turn_holds_up_none(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, right = torch.Generator(), TransformersModel.start
    started: list[int] = []

    def fail(self: TransformersModel) -> torch.Tensor:
        started.append(1)
        if len(started) == bad + 1:
            raise RuntimeError("no scores")
        return right(self)

    monkeypatch.setattr(TransformersModel, "start", fail)
    model = wide("marian")
    every = (TransformersModel(model, **alone(prompts(model), 0)) for _ in range(20))
    some = search_each(every, 2, max_length=5, generator=repeat([generator]))
    with pytest.raises(RuntimeError, match="no scores"):
        list(some)


def test_a_thread_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others do not wait for it, and torch keeps its number of threads."""
    before, right = set(threading.enumerate()), threading.Thread.start

    def start(self: threading.Thread) -> None:
        if set(threading.enumerate()) - before:
            raise RuntimeError("can't start new thread")
        right(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        list(search_each(models(), 2, max_length=5, generator=0))
    assert not set(threading.enumerate()) - before


def test_a_reader_may_stop_early() -> None:
    taken = []

    def noted() -> Iterator[TransformersModel]:
        for model in models(50):
            taken.append(model)
            yield model

    some = search_each(noted(), 2, max_length=5, generator=0)
    next(some)
    some.close()  # type: ignore[attr-defined]
    assert len(taken) < 10


def test_a_single_batch_uses_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "map_in_threads", None)
    assert len(list(search_each(models(1), 2, max_length=5, generator=0))) == 1
    with pytest.raises(ValueError, match="cannot be made"):
        list(search_each(models(bad=1), 2, max_length=5, generator=0))


def test_models_of_others_are_searched_one_after_the_other() -> None:
    model = cpsbs.FunctionModel(lambda x: torch.zeros((len(x), 4)), 4, eos=0, sources=2)
    assert parallel.threads_for(model) == 1
