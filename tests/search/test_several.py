"""Steps that a backend takes in one call find what the recursion finds step by step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpsbs import Beams, TransformersModel, search
from cpsbs.backends.cpu import compiled, steps
from cpsbs.designs import ConditionalPoissonDesign, Design, Stratified, TopK
from cpsbs.models.transformers.int8 import quantize
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Candidates, Selection
from tests.models.tiny import make, prompts
from tests.models.wide import MAKERS, wide

several: Any = import_module("cpsbs.search.several")

VOCABULARY = 2000
"""Tokens enough for compiled conditional Poisson sampling with K = 5."""

DESIGNS: list[Design] = [
    TopK(),
    Stratified(),
    ConditionalPoissonDesign(),
    ConditionalPoissonDesign("probability"),
]


@pytest.fixture(autouse=True)
def _compiler() -> None:
    library: Any = compiled.library()
    if library is None or not library.multiplies_floats():
        pytest.skip("layers are not compiled here")


@cache
def model_of(name: str, int8: bool = False) -> Any:
    model = wide(name, VOCABULARY)
    if int8:
        quantize(model)
    return model


class Count:
    """Counts the calls of the backend and the steps that they took."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.steps, take = 0, 0, steps.take

        def counted(*given: Any) -> Any:
            taken = take(*given)
            self.calls += 1
            self.steps += len(taken.parents) + (taken.parent is not None)
            return taken

        monkeypatch.setattr(steps, "take", counted)


def drawn(name: str, design: Design, k: int, ends: int, int8: bool = False, **options: Any) -> Any:
    """Return the beams of three sources, and what is left of their random streams."""
    model = model_of(name, int8)
    eos = list(range(2, 2 + ends))
    wrapped = TransformersModel(model, **prompts(model), eos_token_id=eos)
    streams = Streams.split(5, 3, "cpu")
    options = {"max_length": 50, **options}
    return search(wrapped, k, design, generator=streams, **options), streams


