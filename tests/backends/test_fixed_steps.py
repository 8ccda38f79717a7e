"""Steps of fixed shape give what the ordinary ones give. Without a GPU nothing is recorded."""

from __future__ import annotations

import gc
import inspect
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from cpsbs import TransformersModel
from cpsbs.backends import TORCH, backend_for
from cpsbs.backends.triton import kept, layers, pool, workspace
from cpsbs.backends.triton.fixed_steps import FixedShapeSteps
from tests.backends.fixing import FIXING
from tests.models.tiny import MODELS, make, prompts

V, K = 30, 3
NAMES = list(MODELS)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
    ),
]
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def build(name: str, device: str = "cpu", dtype: torch.dtype = torch.float64) -> Any:
    """In float64, so that other orders of summation do not show."""
    return make(name).to(device=device, dtype=dtype)


class Pair:
    """The same search both ways, with random parents and tokens."""

    def __init__(self, model: Any, k: int = K, **settings: Any) -> None:
        self.inputs = {name: x.to(model.device) for name, x in prompts(model).items()}
        self.ordinary = TransformersModel(model, **self.inputs, **settings)
        self.fixed = TransformersModel(model, **self.inputs, **settings)
        first = self.ordinary.start()
        assert torch.equal(first, self.fixed.start())
        self.k, self.sources = k, len(first)
        self.dtype, self.processed = model.dtype, "logits_processor" in settings
        self.random = torch.Generator().manual_seed(7)
        self.row = torch.arange(self.sources)[:, None].expand(-1, k)

    def fix(self, steps: int) -> bool:
        return self.fixed.fix_rows(self.k, steps, FIXING)

    def draw(self) -> tuple[Tensor, Tensor]:
        size = (self.sources, self.k)
        parent = torch.randint(self.k, size, generator=self.random)
        return parent, torch.randint(2, V, size, generator=self.random)

    def step(self) -> tuple[Tensor, Tensor]:
        """Log-probabilities both ways."""
        parent, token = self.draw()
        device = self.fixed.device
        rows, self.row = self.row.gather(1, parent), torch.arange(parent.numel()).view_as(parent)
        expected = self.ordinary.advance(rows.flatten().to(device), token.flatten().to(device))
        found = self.fixed.step(parent.to(device), token.to(device))
        assert found.shape == (self.sources * self.k, V)
        assert found.dtype == (torch.float32 if self.processed else self.dtype)
        return found.float().log_softmax(-1), expected.log_softmax(-1)

    def agree(self, steps: int, atol: float = 1e-5) -> None:
        for _ in range(steps):
            torch.testing.assert_close(*self.step(), rtol=0, atol=atol)

    def keep(self, *sources: int) -> None:
        kept = torch.tensor(sources)
        self.row, self.sources = self.row[kept], len(sources)
        self.fixed.keep_sources(kept.to(self.fixed.device))


def held_by(pair: Pair) -> workspace.Workspace:
    """The buffers of the search."""
    assert isinstance(pair.fixed._fixed, FixedShapeSteps)
    return pair.fixed._fixed._lease.workspace


