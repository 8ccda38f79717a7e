"""Attention of one query is what torch computes, and other attention stays what it was."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from cpsbs.models import attention, recorded
from cpsbs.models.attention import attend, one_query_attention
from tests.models.test_recorded import NAMES, Pair, build

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
ROWS = 3
PLAIN = SimpleNamespace()


def tensors(
    group: int, dim: int, window: int, dtype: torch.dtype, device: str = "cpu", rows: int = ROWS
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and values for 2 kv heads; none is contiguous, and behind the window is NaN."""
    random = torch.Generator(device).manual_seed(group + dim + window)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random, device=device).to(dtype)

    states = normal(2, rows, 2, window + 7, dim)
    states[:, :, :, window:] = torch.nan
    query = 2 * normal(rows, 1, 2 * group, dim).transpose(1, 2)
    return query, states[0, :, :, :window], states[1, :, :, :window]


def masks(group: int, window: int, dtype: torch.dtype, device: str = "cpu") -> list[Any]:
    """Pairs of a mask and a bias, broadcast in all ways; each row sees something."""
    hidden = torch.rand(ROWS, 1, 1, window + 5, device=device) < 0.4
    hidden[..., 0] = False
    by_row = torch.zeros(hidden.shape, dtype=dtype, device=device)
    by_row = by_row.masked_fill_(hidden, torch.finfo(dtype).min)[..., :window]
    by_head = torch.randn(1, 2 * group, 1, window, device=device).to(dtype)
    full = torch.randn(ROWS, 2 * group, 1, window, device=device).to(dtype)
    return [
        *((None, None), (by_row, None), (by_row[:1], None), (by_head, None), (full, None)),
        *((by_row, by_head), (None, by_head), (by_row, full)),
    ]


def check(query: Tensor, key: Tensor, value: Tensor, mask: Any, bias: Any, scaling: Any) -> None:
    found = attend(query, key, value, mask, bias, scaling)
    rows, heads, _, dim = query.shape
    assert found.shape == (rows, 1, heads, dim)
    assert found.dtype == query.dtype
    assert found.is_contiguous()
    # In float64, which no GPU shortens.
    added = torch.zeros((), dtype=torch.float64, device=query.device)
    for x in (mask, bias):
        added = added if x is None else added + x.double()
    key, value = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key, value, added.expand(rows, heads, 1, key.shape[2]), scale=scaling
    )
    tolerance = 2e-5 if query.dtype == torch.float32 else 4 * torch.finfo(query.dtype).eps
    expected = expected.transpose(1, 2)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------- in Triton's interpreter


