"""Layers that compute with fewer launches compute the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from cpsbs.backends.triton import fixed_steps, fusing, pool, prefilled
from cpsbs.backends.triton.kernels import few_rows
from cpsbs.backends.triton.workspace import Shape
from tests.backends.interpreted import Interpreter, let_the_interpreter_multiply_bfloat16
from tests.backends.test_fixed_steps import Pair, build, held_by
from tests.backends.test_workspace import Notes


def check_wrong_layers() -> None:
    """What fused layers compute is compared; layers that somebody has changed are left alone."""
    notes, model = Notes(), build("llama", dtype=torch.float32)
    with patch.object(fusing, "_normed", lambda x, norm: 2 * x):
        pair = Pair(model)
        assert pair.fix(4)
    assert not held_by(pair).fuses
    assert [note for note in notes.found if note.startswith("the layers of Llama")]
    pair.agree(3, atol=1e-4)
    model = build("llama", dtype=torch.float32)
    assert fusing.can_fuse(model)
    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda module, given, found: found + 1)
    assert not fusing.can_fuse(model)
    pair = Pair(model)
    assert pair.fix(4)
    pair.agree(2, atol=1e-4)


def few(device: str, dtype: torch.dtype) -> Any:
    """A model whose layers are six launches, for few rows."""
    config = LlamaConfig(
        vocab_size=30, hidden_size=128, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=64,
        eos_token_id=1, pad_token_id=0, bos_token_id=2, initializer_range=0.1,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    return model.to(device=device, dtype=dtype).eval()


together = patch.object(prefilled, "ENOUGH_HEADS", 0)
"""Lets a program of the attention handle several rows, however few programs there are then."""


@together
def check_few_rows(device: str = "cpu") -> None:
    """They agree with the ordinary layers to rounding, step after step, and see new weights."""
    let_the_interpreter_multiply_bfloat16()
    torch.manual_seed(0)
    for dtype, error in ((torch.float16, 0.02), (torch.bfloat16, 0.15)):
        model = few(device, dtype)
        counted: list[int] = []
        right = few_rows.add_and_normalize

        def counting(*given: Any, counted: Any = counted, right: Any = right) -> Any:
            counted.append(1)
            return right(*given)

        with patch.object(few_rows, "add_and_normalize", counting), torch.no_grad():
            pair = Pair(model, k=3)
            assert pair.fix(8)
            assert held_by(pair).fuses
            pair.agree(3, atol=error)
            assert len(counted) % 6 == 0  # twice a layer
            assert counted
            model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
            model.model.norm.weight.mul_(1.2)
            pair.agree(3, atol=error)


def check_products() -> None:
    """Of one, two and three matrices, against sums in float64."""
    random = torch.Generator().manual_seed(0)
    for rows in (1, 20, 80):
        x = torch.randn((rows, 256), generator=random).half()
        weights = [torch.randn((n, 256), generator=random).half() / 16 for n in (128, 64, 64)]
        for some in (weights, weights[:2], weights[:1]):
            exact = x.double() @ torch.cat(some).double().T
            parts = few_rows.products_in_parts(x, *some)
            assert len(parts) > 1
            torch.testing.assert_close(parts.double().sum(0), exact, rtol=0, atol=1e-5)
        gate, up = (x.double() @ w.double().T for w in weights[1:])
        found = few_rows.gated_product(x, *weights[1:])
        exact = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=2e-3)
        parts = few_rows.products_in_parts(x, weights[0])
        before = torch.randn((rows, 128), generator=random).half()
        hidden, weight = before.clone(), torch.rand(128, generator=random).half()
        normed = few_rows.add_and_normalize(parts, hidden, weight, 1e-5)
        exact = before.double() + parts.double().sum(0)
        torch.testing.assert_close(hidden.double(), exact, rtol=2e-3, atol=2e-3)
        exact = torch.nn.functional.rms_norm(hidden.double(), (128,), weight.double(), 1e-5)
        torch.testing.assert_close(normed.double(), exact, rtol=2e-3, atol=2e-3)
    assert not few_rows.suits(129, 256, 128)
    assert not few_rows.suits(80, 250, 128)
    assert not few_rows.suits(80, 256, 100)


def check_cuts() -> None:
    """Whatever a product is cut into, it is the same."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn((80, 320), generator=random).half()  # five times DEPTH inputs
    weights = [torch.randn((n, 320), generator=random).half() / 18 for n in (136, 72, 8)]
    exact = x.double() @ torch.cat(weights).double().T
    gated = torch.nn.functional.silu(exact[:, :136]) * exact[:, :136]
    for width, parts, steps in ((16, 1, 5), (48, 2, 3), (64, 3, 2), (128, 5, 1), (256, 2, 3)):
        cut = few_rows.Cut(min(width, 128), parts, steps)
        with patch.object(few_rows, "best_cut", lambda *sizes, cut=cut: cut):
            found = few_rows.products_in_parts(x, *weights)
            assert len(found) == parts
            torch.testing.assert_close(found.double().sum(0), exact, rtol=0, atol=1e-5)
            found = few_rows.gated_product(x, weights[0], weights[0])
            torch.testing.assert_close(found.double(), gated, rtol=2e-3, atol=2e-3)


