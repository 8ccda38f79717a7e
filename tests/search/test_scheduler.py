"""Rows that are fixed, as on a GPU, against rows that come and go: the same search."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from cpsbs import DESIGNS, Beams, FunctionModel, TransformersModel, search, search_each
from cpsbs.backends import TORCH
from cpsbs.backends.triton.pool import pool_of
from cpsbs.designs import design_named
from cpsbs.randomness import Streams, split_seed
from cpsbs.search import scheduler
from cpsbs.search.recursion import Transition
from cpsbs.search.requests import Request, RequestQueue
from cpsbs.search.settings import SearchSettings
from tests.backends.fixing import FIXING, FixingBackend, fix_rows_on_cpu
from tests.models.tiny import EOS, make, prompts

CPU = torch.device("cpu")


def more_ends(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores[:, EOS] += 2.0
    return scores


def beams(design: str, model: Any, **keep: Any) -> Beams:
    # In float64, rounded to float32: other orders of summation hardly ever show.
    inputs = TransformersModel(model, **prompts(model), logits_processor=[more_ends])
    return search(inputs, 4, design, max_length=20, generator=5, **keep)


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("name", ["marian", "llama"])
def test_the_same_beams_both_ways(name: str, design: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypotheses that have ended go on as they are, sources are dropped now and then."""
    model = make(name).double()
    expected = beams(design, model, entropy=True)
    fix_rows_on_cpu(monkeypatch)
    monkeypatch.setattr(scheduler, "SYNC_EVERY", 3)
    monkeypatch.setattr(scheduler, "CROWDED", 0)
    monkeypatch.setattr(scheduler, "SPARSE", 0.9)
    found = beams(design, model, entropy=True)
    assert bool(expected.finished.any())
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(found.lengths, expected.lengths)
    assert torch.equal(found.finished, expected.finished)
    for one, other in (
        (found.log_prob, expected.log_prob),
        (found.log_weight, expected.log_weight),
        (found.entropy, expected.entropy),
    ):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("design", DESIGNS)
