"""What is kept for later searches is bounded, and what a search takes is predicted."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import cpsbs
from cpsbs import FunctionModel, TransformersModel, search, search_each
from cpsbs.backends import Backend
from cpsbs.backends.triton import kept
from cpsbs.backends.triton.kept import Shelf
from cpsbs.backends.triton.memory import ONCE, bytes_per_source
from tests.backends.fixing import fix_rows_on_cpu
from tests.models.tiny import make, prompts

CPU = torch.device("cpu")
on_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@dataclass(frozen=True)
class Shape:
    """A shape by name."""

    name: str
    device: torch.device = CPU


@dataclass(eq=False)
class Item:
    """Buffers that take no memory."""

    shape: Shape
    bytes: int
    busy: bool = False


@pytest.fixture(autouse=True)
def _nothing_kept_by_others(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    shelves: weakref.WeakSet[Shelf[Any]] = weakref.WeakSet()
    monkeypatch.setattr(kept, "_SHELVES", shelves)
    yield
    kept.release()


def idle(shelf: Shelf[Item], name: str, size: int) -> Item:
    item = Item(Shape(name), size)
    shelf.put(item)
    item.busy = False
    return item


def names(*shelves: Shelf[Item]) -> list[str]:
    return sorted(item.shape.name for shelf in shelves for item in shelf.items)


def test_what_was_used_least_recently_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all models together; what is in use stays and does not count."""
    monkeypatch.setattr(kept, "most_kept", lambda _: 100)
    one, other = Shelf[Item](), Shelf[Item]()
    idle(one, "a", 40), idle(other, "b", 40), idle(one, "c", 40)
    again = one.take(Shape("a"))
    assert again is not None
    assert again.busy
    assert one.take(Shape("a")) is None
    again.busy = False
    elsewhere = Item(Shape("far", torch.device("meta")), 1000)
    other.put(elsewhere)
    elsewhere.busy = False
    running = idle(other, "running", 500)
    running.busy = True
    assert kept.kept_bytes(CPU) == 120
    kept.trim(CPU)
    assert names(one, other) == ["a", "c", "far", "running"]
    idle(other, "too large", 101)
    kept.trim(CPU)
    assert names(one, other) == ["far", "running"]
    running.busy = False
    assert kept.release() == 1500
    assert names(one, other) == []


def test_few_are_kept_however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_KEPT", 2)
    shelf = Shelf[Item]()
    for name in "abc":
        idle(shelf, name, 0)
    kept.trim(CPU)
    assert names(shelf) == ["b", "c"]


def test_nothing_is_freed_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kept.KEPT_VARIABLE, "0")
    shelf = Shelf[Item]()
    idle(shelf, "a", 1)
    with kept.CAPTURE:
        kept.trim(CPU)
        assert names(shelf) == ["a"]
    kept.trim(CPU)
    assert names(shelf) == []


def test_the_share_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    class Card:
        total_memory = 1000

    card = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Card())
    assert kept.most_kept(card) == 200
    monkeypatch.setenv(kept.KEPT_VARIABLE, "0.05")
    assert kept.most_kept(card) == 50
    for wrong in ("much", "2", "-1", "nan"):
        monkeypatch.setenv(kept.KEPT_VARIABLE, wrong)
        with pytest.raises(ValueError, match=r"CPSBS_KEPT_MEMORY is .* from 0 to 1"):
            kept.most_kept(card)


def test_release_frees_the_buffers_of_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for the garbage collector."""
    fix_rows_on_cpu(monkeypatch)
    model = make("llama").double()
    gc.disable()
    try:
        search(TransformersModel(model, **prompts(model)), 3, max_length=5, generator=0)
        found = [weakref.ref(item) for _, _, item in kept._idle()]
        assert len(found) == 1
        assert kept.kept_bytes(CPU) > 0
        cpsbs.release()
        assert kept.kept_bytes(CPU) == 0
        assert [item() for item in found] == [None]
    finally:
        gc.enable()


class Short:
    """Scores of a model whose first ``failures`` calls from ``start`` on find too little memory."""

    def __init__(self, start: int, failures: int) -> None:
        self.calls, self.fails = 0, range(start, start + failures)

    def __call__(self, prefix: Tensor) -> Tensor:
        self.calls += 1
        if self.calls - 1 in self.fails:
            raise torch.OutOfMemoryError("no more")
        return torch.arange(6.0).roll(prefix.shape[1]).expand(len(prefix), 6).log_softmax(-1)


@pytest.mark.parametrize("start", [0, 2, 5])
def test_too_little_memory_is_tried_again(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is freed, and the same is found; the second time it is an error."""
    freed = []
    monkeypatch.setattr(Backend, "release", lambda _: freed.append(1))

    def drawn(scores: Short) -> list[list[list[int]]]:
        models = [FunctionModel(scores, 6, eos=0, sources=2) for _ in range(2)]
        some = search_each(models, 3, "top-k", max_length=4, generator=1)
        return [beams.tokens(b) for beams in some for b in range(2)]

    expected = drawn(Short(0, 0))
    assert not freed
    assert drawn(Short(start, 1)) == expected
    assert len(freed) == 1
    with pytest.raises(torch.OutOfMemoryError, match="too small for 2 sources with k = 3; try 1"):
        drawn(Short(start, 2))