def let_the_interpreter_multiply_bfloat16() -> None:
    """Its matrix product takes the bits of a bfloat16 for an integer."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    original = builder.create_dot

    def wide(x: Any) -> Any:
        """In float32, of which a bfloat16 is the upper half."""
        if str(x.dtype.scalar) != "bf16":
            return x
        bits = x.data.astype("uint32") << 16
        return interpreter.TensorHandle(bits.view("float32"), interpreter.tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, wide(a), wide(b), *rest)

    builder.create_dot = create_dot


def check_numerics() -> None:
    let_the_interpreter_multiply_bfloat16()
    torch.manual_seed(0)
    for group, dim, window, dtype in [
        *((1, 64, 96, torch.float32), (4, 64, 96, torch.float32), (1, 48, 33, torch.float32)),
        *((4, 48, 33, torch.float32), (1, 64, 1, torch.bfloat16), (4, 64, 70, torch.bfloat16)),
        *((1, 48, 70, torch.bfloat16), (4, 48, 1, torch.bfloat16), (3, 8, 150, torch.float32)),
        *((1, 8, 150, torch.float16), (17, 16, 20, torch.float32)),
    ]:
        given = tensors(group, dim, window, dtype)
        for n, (mask, bias) in enumerate(masks(group, window, dtype)):
            check(*given, mask, bias, (None, 1.0, 0.3)[n % 3])


def check_that_nothing_seen_is_finite() -> None:
    let_the_interpreter_multiply_bfloat16()
    for group in (1, 4):
        for dtype in (torch.float32, torch.bfloat16):
            given = tensors(group, 16, 40, dtype)
            for lowest in (torch.finfo(dtype).min, -torch.inf):
                mask = torch.full((ROWS, 1, 1, 40), lowest, dtype=dtype)
                for bias in (None, mask):
                    assert bool(attend(*given, mask, bias).isfinite().all())


def check_the_interface() -> None:
    """It is the kernel that is called, with grouped heads and a bias too."""
    given = tensors(4, 16, 9, torch.float32)
    mask, bias = masks(4, 9, torch.float32)[5]
    module: Any = SimpleNamespace(num_key_value_groups=4)
    function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS["sdpa"]
    expected, _ = function(module, *given, mask, scaling=0.5, position_bias=bias)
    with one_query_attention():
        function = ALL_ATTENTION_FUNCTIONS["sdpa"]
        found, weights = function(module, *given, mask, scaling=0.5, position_bias=bias)
    assert weights is None
    assert not torch.equal(found, expected)  # It sums in another order.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def check_models() -> None:
    """Steps of fixed shape with the kernel are the ordinary ones."""
    recorded.ON_CPU = True
    calls = 0
    original = attention.attend

    def counted(*args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return original(*args)

    module: Any = attention
    module.attend = counted
    for name in ("llama", "t5"):
        calls = 0
        pair = Pair(build(name, dtype=torch.float32))
        assert pair.fix(30)
        pair.agree(1, atol=1e-4)
        # Two layers, with two attentions each where there is an encoder.
        per_step = {"llama": 2, "t5": 4}[name]
        assert calls >= 4 * per_step, (name, calls)
        assert calls % per_step == 0, (name, calls)


@pytest.mark.parametrize(
    "check",
    [check_numerics, check_that_nothing_seen_is_finite, check_the_interface, check_models],
)
def test_in_the_interpreter(check: Callable[[], None]) -> None:
    """It has to be asked for before Triton is imported."""
    pytest.importorskip("triton")
    name = check.__name__
    code = f"import torch\nfrom tests.models.test_attention import {name}\n"
    code += f"with torch.no_grad():\n    {name}()\nprint('fine')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "fine\n", done.stderr


# ---------------------------------------------------------------------- when it is the kernel


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the kernel is asked for, which is not there; as if there were a device for it."""
    asked: list[Any] = []

    def note(query: Tensor, *rest: Any) -> Tensor:
        asked.append((query, *rest))
        return query.transpose(1, 2)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(attention, "attend", note)
    return asked


def call(change: dict[str, Any], group: int = 2, **more: Any) -> Any:
    query, key, value = tensors(group, 16, 9, torch.float32)
    inputs = {"query": query, "key": key, "value": value, "dropout": 0.0, "scaling": 0.25}
    inputs["attention_mask"] = torch.zeros(ROWS, 1, 1, 9)
    inputs["module"] = SimpleNamespace(num_key_value_groups=group)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](**{**inputs, **change, **more})


def test_what_the_kernel_does(by_kernel: list[Any]) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"attention_mask": None, "scaling": None, "is_causal": True},
        {"position_bias": torch.zeros(1, 4, 1, 9)},
        {"output_attentions": False, "softcap": None, "sliding_window": 5, "position_ids": ROWS},
    ]
    for n, change in enumerate(changes):
        with one_query_attention():
            call(change)
        assert len(by_kernel) == n + 1
    with one_query_attention():
        call({"module": PLAIN}, group=1)
    assert len(by_kernel) == len(changes) + 1