@given(
    st.integers(1, 128),
    st.integers(1, 300),
    st.lists(st.integers(1, 5000), min_size=1, max_size=3),
    st.sampled_from([1, 2]),
    st.sampled_from([16, 108, 132]),
)
def test_every_input_is_in_one_part(
    rows: int, depth: int, eights: list[int], matrices: int, programs: int
) -> None:
    outputs = tuple(8 * n for n in eights)
    cut = few_rows.best_cut(rows, depth * few_rows.DEPTH, outputs, matrices, programs)
    assert (cut.parts - 1) * cut.steps < depth <= cut.parts * cut.steps
    assert matrices == 1 or cut.parts == 1
    assert cut.width % few_rows.WIDTH == 0
    assert 0 < cut.width <= few_rows.MOST_COLUMNS // matrices


def test_searches_with_other_kernels_are_told_apart() -> None:
    """Otherwise some would be taken for compared."""
    shape = Shape(
        sources=1, k=10, capacity=64, states=(6, 2, 32), cross=(0, 0, 0), source_length=0, hidden=0,
        dtype=torch.float16, device=torch.device("cpu"), stream=0, own_positions=True,
        together=False,
    )  # fmt: skip
    few_sources = [replace(shape, sources=n) for n in range(1, 14)]
    assert len({pool.kernels_for(own, fuses=True) for own in few_sources}) == 13
    assert len({pool.kernels_for(own, fuses=False) for own in few_sources}) == 1
    together = replace(shape, together=True)
    assert pool.kernels_for(together, fuses=False) != pool.kernels_for(shape, fuses=False)
    assert pool.MANY_ROWS == few_rows.MOST_ROWS + 1


@pytest.mark.parametrize("rows", range(1, 129))
def test_all_rows_have_room(rows: int) -> None:
    first, second = few_rows._split(rows)
    assert rows <= first + second <= max(16, 2 * rows)
    for size in (first, second):
        assert size == 0 or (size >= 16 and size & (size - 1) == 0)


@together
def check_more_rows_than_fit() -> None:
    """Kernels that suit one search may need more memory than there is for another."""
    let_the_interpreter_multiply_bfloat16()
    model = few("cpu", torch.float16)
    right = few_rows.products_in_parts

    def limited(x: Tensor, *weights: Tensor) -> Tensor:
        if len(x) > 16:
            raise RuntimeError("out of resource: shared memory")
        return right(x, *weights)

    with patch.object(few_rows, "products_in_parts", limited), torch.no_grad():
        small = Pair(model, k=2)
        assert small.fix(8)
        assert held_by(small).fuses
        small.agree(2, atol=0.02)
        large = Pair(model, k=12)
        assert large.fix(8)
        assert not held_by(large).fuses
        large.agree(2, atol=0.02)