def test_the_error_names_the_batch_that_is_too_large() -> None:
    """And not the first one; a single source cannot be divided."""
    models = [
        FunctionModel(Short(fails, fails and 2), 6, eos=0, sources=sources)
        for sources, fails in ((5, 0), (1, 1))
    ]
    with pytest.raises(torch.OutOfMemoryError, match="one source with k = 3 and max_length = 4"):
        list(search_each(models, 3, "top-k", max_length=4, generator=1))


def test_the_prediction_is_proportional_to_what_it_counts() -> None:
    model = make("llama", vocab_size=1000).float()
    one = bytes_per_source(model, 4, 20, 44)
    assert one < bytes_per_source(model, 8, 20, 44) < 2 * one
    assert bytes_per_source(model.half(), 4, 20, 44) < 0.7 * one
    # Keys and values of 2 layers, 2 heads of 8 numbers each, for 4 rows of 32 more tokens.
    larger = bytes_per_source(model, 4, 20, 76) - bytes_per_source(model, 4, 20, 44)
    assert larger == 4 * 32 * (2 * 2 * 2 * 8 * 2 + 2 + 4 + 40)


@on_a_card
def test_fifty_shapes_and_designs_stay_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches of random shapes in one process: what stays reserved, and what each one takes."""
    monkeypatch.setenv(kept.KEPT_VARIABLE, "0.01")
    card = torch.device("cuda", torch.cuda.current_device())
    most, pick = kept.most_kept(card), random.Random(0)
    models = [make(name, vocab_size=20_000).half().cuda() for name in ("marian", "llama")]
    for model in models:
        model.generation_config.eos_token_id = None
    cpsbs.release()
    before = torch.cuda.memory_reserved()
    for number in range(50):
        model, k = pick.choice(models), pick.choice((1, 3, 8, 20, 45))
        sources, length = pick.choice((1, 3, 16, 60, 150)), pick.choice((4, 19, 40))
        steps = pick.choice((5, 30, 60))
        design = pick.choice(("conditional-poisson", "stratified", "gumbel-top-k", "top-k"))
        ids = torch.randint(3, 20_000, (sources, length), device="cuda")
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        search(TransformersModel(model, input_ids=ids), k, design, max_length=steps, generator=0)
        taken = torch.cuda.max_memory_allocated() - start
        predicted = sources * bytes_per_source(model, k, length, steps)
        del ids
        assert kept.kept_bytes(card) <= most, number
        # Torch itself keeps some memory of every search, of which nothing is in use.
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved() - before
        shape = (number, type(model).__name__, design, sources, k, length, steps)
        assert reserved <= 1.1 * most + ONCE, (shape, reserved)
        assert taken <= predicted + ONCE, (shape, taken, predicted)
    cpsbs.release()
    assert torch.cuda.memory_reserved() - before <= ONCE


@on_a_card
def test_a_full_card_frees_what_is_kept() -> None:
    """A search for which there is room only without the buffers of the last one."""
    model = make("marian", vocab_size=20_000).half().cuda()
    model.generation_config.eos_token_id = None

    def run(k: int) -> list[list[int]]:
        ids = torch.arange(3, 67, device="cuda").view(64, 1).expand(-1, 8).contiguous()
        beams = search(TransformersModel(model, input_ids=ids), k, max_length=40, generator=0)
        return beams.tokens(0)

    run(40)
    cpsbs.release()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    expected = run(40)
    needed = torch.cuda.max_memory_reserved() - before
    cpsbs.release()
    run(39)
    held = kept.kept_bytes(torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    # What is left is too little by half of what is kept.
    taken = torch.empty(free - needed + held // 2, dtype=torch.uint8, device="cuda")
    with patch.object(kept, "release", wraps=kept.release) as released:
        assert run(40) == expected
    assert released.called
    del taken
