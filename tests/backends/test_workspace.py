"""A cache by table is the cache by rows, and what cannot be read by table is noticed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from cpsbs import TransformersModel
from cpsbs.backends import backend_for
from cpsbs.backends.triton import attention
from cpsbs.backends.triton.layers import Clock, RowLayer
from cpsbs.backends.triton.logits import Logits
from cpsbs.backends.triton.pool import Pool
from cpsbs.backends.triton.reorder import reorder_by_copy
from cpsbs.models.transformers.direct import prepared
from tests.backends.interpreted import Interpreter
from tests.backends.test_fixed_steps import NAMES, K, Pair, V, build, gpu, held_by
from tests.models.tiny import prompts


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Notes(logging.Handler):
    """What is logged, where there is no pytest, but for why a CPU does not run layers directly."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        log = logging.getLogger("cpsbs")
        log.setLevel(logging.INFO)
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.module != prepared.__name__.rpartition(".")[2]:
            self.found.append(record.getMessage())


# ---------------------------------------------------------------------- in Triton's interpreter


def check_model(name: str) -> None:
    """With other parents in every step, prompts of other lengths, and fewer sources."""
    pair = Pair(build(name, dtype=torch.float32), k=2)
    assert pair.fix(40)
    first = held_by(pair)
    assert first.fuses == (name == "llama")
    if pair.fixed._is_encoder_decoder:
        assert first.cross.shape[1] == 3
    pair.agree(3, atol=1e-4)
    pair.keep(0, 2)
    pair.agree(1, atol=1e-4)
    pair.keep(1)
    pair.agree(1, atol=1e-4)
    assert first.by_table
    assert held_by(pair).by_table
    # What lies by table can always be put into rows.
    held_by(pair)._leave_table()
    pair.agree(1, atol=1e-4)


def check_two_windows() -> None:
    """Over more tokens than the first window holds; what is not read need not be finite."""
    model = build("llama", dtype=torch.float32)
    pair = Pair(model)
    inputs = {name: torch.nn.functional.pad(x, (24, 0)) for name, x in pair.inputs.items()}
    pair.ordinary, pair.fixed = (TransformersModel(model, **inputs) for _ in range(2))
    pair.ordinary.start(), pair.fixed.start()
    assert pair.fix(10)
    held_by(pair).states[:, 1::3] = torch.nan
    held_by(pair).states[:, :, :, 28:] = torch.nan
    pair.agree(10, atol=1e-4)
    assert held_by(pair).by_table
    assert sorted(held_by(pair).graphs) == [32, 64]


def check_k_of_1() -> None:
    for name in ("gpt2", "marian"):
        pair = Pair(build(name, dtype=torch.float32), k=1)
        assert pair.fix(20)
        pair.agree(3, atol=1e-4)
        assert held_by(pair).by_table