@together
def check_fewer_sources() -> None:
    """When sources are dropped, kernels that were not compared are not used."""
    let_the_interpreter_multiply_bfloat16()
    rows: list[int] = []
    right = few_rows.products_in_parts

    def wrong(x: Tensor, *weights: Tensor) -> Tensor:
        rows.append(len(x))
        return 2 * right(x, *weights)

    model = few("cpu", torch.float16)
    with (
        patch.object(few_rows, "MOST_ROWS", 8),
        patch.object(pool, "MANY_ROWS", 16),
        patch.object(few_rows, "products_in_parts", wrong),
        torch.no_grad(),
    ):
        pair = Pair(model, k=4)
        assert pair.fix(8)
        assert held_by(pair).fuses
        pair.agree(1, atol=0.02)
        pair.keep(1)
        pair.agree(2, atol=0.02)
        assert not held_by(pair).fuses
    assert not rows


@together
def check_fusing_is_given_up() -> None:
    """Layers as transformers has them are compared, too, when fused ones are given up."""
    let_the_interpreter_multiply_bfloat16()
    compared: list[tuple[int, bool]] = []
    compare = fixed_steps._compare

    def noted(fixed: Any, state: Any, *given: Any) -> None:
        compared.append((state.sources * fixed.k, held_by_steps(fixed).fuses))
        compare(fixed, state, *given)

    def fails(x: Tensor, *weights: Tensor) -> Tensor:
        raise RuntimeError("out of resource: shared memory")

    def held_by_steps(fixed: Any) -> Any:
        return fixed._lease.workspace

    model = few("cpu", torch.float16)
    with (
        patch.object(few_rows, "MOST_ROWS", 8),
        patch.object(pool, "MANY_ROWS", 16),
        patch.object(few_rows, "products_in_parts", fails),
        patch.object(fixed_steps, "_compare", noted),
        torch.no_grad(),
    ):
        many, one = Pair(model, k=4), Pair(model, k=2)
        assert many.fix(8)
        assert held_by(many).fuses
        assert one.fix(8)
        assert not held_by(one).fuses
        one.agree(2, atol=0.02)
        again = Pair(model, k=4)
        assert again.fix(8)
    assert compared == [(12, True), (6, True), (6, False), (12, False)]


def check_other_threads() -> None:
    """A search that begins while another thread records a step sees the model as it is."""
    model = few("cpu", torch.float32)
    own = pool.pool_of(model)
    own.forget_if_changed(model)
    assert own.fuses
    own.verified.add((4, 16, True, False))
    with fusing.fused_layers(model):
        assert "forward" in vars(model.model.layers[0])
        own.forget_if_changed(model)
        assert own.fuses
        assert own.verified
    own.forget_if_changed(model)
    assert own.verified
    layer = model.model.layers[0]
    layer.forward = layer.forward
    own.forget_if_changed(model)
    assert not own.verified


FEW = [
    *(check_products, check_cuts, check_few_rows, check_more_rows_than_fit),
    *(check_fewer_sources, check_fusing_is_given_up, check_other_threads),
]


@pytest.mark.parametrize("check", FEW)
def test_few_rows_in_the_interpreter(check: Callable[[], None], interpreter: Interpreter) -> None:
    interpreter.run(check)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_few_rows_on_a_gpu() -> None:
    check_few_rows("cuda")


def test_layers_are_compared(interpreter: Interpreter) -> None:
    interpreter.run(check_wrong_layers)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_on_a_gpu(dtype: torch.dtype) -> None:
    """Weights that change in place are seen by recorded steps."""
    with torch.no_grad():
        model = build("llama", "cuda", dtype)
        pair = Pair(model, k=3)
        assert pair.fix(12)
        assert held_by(pair).fuses
        error = 1e-3 if dtype == torch.float32 else 0.6  # of logits that are large
        pair.agree(4, atol=error)
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        pair.agree(4, atol=error)