def assert_same(found: tuple[Beams, Streams], expected: tuple[Beams, Streams]) -> None:
    """Not one bit differs, and as many random numbers were drawn."""
    for name in ("sequences", "lengths", "finished", "present", "log_prob", "log_weight", "trace"):
        x, y = (getattr(beams, name) for beams, _ in (found, expected))
        assert (x is None) == (y is None)
        assert x is None or torch.equal(x, y)
    row = torch.arange(3)
    x, y = (streams.uniform(row, (3,)) for _, streams in (found, expected))
    assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("name", "int8"), [*((name, False) for name in MAKERS), ("marian", True), ("gated-t5", True)]
)
@pytest.mark.parametrize("design", DESIGNS, ids=repr)
@pytest.mark.parametrize(("k", "temperature", "ends"), [(1, 1.0, 20), (5, 0.3, 100), (5, 2.0, 40)])
def test_the_same_beams(
    design: Design,
    name: str,
    int8: bool,
    k: int,
    temperature: float,
    ends: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sources end at different steps, hypotheses before them, and slots are dropped on the way."""
    count = Count(monkeypatch)
    found = drawn(name, design, k, ends, int8, temperature=temperature)
    # One hypothesis of such a flat distribution needs more power sums than are compiled.
    left_to_torch = k == 1 and isinstance(design, ConditionalPoissonDesign)
    assert count.steps > 0 or int(found[0].lengths.max()) <= 2 or left_to_torch
    monkeypatch.setattr(several.SeveralSteps, "of", lambda *_: None)
    before = count.steps
    assert_same(found, drawn(name, design, k, ends, int8, temperature=temperature))
    assert count.steps == before


@settings(max_examples=25, deadline=None)
@given(
    design=st.sampled_from(DESIGNS),
    k=st.integers(1, 9),
    temperature=st.sampled_from([0.01, 0.1, 0.5, 1.0, 5.0]),
    ends=st.integers(0, 300),
    most=st.integers(0, 5),
    length=st.integers(1, 40),
)
def test_however_many_steps_a_call_takes(
    design: Design, k: int, temperature: float, ends: int, most: int, length: int
) -> None:
    """Also where a source is not an ordinary one, and is left to the recursion in between."""
    options: dict[str, Any] = {"temperature": temperature, "max_length": length}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "MOST_STEPS", most)
        found = drawn("marian", design, k, ends, **options)
        patch.setattr(several.SeveralSteps, "of", lambda *_: None)
        assert_same(found, drawn("marian", design, k, ends, **options))


def test_nearly_all_steps_are_taken_in_a_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    count = Count(monkeypatch)
    found, _ = drawn("marian", Stratified(), 5, 0, temperature=0.5)
    assert int(found.lengths.min()) == 50
    assert count.calls <= 5
    # The first step comes from the prefill, and a step is done by hand where slots are dropped.
    assert count.steps >= 48


def test_random_numbers_are_those_of_torch() -> None:
    library: Any = compiled.library()
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        torch.rand(seed * 37, generator=generator)
        state, found = generator.get_state(), torch.empty(700, dtype=torch.float64)
        for count in (1, 700, 13):
            library.draw_uniform(compiled.address(state), count, compiled.address(found))
            wanted = torch.empty(count, dtype=torch.float64).uniform_(generator=generator)
            assert torch.equal(found[:count], wanted)
        assert torch.equal(state, generator.get_state())


def test_generators_of_another_layout_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps.draws_like_torch()
    monkeypatch.setattr(steps, "STATE_BYTES", 5000)
    steps.draws_like_torch.cache_clear()
    count = Count(monkeypatch)
    drawn("marian", TopK(), 3, 5)
    assert not count.calls
    monkeypatch.undo()
    steps.draws_like_torch.cache_clear()


@dataclass(frozen=True, repr=False, eq=False)
class Second(TopK):
    """Selects the candidates from the second most probable one on."""

    name = "second"

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        more = super().select(candidates, k + 1, streams, joint)
        return Selection(more.index[:, 1:], more.present[:, 1:])


@pytest.mark.parametrize(
    ("design", "options"),
    [
        (Second(), {}),
        (ConditionalPoissonDesign(anneal=0.5), {}),
        (ConditionalPoissonDesign(), {"joint": True}),
        (Stratified(), {"entropy": True}),
        (Stratified(), {"path": True}),
        (Stratified(), {"nucleus": 0.9}),
    ],
)
def test_what_is_not_compiled_is_taken_step_by_step(
    design: Design, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = Count(monkeypatch)
    drawn("marian", design, 3, 20, max_length=10, **options)
    assert not count.calls


class Subclass(TransformersModel):
    """Might do something else in a step."""


@pytest.mark.parametrize(
    "what",
    [
        *("processor", "criterion", "small heads", "one generator"),
        *("generators twice", "subclass", "replaced"),
    ],
)
def test_models_that_need_more_are_run_step_by_step(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = Count(monkeypatch)
    # Compiled attention needs heads of 16 numbers.
    model = make("llama", VOCABULARY) if what == "small heads" else model_of("marian")
    more: dict[str, Any] = {}

    def same(ids: Tensor, scores: Tensor) -> Tensor:
        return scores

    def never(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return torch.zeros(len(ids), dtype=torch.bool)

    if what == "processor":
        more["logits_processor"] = [same]
    if what == "criterion":
        more["stopping_criteria"] = [never]
    kind = Subclass if what == "subclass" else TransformersModel
    wrapped: Any = kind(model, **prompts(model), **more)
    if what == "replaced":
        right = wrapped.stops
        wrapped.stops = lambda *given: right(*given)
    random = torch.Generator().manual_seed(0)
    streams = Streams(random if what == "one generator" else None, 3, torch.device("cpu"))
    generator: Any = streams if what == "one generator" else 1
    if what == "generators twice":
        generator = [random, random, torch.Generator().manual_seed(1)]
    beams = search(wrapped, 3, max_length=12, generator=generator)
    assert int(beams.lengths.max()) > 2
    assert not count.calls


def test_positions_that_a_model_does_not_have_are_an_error() -> None:
    """The compiled call never reads behind the table of positions: 64 for this model."""
    with pytest.raises(ValueError, match="max_position_embeddings is 64"):
        drawn("marian", TopK(), 2, 0, max_length=80)