def check_what_is_kept_by_rows() -> None:
    said = Notes()
    for dtype, how in ((torch.float64, "sdpa"), (torch.float32, "eager")):
        model = build("marian", dtype=dtype)
        model.set_attn_implementation(how)
        pair = Pair(model)
        assert pair.fix(20)
        pair.agree(2, atol=1e-4)
        assert not held_by(pair).by_table

    def other(*args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("sdpa", other)
    pair = Pair(build("marian", dtype=torch.float32))
    assert pair.fix(20)
    assert not held_by(pair).by_table
    AttentionInterface.register("sdpa", sdpa_attention_forward)
    assert not said.found


def check_a_model_that_reads_its_cache_itself() -> None:
    """One of its layers, from the beginning or from some step on; in the cross-attention too."""
    module: Any = attention
    original = module._if_possible
    said = Notes()
    for name, late, layers, which in (
        *(("llama", False, 2, 0), ("llama", True, 2, 1)),
        *(("t5", False, 4, 3), ("t5", True, 4, 2)),
    ):
        calls = 0

        def sometimes(*args: Any, n: tuple[int, int] = (layers, which), **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return None if calls % n[0] == n[1] else original(*args, **kwargs)

        if not late:
            module._if_possible = sometimes
        model = build(name, dtype=torch.float32)
        pair = Pair(model)
        assert pair.fix(20)
        if late:
            assert held_by(pair).by_table
            pair.agree(2, atol=1e-4)
            module._if_possible = sometimes
        pair.agree(2, atol=1e-4)
        assert not held_by(pair).by_table
        pair.keep(0, 2)
        pair.agree(1, atol=1e-4)
        module._if_possible = original
        # It is not tried again with this model.
        again = Pair(model, k=2)
        assert again.fix(20)
        assert not held_by(again).by_table
        assert len(said.found) == 1, said.found
        assert "reads its cache itself; its rows are moved" in said.found.pop()


def check_keys_that_are_read_twice() -> None:
    """Or never: whatever happens to them otherwise than once, by the kernel, is noticed."""
    pair = Pair(build("llama", dtype=torch.float32))
    assert pair.fix(20)
    layer: Any = held_by(pair).held[0]
    new = torch.randn(9, 2, 1, 8)
    query = torch.randn(9, 4, 1, 8)
    layer.begin()
    assert layer.was_read()
    key, value = layer.update(new, new)
    assert key.isnan().all()
    assert not layer.is_shown_as(value, key)
    assert not layer.is_shown_as(key[:], value)
    assert not layer.was_read()
    layer.attend(query, None, None, None)
    assert layer.was_read()
    assert not layer.is_shown_as(key, value)
    layer.update(new, new)
    layer.attend(query, None, None, None)
    assert not layer.was_read()
    layer.begin()
    layer.update(new.double(), new.double())
    assert layer.attend(query, None, None, None) is None
    assert not layer.was_read()


def check_moves(device: str = "cpu") -> None:
    """By table and in place, at positions that differ; twice the same, on a GPU."""
    from cpsbs.backends.triton.kernels.cache import advance, move

    torch.manual_seed(0)
    for k, heads, capacity, dim in ((5, 2, 32, 4), (1, 1, 64, 8), (20, 2, 64, 6), (99, 1, 32, 8)):
        states = torch.randn(2, 3 * k, heads, capacity, dim, device=device)
        parent = torch.randint(k, (3, k), device=device)
        position = torch.tensor([0, capacity - 1, 7], device=device)
        copied = states.clone()
        reorder_by_copy(copied, parent, capacity)
        place = torch.randint(k, (3, k, capacity), device=device, dtype=torch.int32)
        gathered = place.gather(1, parent[..., None].expand_as(place))
        for _ in range(3):
            found, table = states.clone(), place.clone()
            mask = torch.full((3 * k, 1, 1, capacity), -1.0, device=device)
            move(found, parent, position, capacity)
            advance(table, mask, parent, position, capacity)
            for source, here in enumerate(position.tolist()):
                rows = slice(source * k, (source + 1) * k)
                assert torch.equal(found[:, rows, :, :here], copied[:, rows, :, :here])
                assert torch.equal(found[:, rows, :, here:], states[:, rows, :, here:])
                assert torch.equal(table[source, :, :here], gathered[source, :, :here])
                assert table[source, :, here].tolist() == list(range(k))
                assert torch.equal(table[source, :, here + 1 :], place[source, :, here + 1 :])
                assert bool((mask[rows, 0, 0, here] == 0).all())
            assert int((mask == 0).sum()) == 3 * k


def check_sums(device: str = "cpu") -> None:
    from cpsbs.backends.triton.kernels.logits import add_bias

    for rows, tokens in ((3, 5000), (2, 4099)):
        for dtype in (torch.float16, torch.float32):
            logits = torch.randn(rows, tokens, device=device).to(dtype)
            bias = torch.randn(tokens, device=device).to(dtype)
            found = torch.empty_like(logits)
            add_bias(found, logits, bias)
            assert torch.equal(found, logits + bias)


@pytest.mark.parametrize("name", NAMES)
def test_models_in_the_interpreter(name: str, interpreter: Interpreter) -> None:
    interpreter.run(check_model, name)


@pytest.mark.parametrize(
    "check",
    [
        check_two_windows,
        check_k_of_1,
        check_what_is_kept_by_rows,
        check_a_model_that_reads_its_cache_itself,
        check_keys_that_are_read_twice,
        check_moves,
        check_sums,
    ],
)
def test_in_the_interpreter(check: Callable[[], None], interpreter: Interpreter) -> None:
    interpreter.run(check)


# ---------------------------------------------------------------------- anywhere


def test_without_a_device_rows_are_moved() -> None:
    pair = Pair(build("llama", dtype=torch.float32))
    assert pair.fix(5)
    assert not held_by(pair).by_table


def test_rows_are_written_where_their_source_stands() -> None:
    states = torch.zeros(2, 4, 2, 8, 3)
    layer: Any = RowLayer(states[0], states[1], Clock(torch.tensor([2, 5]), 6, own_positions=False))
    new = torch.randn(2, 4, 2, 1, 3)
    key, value = layer.update(new[0], new[1])
    assert key.shape == value.shape == (4, 2, 6, 3)
    expected = torch.zeros_like(states)
    expected[:, :2, :, 2], expected[:, 2:, :, 5] = new[:, :2, :, 0], new[:, 2:, :, 0]
    assert torch.equal(states, expected)


def copies(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the logits of each step had to be copied."""
    found = []
    keep = Logits.keep

    def noted(self: Logits, logits: Tensor) -> None:
        at = None if self.scores is None else self.scores.data_ptr()
        found.append(at != logits.data_ptr())
        keep(self, logits)

    monkeypatch.setattr(Logits, "keep", noted)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_computed_where_they_are_wanted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = copies(monkeypatch)
    pair = Pair(build(name))
    assert pair.fix(5)
    pair.agree(2)
    assert found[0]
    assert not any(found[1:])


@pytest.mark.parametrize("how", ["scaled", "later", "bias"])
def test_logits_that_are_something_else_are_copied(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the product, or by another operation than before."""
    found = copies(monkeypatch)
    model = build("marian")
    pair = Pair(model)
    changed = how == "scaled"

    def scale(module: Any, args: Any, output: Any) -> None:
        if changed:
            output.logits = output.logits * 2
            if how == "later":
                output.logits = output.logits + output.logits.new_ones(V)

    model.register_forward_hook(scale)
    if how == "bias":
        model.final_logits_bias = model.final_logits_bias.expand(2, V)[:1]
    pair = Pair(model)
    assert pair.fix(9)
    pair.agree(2)
    changed = how != "bias"
    pair.agree(2)
    assert found[-1] == (how != "bias")


def test_a_change_of_the_model_is_noticed() -> None:
    model = build("marian")
    pool = Pool()

    def changes() -> bool:
        pool.forget_if_changed(model)
        was = bool(pool.verified)
        pool.verified.add((1, 1, False, False))
        return not was

    assert changes()
    assert not changes()
    handle = model.lm_head.register_forward_hook(lambda *args: None)
    assert changes()
    handle.remove()
    assert changes()
    handle = model.lm_head.register_forward_pre_hook(lambda *args: None)
    assert changes()
    handle.remove()
    assert changes()
    model.to(torch.float32)
    assert changes()
    layer = model.model.decoder.layers[0]
    layer.fc1.weight = torch.nn.Parameter(layer.fc1.weight.clone())
    assert changes()
    layer.activation_fn = torch.nn.Tanh()
    assert changes()
    layer.fc1._active_adapter = ["one"]
    assert changes()
    layer.fc1._active_adapter = ["two"]
    assert changes()
    layer.fc1._disable_adapters = True
    assert changes()
    layer.forward = layer.forward
    assert changes()
    model.final_logits_bias = model.final_logits_bias.clone()
    assert changes()
    model.set_attn_implementation("eager")
    assert changes()
    assert not changes()


# ---------------------------------------------------------------------- only on a GPU


@gpu
def test_the_kernels_on_a_gpu() -> None:
    check_moves("cuda")
    check_sums("cuda")


@gpu
@pytest.mark.parametrize("name", NAMES)
def test_by_table_on_a_gpu(name: str) -> None:
    """In float32, against the same search by rows; every window is recorded."""
    model = build(name, "cuda", torch.float32)
    pair = Pair(model)
    assert pair.fix(40)
    assert held_by(pair).by_table
    pair.agree(20, atol=2e-2)
    pair.keep(0, 2)
    pair.agree(8, atol=2e-2)
    assert held_by(pair).by_table
    assert all(graph is not None for graph in held_by(pair).graphs.values())
    held_by(pair)._leave_table()
    pair.agree(4, atol=2e-2)
    assert not attention._state.broken


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_attention_that_changes_between_windows(how: str, dtype: torch.dtype) -> None:
    """What is recorded stays; what is recorded later reads the cache itself."""
    if how == "eager" and dtype == torch.float64:
        pytest.skip("the eager attention of transformers has no float64")
    model = build("marian", "cuda", dtype)
    inputs = {name: x.cuda() for name, x in prompts(model).items()}
    fixed, ordinary = (TransformersModel(model, **inputs) for _ in range(2))
    fixed.start(), ordinary.start()
    assert fixed.fix_rows(K, 40, backend_for("cuda"))
    parent = torch.zeros((3, K), dtype=torch.int64, device="cuda")
    row = torch.arange(3, device="cuda")
    for n in range(40):
        if n == 10:
            model.set_attn_implementation(how)
        token = torch.full_like(parent, 3 + n % 20)
        found = fixed.step(parent, token)[::K].float().log_softmax(-1)
        expected = ordinary.advance(row, token[:, 0]).log_softmax(-1)
        assert float((expected.exp() * (found - expected).abs()).sum(-1).max()) < 0.1
