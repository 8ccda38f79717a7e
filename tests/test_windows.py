"""Long and endless inputs: windows of them, and beams of every text in order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cpsbs
from cpsbs.windows import first_window, windows
from tests.models.folders import causal_folder

TEXTS = [f"the {a} {b}" for a in ("dog", "old red house", "cat sees") for b in ("and", "", "two a")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> cpsbs.TextModel:
    return cpsbs.load(causal_folder(tmp_path_factory.mktemp("model")))


@given(st.integers(0, 200), st.integers(1, 7), st.integers(1, 60))
def test_windows_have_every_item_once_and_grow_to_their_limit(
    total: int, first: int, most: int
) -> None:
    found = list(windows(range(total), first, most))
    assert [item for window in found for item in window] == list(range(total))
    for number, window in enumerate(found[:-1]):
        assert len(window) == min(first * 2**number, most)
    assert all(len(window) <= most for window in found)


def test_the_first_window_is_small_on_a_cpu_and_a_batch_on_a_gpu() -> None:
    sizes = [1, 2, 8, 64, 128, 640]
    assert [first_window(n, torch.device("cpu")) for n in sizes] == [1, 2, 8, 8, 8, 40]
    assert [first_window(n, torch.device("cuda")) for n in sizes] == sizes


def test_nothing_is_read_before_its_window_is_asked_for() -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for i in count():
            read.append(i)
            yield i

    found = windows(items(), 2, 9)
    assert read == []
    assert next(found) == [0, 1] == read
    assert next(found) == [2, 3, 4, 5]
    assert len(read) == 6


@pytest.mark.parametrize(("size", "window"), [(1, 1), (2, 1), (2, 64), (4, 2), (100, 64)])
def test_a_stream_draws_what_one_batch_of_all_texts_does(
    model: cpsbs.TextModel, size: int, window: int
) -> None:
    expected = model.beams(TEXTS, 3, max_length=5, seed=4)
    streamed = model.stream(iter(TEXTS), 3, max_length=5, seed=4, batch_size=size, window=window)
    found = list(streamed)
    assert [beams.tokens(0) for beams in found] == [expected.tokens(b) for b in range(len(TEXTS))]
    for b, beams in enumerate(found):
        assert beams.log_prob[0].tolist() == pytest.approx(expected.log_prob[b].tolist(), abs=1e-5)


def test_an_endless_iterable_is_streamed(model: cpsbs.TextModel) -> None:
    endless = (TEXTS[i % len(TEXTS)] for i in count())
    found = list(islice(model.stream(endless, 2, max_length=3, seed=0, batch_size=2), 5))
    assert len(found) == 5
    assert len({beams.settings["seed"] for beams in model.stream(TEXTS[:3], 2, max_length=3)}) == 1


def test_a_bad_text_is_told_before_its_window_is_drawn(model: cpsbs.TextModel) -> None:
    found = model.stream(["dog", "the dog", "dog", " "], 2, max_length=3, seed=0, batch_size=1)
    assert len([next(found) for _ in range(3)]) == 3
    with pytest.raises(ValueError, match=r"texts\[3\] is empty"):
        next(found)
    with pytest.raises(ValueError, match="texts is a single text"):
        model.stream("the dog")
    with pytest.raises(ValueError, match="batch_size is 0; it must be at least 1"):
        model.stream(["the dog"], batch_size=0)
    with pytest.raises(ValueError, match="k is 0"):
        model.stream(["the dog"], 0)