class Repeats(LogitsProcessor):  # type: ignore[misc, unused-ignore]
    """Scores that depend on the whole row, and are written into."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert scores.dtype == torch.float32
        scores.scatter_add_(1, input_ids, torch.ones_like(input_ids, dtype=scores.dtype))
        return scores


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_fixed_rows_are_the_ordinary_ones(name: str, attention: str, device: str) -> None:
    """Over more tokens than the first window holds, and with sources of different lengths."""
    # The eager attention of transformers has no float64.
    dtype = torch.float64 if attention == "sdpa" else torch.float32
    model = build(name, device, dtype)
    model.set_attn_implementation(attention)
    pair = Pair(model)
    assert pair.fix(40)
    pair.agree(40, atol=1e-5 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_sources_that_go_on_alone(name: str, device: str) -> None:
    pair = Pair(build(name, device), logits_processor=[Repeats()])
    assert pair.fix(12)
    pair.agree(3)
    pair.keep(0, 2)
    pair.agree(3)
    pair.keep(1)
    pair.agree(3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_positions_that_are_given_count(name: str, device: str) -> None:
    """Also once the model has been compared, with the positions that its mask tells."""
    model = build(name, device)
    pair = Pair(model)
    assert pair.fix(9)
    pair.agree(2)
    length = pair.inputs["input_ids"].shape[1]
    every = 7 + torch.arange(length, device=model.device)
    pair.inputs["position_ids"] = every.expand(pair.sources, -1)
    pair.ordinary, pair.fixed = (TransformersModel(model, **pair.inputs) for _ in range(2))
    pair.ordinary.start(), pair.fixed.start()
    pair.row = torch.arange(pair.sources)[:, None].expand(-1, K)
    assert pair.fix(9)
    pair.agree(4)


@pytest.mark.parametrize("device", DEVICES)
def test_left_over_rows_are_not_returned(device: str) -> None:
    model = build("llama", device)
    pair = Pair(model)
    inputs = {name: x.repeat(3, 1) for name, x in pair.inputs.items()}
    pair.ordinary, pair.fixed = (TransformersModel(model, **inputs) for _ in range(2))
    pair.ordinary.start(), pair.fixed.start()
    pair.sources, pair.row = 9, torch.arange(9)[:, None].expand(-1, K)
    assert pair.fix(20)
    pair.agree(2)
    pair.keep(0, 2, 3, 5, 6, 7, 8)  # In 8 places.
    pair.agree(2)
    pair.keep(1, 2, 3, 5, 6)  # In 6.
    pair.agree(2)
    pair.keep(0, 1, 2, 3, 4)
    pair.agree(1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_later_searches_find_buffers_and_graphs_again(name: str, device: str) -> None:
    model = build(name, device)
    with torch.inference_mode():
        pair = Pair(model)
        assert pair.fix(20)
        used = held_by(pair)
        pair.agree(5)
        used.states.fill_(torch.nan)
    del pair
    pair = Pair(model)
    assert pair.fix(22)
    assert held_by(pair) is used
    graphs = dict(used.graphs)
    pair.agree(5)
    assert used.graphs == graphs
    # A search at the same time has buffers of its own.
    second = Pair(model)
    assert second.fix(22)
    assert held_by(second) is not used
    second.agree(3)
    pair.agree(3)


def test_what_is_kept_ends_with_the_model() -> None:
    model = build("llama")
    pair = Pair(model)
    assert pair.fix(5)
    pair.agree(2)
    alive = weakref.ref(model)
    buffers = weakref.ref(held_by(pair))
    del pair, model
    gc.collect()
    assert alive() is None
    assert buffers() is None


def test_few_workspaces_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_KEPT", 2)
    model = build("llama")
    for k in (1, 2, 3, 4):
        assert Pair(model, k).fix(3)
    shapes = [w.shape.k for w in pool.pool_of(model).workspaces.items]
    assert shapes == [3, 4]


def test_a_model_with_other_weights_is_recorded_anew() -> None:
    model = build("marian")
    pair = Pair(model)
    assert pair.fix(5)
    used = held_by(pair)
    del pair
    model.lm_head.weight = torch.nn.Parameter(2 * model.lm_head.weight)
    pair = Pair(model)
    assert pair.fix(5)
    assert held_by(pair) is not used
    pair.agree(2)


def notes(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of fixed steps; the ordinary ones have notes of their own on a CPU."""
    said = [r.getMessage() for r in caplog.records if r.name == "cpsbs"]
    return [note for note in said if "takes the ordinary steps of transformers" not in note]


def wrong(model: Any, how: str) -> None:
    """Let the model's forward misbehave when its cache is a fixed one."""
    forward = model.forward

    def other(*args: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        layer = kwargs["past_key_values"].layers[0]
        if not isinstance(layer, layers.RowLayer):
            return forward(*args, input_ids=input_ids, **kwargs)
        if how == "error":
            raise ValueError("no such thing")
        if how == "waiting":
            assert int(input_ids[0, 0]) >= 0
        if how == "positions":
            kwargs["position_ids"] = kwargs["position_ids"] + 1
        if how == "memory":
            raise torch.OutOfMemoryError("full")
        if how == "capture":
            torch.cuda.synchronize()
        return forward(*args, input_ids=input_ids, **kwargs)

    other.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    model.forward = other


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("how", "note"),
    [
        ("error", "no such thing"),
        ("waiting", "_local_scalar_dense.default makes the host wait"),
        ("positions", "log-probabilities differ by"),
    ],
)
def test_a_model_that_cannot_is_run_as_before(
    how: str, note: str, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cpsbs")
    model = build("gpt2", device)
    wrong(model, how)
    for _ in range(2):
        pair = Pair(model)
        assert not pair.fix(6)
        pair.fixed, fixed = pair.ordinary, pair.fixed
        with pytest.raises(ValueError, match="fix_rows"):
            fixed.step(*pair.draw())
        for _ in range(3):
            parent, token = (x.to(device) for x in pair.draw())
            rows = pair.row.to(device).gather(1, parent).flatten()
            pair.row = torch.arange(rows.numel()).view_as(parent)
            expected = pair.ordinary.advance(rows, token.flatten())
            assert torch.equal(fixed.advance(rows, token.flatten()), expected)
    found = notes(caplog)
    assert len(found) == 1
    assert note in found[0]
    assert "GPT2LMHeadModel is run step by step" in found[0]


def test_lack_of_memory_is_not_hidden() -> None:
    model = build("llama")
    wrong(model, "memory")
    pair = Pair(model)
    with pytest.raises(torch.OutOfMemoryError):
        pair.fix(6)


def test_a_step_that_can_no_longer_be_recorded_is_computed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "cpsbs")
    model = build("llama")
    pair = Pair(model)
    assert pair.fix(40)
    pair.agree(20)
    wrong(model, "waiting")
    pair.agree(20)
    assert len(notes(caplog)) == 1