WIDE = torch.zeros(ROWS, 4, 2, 16)
OTHERWISE: dict[str, dict[str, Any]] = {
    "queries": {"query": WIDE},
    "dropout": {"dropout": 0.5},
    "float64": {
        "query": WIDE[:, :, :1].double(),
        "attention_mask": None,
        **dict.fromkeys(("key", "value"), torch.ones(ROWS, 2, 9, 16).double()),
    },
    "boolean mask": {"attention_mask": torch.ones(ROWS, 1, 1, 9, dtype=torch.bool)},
    "flat mask": {"attention_mask": torch.zeros(1, 9)},
    "value dim": {"value": torch.ones(ROWS, 2, 9, 8)},
    "softcap": {"softcap": 30.0},
    "s_aux": {"s_aux": torch.zeros(4)},
    "head_mask": {"head_mask": torch.ones(4)},
    "gradient": {"query": WIDE[:, :, :1].clone().requires_grad_()},
}


@pytest.mark.parametrize("why", OTHERWISE)
def test_what_it_does_not(why: str, by_kernel: list[Any]) -> None:
    torch.manual_seed(0)
    expected, _ = call(OTHERWISE[why])
    torch.manual_seed(0)
    with one_query_attention():
        found, _ = call(OTHERWISE[why])
    assert torch.equal(found, expected)
    assert not by_kernel


def test_without_a_device(by_kernel: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with one_query_attention():
        call({})
    assert not by_kernel


def test_only_in_this_thread_and_only_inside(by_kernel: list[Any]) -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with one_query_attention():
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(20)
    call({})
    assert not by_kernel
    with one_query_attention(), one_query_attention():
        pass
    call({})
    assert not by_kernel
    with one_query_attention():
        leave.set()
        thread.join(20)
        call({})
    assert len(by_kernel) == 1
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    with pytest.raises(KeyError), one_query_attention():
        raise KeyError
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_attention_of_somebody_else_stays(by_kernel: list[Any]) -> None:
    def mine(*args: Any, **kwargs: Any) -> str:
        return "mine"

    AttentionInterface.register("sdpa", mine)
    try:
        with one_query_attention():
            assert call({}) == "mine"
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is mine
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)
    assert not by_kernel


def test_a_kernel_that_fails(
    by_kernel: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> Tensor:
        raise RuntimeError("no compiler")

    caplog.set_level(logging.INFO, "cpsbs")
    monkeypatch.setattr(attention, "attend", fail)
    monkeypatch.setattr(attention._state, "broken", False)
    expected, _ = call({})
    for _ in range(2):
        with one_query_attention():
            assert torch.equal(call({})[0], expected)
    notes = [r.getMessage() for r in caplog.records if r.name == "cpsbs"]
    assert notes == ["attention is computed without Triton: RuntimeError: no compiler"]


# ---------------------------------------------------------------------- only on a GPU


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [8, 48, 64, 128])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_on_a_gpu(group: int, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for window in (1, 32, 96, 300):
        given = tensors(group, dim, window, dtype, "cuda")
        for mask, bias in masks(group, window, dtype, "cuda"):
            check(*given, mask, bias, None)


@gpu
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_a_graph(dtype: torch.dtype, group: int) -> None:
    query, key, value = tensors(group, 64, 96, dtype, "cuda")
    mask = masks(group, 96, dtype, "cuda")[1][0]
    attend(query, key, value, mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend(query, key, value, mask)
    for _ in range(3):
        query.normal_(), key.normal_(), value.normal_()
        expected = attend(query, key, value, mask)
        graph.replay()
        assert torch.equal(found, expected)
        check(query, key, value, mask, None, None)


@gpu
@pytest.mark.parametrize("name", NAMES)
def test_recorded_steps_use_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = attention.attend

    def counted(*args: Any) -> Tensor:
        calls.append(torch.cuda.is_current_stream_capturing())
        return original(*args)

    monkeypatch.setattr(attention, "attend", counted)
    with torch.no_grad():
        pair = Pair(build(name, "cuda", torch.float16))
        assert pair.fix(30)
        pair.step()
    assert set(calls) == {False, True}
    assert not attention._state.broken