def test_steps_are_rehearsed(design: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that can be recorded. A rehearsal that fails would raise here."""
    fix_rows_on_cpu(monkeypatch)
    model, before = make("marian"), len(FIXING.rehearsed)
    inputs = prompts(model)
    found = [
        search(
            TransformersModel(model, **inputs), 3, design, max_length=5, generator=1, joint=joint
        )
        for joint in (False, True)
    ]
    keys = FIXING.rehearsed[before:]
    chosen = design_named(design)
    assert len(keys) == chosen.recordable(3) * (2 - chosen.needs_joint)
    assert torch.equal(found[0].sequences, found[1].sequences)


EOS_TOKENS = list(range(1, 7))


def groups(padded: bool) -> list[dict[str, torch.Tensor]]:
    """Prompts that get shorter, five at first, then fewer at a time; some padded on the left."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for length, size in ((7, 5), (6, 2), (5, 3), (4, 1), (3, 2)):
        ids = torch.randint(7, 30, (size, length), generator=generator)
        mask = torch.ones_like(ids)
        if padded:
            mask[::2, :2], ids[::2, :2] = 0, 0
        found.append({"input_ids": ids, "attention_mask": mask})
    return found


def drawn(model: Any, design: str, padded: bool = False) -> list[Beams]:
    models = (
        TransformersModel(model, **given, eos_token_id=EOS_TOKENS) for given in groups(padded)
    )
    return list(search_each(models, 3, design, max_length=14, generator=5, entropy=True))


def same(found: list[Beams], expected: list[Beams]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.sequences, other.sequences)
        assert torch.equal(one.finished, other.finished)
        torch.testing.assert_close(one.log_prob, other.log_prob, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(one.entropy, other.entropy, rtol=1e-6, atol=1e-6)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sources take places of others; rows are fixed from here on."""
    counts: list[int] = []
    join = TransformersModel.join

    def noted(self: Any, places: list[int], other: Any) -> None:
        counts.append(len(places))
        join(self, places, other)

    monkeypatch.setattr(TransformersModel, "join", noted)
    return counts


def fix_rows(monkeypatch: pytest.MonkeyPatch, crowded: int = 512) -> None:
    fix_rows_on_cpu(monkeypatch)
    monkeypatch.setattr(scheduler, "SYNC_EVERY", 3)
    monkeypatch.setattr(scheduler, "CROWDED", crowded)


# Not stratified: what is heavy is decided between numbers that are equal but for rounding.
@pytest.mark.parametrize("design", ["conditional-poisson", "gumbel-top-k", "independent", "top-k"])
@pytest.mark.parametrize("name", ["marian", "bart", "llama", "gpt2", "t5"])
def test_sources_take_the_places_of_others(
    name: str, design: str, joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gets what it gets alone. Rows of BART and T5 have one position: batch after batch."""
    model = make(name).double()
    expected = drawn(model, design)
    lengths = torch.cat([beams.lengths.flatten() for beams in expected])
    assert lengths.min() < 6 < 14 == lengths.max()
    fix_rows(monkeypatch)
    same(drawn(model, design), expected)
    assert (sum(joined) >= 3) == (name not in ("bart", "t5"))


@pytest.mark.parametrize("crowded", [0, 512])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_padded_prompts_and_fewer_rows_at_the_end(
    name: str, crowded: int, joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle sources ask for no position that the model does not have."""
    model = make(name).double()
    expected = drawn(model, "gumbel-top-k", padded=True)
    fix_rows(monkeypatch, crowded)
    same(drawn(model, "gumbel-top-k", padded=True), expected)
    assert joined


def test_a_model_with_no_more_positions_than_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers are larger; sources that have ended before others must not get there."""
    model = make("gpt2").double()
    model.transformer.wpe = torch.nn.Embedding(40, 32).double()
    ids = torch.randint(7, 30, (4, 3), generator=torch.Generator().manual_seed(0))

    def run(sources: list[int]) -> list[Beams]:
        models = (
            TransformersModel(model, input_ids=ids[:n], eos_token_id=EOS_TOKENS) for n in sources
        )
        return list(search_each(models, 2, max_length=36, generator=3, entropy=True))

    expected = run([4] + [2] * 12)
    fix_rows(monkeypatch)
    same(run([4] + [2] * 12), expected)


def test_buffers_are_for_the_next_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of models that are kept in a list, and when nobody wants the rest."""
    model = make("t5").double()
    fix_rows(monkeypatch)
    models = [TransformersModel(model, **given) for given in groups(False)[:1] * 4]
    assert len(list(search_each(models, 3, max_length=6, generator=0))) == 4
    kept = pool_of(model).workspaces.items
    assert [workspace.busy for workspace in kept] == [False]
    some = search_each(
        (TransformersModel(model, **given) for given in groups(False)), 3, max_length=6
    )
    next(some)
    some.close()  # type: ignore[attr-defined]
    assert not any(workspace.busy for workspace in kept)


def test_error_bars_do_not_keep_steps_from_being_recorded() -> None:
    """Only designs that compute joint inclusion probabilities read them back."""
    for name, joint, expected in (
        ("stratified", True, True),
        ("conditional-poisson", False, True),
        ("conditional-poisson", True, False),
    ):
        settings = SearchSettings(3, design_named(name), 5, joint=joint)
        transition = Transition(settings, (1,), 0, TORCH)
        assert transition.recordable == expected
        other = Transition(replace(settings, joint=not joint), (1,), 0, TORCH)
        assert transition.key != other.key


def test_callers_have_the_model_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed ahead has ended when beams are handed over: a model may be trained then."""
    fix_rows(monkeypatch)
    model, right = make("gpt2").double(), TransformersModel.prefill
    handed_over, begun = threading.Event(), list[bool]()

    def slow(self: TransformersModel) -> torch.Tensor:
        time.sleep(0.05)
        begun.append(handed_over.is_set())
        return right(self)

    monkeypatch.setattr(TransformersModel, "prefill", slow)
    # Each has more sources than the one before, so that it has to wait until that one has ended.
    inputs = [{name: x.repeat(n, 1) for name, x in prompts(model).items()} for n in (1, 2, 3)]
    models = [TransformersModel(model, **given) for given in inputs]
    for _ in search_each(models, 2, "top-k", max_length=4, generator=1):
        handed_over.set()
        time.sleep(0.1)
        handed_over.clear()
    assert begun == [False, False, False]


def test_callers_have_the_model_for_themselves_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fix_rows(monkeypatch)
    model, right = make("gpt2").double(), TransformersModel.prefill
    over, prefilled = threading.Event(), list[bool]()

    def slow(self: TransformersModel) -> torch.Tensor:
        time.sleep(0.05 if prefilled else 0)
        prefilled.append(over.is_set())
        return right(self)

    def fail(self: scheduler.Scheduler) -> list[int]:
        raise ValueError("something is wrong")

    monkeypatch.setattr(TransformersModel, "prefill", slow)
    monkeypatch.setattr(scheduler.Scheduler, "_synchronise", fail)
    models = [TransformersModel(model, **prompts(model)) for _ in range(2)]
    with pytest.raises(ValueError, match="something is wrong"):
        list(search_each(models, 2, "top-k", max_length=4, generator=1))
    over.set()
    time.sleep(0.2)
    assert prefilled == [False, False]


def test_the_path_of_a_request_holds_up_no_memory_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fix_rows(monkeypatch)
    model, running, beside = make("gpt2").double(), 0, []

    class Noted(TransformersModel):
        def prefill(self) -> torch.Tensor:
            beside.append(running)
            return super().prefill()

    models = [Noted(model, **prompts(model)) for _ in range(3)]
    for _ in search_each(models, 2, "top-k", max_length=12, generator=1, path=True):
        running += 1
    assert beside == [0, 1, 2]


class Scarce(FunctionModel):
    """A model for which there is too little memory as long as others run."""

    def __init__(self, running: list[int]) -> None:
        super().__init__(lambda x: torch.zeros(len(x), 4), 4, eos=0)
        self._running = running

    def start(self) -> torch.Tensor:
        if self._running:
            raise torch.OutOfMemoryError("no more")
        return super().start()


def test_what_does_not_fit_beside_others_waits_for_them() -> None:
    running: list[int] = []

    def request() -> Request:
        model = Scarce(running)
        return Request(model, Streams(split_seed(0, 1, CPU), 1, CPU, TORCH), TORCH, {})

    first, second = request(), request()
    queue = RequestQueue([first, second])
    assert queue.begin() is first
    running.append(1)
    assert queue.peek() is second
    assert queue.started() is None
    assert queue.started() is None
    queue.settle()
    running.clear()
    assert queue.begin() is second
    assert second.take_first_scores().shape == (1, 4)


def test_a_rehearsal_is_waited_for_when_rows_cannot_be_fixed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fix_rows(monkeypatch)
    waited = []
    monkeypatch.setattr(FixingBackend, "rehearse", lambda *_: lambda: waited.append(1))

    class NoRoom(TransformersModel):
        def fix_rows(self, *args: Any) -> bool:
            raise torch.OutOfMemoryError("no more")

    model = make("gpt2").double()
    with pytest.raises(torch.OutOfMemoryError):
        search(NoRoom(model, **prompts(model)), 2, "top-k", max_length=4)
    assert waited == [1, 1]  # the search is tried twice


def test_random_streams_are_checked() -> None:
    model = make("llama").double()

    def models() -> Iterator[TransformersModel]:
        for given in groups(False)[:2]:
            yield TransformersModel(model, **given)

    def run(generator: Any) -> list[Beams]:
        return list(search_each(models(), 3, max_length=4, generator=generator))

    five = split_seed(0, 5)
    with pytest.raises(ValueError, match="fewer entries than there are models"):
        run([five])
    with pytest.raises(ValueError, match="5 generators; it must have one for each row, 2"):
        run([five, five])
    with pytest.raises(ValueError, match="it must have a list with one generator"):
        run([five, torch.Generator()])
    with pytest.raises(ValueError, match="5 streams for a model of 2 sources"):
        run([five, Streams.split(0, 5, "cpu")])
    ours = Streams(five, 5, torch.device("cpu"))
    run([ours, split_seed(1, 2)])
    assert ours.generator is five


def test_scores_that_are_no_numbers_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the search looks only now and then."""
    fix_rows_on_cpu(monkeypatch)

    def broken(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * torch.nan

    model = make("llama")
    inputs = TransformersModel(model, **prompts(model), logits_processor=[broken])
    with pytest.raises(ValueError, match="NaN, inf, or all -inf"):
        search(inputs, 3, max_length=5)


def test_too_little_memory_names_what_to_try() -> None:
    def next_log_probs(prefix: torch.Tensor) -> torch.Tensor:
        if prefix.shape[1] > 1:
            raise torch.OutOfMemoryError("no memory")
        return torch.zeros((len(prefix), 50))

    model = FunctionModel(next_log_probs, 50, eos=0, sources=7)
    with pytest.raises(torch.OutOfMemoryError, match="7 sources with k = 5; try 3 at a time"):
        search(model, 5, max_length=5)


@pytest.mark.parametrize("starts", [True, False])
def test_what_is_ready_comes_before_the_error_of_a_later_model(
    starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made, and started, while others are on their way."""
    model = make("llama").double()
    fix_rows(monkeypatch)

    def models() -> Iterator[TransformersModel]:
        for given in groups(False)[:2]:
            yield TransformersModel(model, **given)
        if not starts:
            raise ValueError("no more of them")
        wrong = TransformersModel(model, **groups(False)[0])
        monkeypatch.setattr(wrong, "start", lambda: torch.zeros((1, 2)))
        yield wrong

    found = search_each(models(), 3, max_length=30, generator=0)
    assert [len(next(found)) for _ in range(2)] == [len(g["input_ids"]) for g in groups(False)[:2]]
    with pytest.raises(ValueError, match="it must be" if starts else "no more of them"):
        next(found)