def test_when_rows_are_not_fixed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cpsbs")
    model = build("llama")
    assert not Pair(model, use_cache=False).fix(5)
    assert notes(caplog) == ["LlamaForCausalLM is run step by step: it does not use its cache"]
    assert not Pair(model, stopping_criteria=[lambda ids, _: ids[:, -1] == 5]).fix(5)
    assert not Pair(model, cache_implementation="static", max_new_tokens=9).fix(5)
    assert not Pair(model).fix(0)
    late = Pair(model)
    late.ordinary.advance(torch.tensor([0, 0, 1, 2]), torch.tensor([3, 4, 5, 6]))
    assert not late.ordinary.fix_rows(K, 5, FIXING)
    model.set_attn_implementation("flex_attention")
    assert not TransformersModel(model, input_ids=torch.tensor([[3]])).fix_rows(K, 5, FIXING)
    model.set_attn_implementation("sdpa")
    assert Pair(model).fix(5)
    trained = Pair(model.train())
    assert trained.fix(5)
    trained.agree(3)  # both ways without dropout
    assert not Pair(model.eval()).fixed.fix_rows(K, 5, TORCH)


def test_kernels_alone_fix_no_rows_on_a_cpu() -> None:
    """There is nothing to gain from it without CUDA graphs."""
    pytest.importorskip("triton")
    from cpsbs.backends.triton.backend import TRITON

    assert not Pair(build("llama")).fixed.fix_rows(K, 5, TRITON)


def test_more_tokens_than_there_is_room_for() -> None:
    pair = Pair(build("t5"))
    assert pair.fix(5)
    pair.agree(31)
    with pytest.raises(ValueError, match="room for 32 tokens"):
        pair.fixed.step(*pair.draw())


def test_sizes_grow_by_steps() -> None:
    assert [workspace.rung(n) for n in range(1, 14)] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
    assert [workspace.ladder(n, 32) for n in (1, 32, 33, 97, 129)] == [32, 32, 64, 128, 192]


# ---------------------------------------------------------------------- only on a GPU


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    pair = Pair(build(name, "cuda", dtype))
    assert pair.fix(40)
    gaps = []
    for _ in range(40):
        found, expected = pair.step()
        gaps.append(float((expected.exp() * (found - expected).abs()).sum(-1).mean()))
    # Both ways are as far from the model in exact arithmetic as from each other.
    assert max(gaps) < 30 * torch.finfo(dtype).eps


@gpu
@pytest.mark.parametrize("name", ["llama", "marian"])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_steps_neither_wait_nor_allocate(name: str) -> None:
    """200 of them, once all windows are recorded."""
    model = build(name, "cuda", torch.float16)
    inputs = {key: x.cuda() for key, x in prompts(model).items()}
    parent = torch.zeros((3, K), dtype=torch.int64, device="cuda")
    for search in range(5):
        fixed = TransformersModel(model, **inputs)
        fixed.start()
        assert fixed.fix_rows(K, 50, backend_for("cuda"))
        fixed.step(parent, parent + 5)
        before = torch.cuda.memory_allocated()
        if search:
            torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(49):
                fixed.step(parent, parent + 5)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if search:
            assert torch.cuda.memory_allocated() == before


@gpu
def test_a_failed_recording_leaves_the_device_usable(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cpsbs")
    model = build("gpt2", "cuda")
    wrong(model, "capture")
    pair = Pair(model)
    assert not pair.fix(6)
    assert len(notes(caplog)) == 1
    assert bool((torch.rand(10, device="cuda") < 1).all())
    other = Pair(build("gpt2", "cuda"))
    assert other.fix(6)
    other.agree(6)
