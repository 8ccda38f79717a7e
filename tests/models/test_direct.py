"""Steps that run the layers directly give the scores of the ordinary ones, or are not taken."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from cpsbs import Beams, TransformersModel, search
from cpsbs.backends.cpu import compiled, products
from cpsbs.models.transformers import int8
from cpsbs.models.transformers.direct import (
    attention,
    compiled_layers,
    decoder,
    encoder,
    prepared,
    steps,
)
from cpsbs.models.transformers.direct.encoding import encoded, encodes
from cpsbs.models.transformers.direct.families import UnknownArchitectureError, decoder_of
from cpsbs.models.transformers.direct.products import ACTIVATIONS, Product
from cpsbs.models.transformers.direct.slots import Slots
from cpsbs.models.transformers.int8 import quantize
from tests.models.tiny import PAD, make, prompts
from tests.models.wide import wide

DISTANT = ["t5", "gated-t5", "mt5"]
"""Families whose attention depends on distances, which torch alone does not compute here."""

FAMILIES = ["llama", "qwen2", "gpt2", "marian", "bart", *DISTANT]


@pytest.fixture(params=["compiled", "torch"])
def _either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with compiled loops, and with torch alone."""
    if request.param == "torch":
        modules = (attention, steps, compiled, products, int8, decoder, encoder, compiled_layers)
        for module in modules:
            monkeypatch.setattr(module, "library", lambda: None)
    elif compiled.library() is None:
        pytest.skip("there is no C compiler")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    prepared.PREPARED.clear()
    yield
    prepared.PREPARED.clear()


def walk(model: TransformersModel, n: int) -> Iterator[Tensor]:
    """Yield the scores of n random steps, in which rows multiply, change places and end."""
    random = torch.Generator().manual_seed(1)
    yield model.start()
    source = torch.arange(model.sources)
    for step in range(n):
        if step == 0:
            parent = source.repeat_interleave(4)
        else:
            counts = torch.bincount(source, minlength=model.sources)
            parts = []
            for s, count in enumerate(counts.tolist()):
                ended = step > 25 and s == 1
                more = 0 if ended or not count else int(torch.randint(1, 6, (1,), generator=random))
                first = int(counts[:s].sum())
                parts.append(first + torch.randint(max(count, 1), (more,), generator=random))
            parent = torch.cat(parts)
        source = source[parent]
        yield model.advance(parent, torch.randint(2, 30, (len(parent),), generator=random))


def runs_directly(name: str) -> bool:
    """Return whether the layers of a model are run directly, in tests with and without compiler."""
    return compiled.library() is not None or name not in DISTANT


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_the_scores_are_those_of_the_ordinary_steps(name: str) -> None:
    """Over more steps than slots are kept for, with sources that end and prompts with padding."""
    model = wide(name)
    direct, ordinary = (TransformersModel(model, **prompts(model)) for _ in range(2))
    ordinary._may_be_direct = False
    for found, expected in zip(walk(direct, 40), walk(ordinary, 40), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (direct._direct is not None) == runs_directly(name)
    assert ordinary._direct is None
    # A second search begins anew.
    for found, expected in zip(walk(direct, 3), walk(ordinary, 3), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("k", [1, 5])
def test_a_search_finds_the_same(name: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide(name)
    eos = list(range(1, 9))

    def run() -> Any:
        wrapped = TransformersModel(model, **prompts(model), eos_token_id=eos)
        return search(wrapped, k, max_length=40, generator=3), wrapped

    found, wrapped = run()
    direct = wrapped._direct is not None
    assert direct == runs_directly(name) or int(found.lengths.max()) == 1
    monkeypatch.setattr(TransformersModel, "_runs_directly", lambda _: False)
    expected, other = run()
    assert other._direct is None
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.log_prob, expected.log_prob, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("name", ["marian", "bart", *DISTANT])
def test_the_states_are_those_of_the_encoder(name: str) -> None:
    model = wide(name)
    given = dict(prompts(model))
    # Longer than the reach of distances.
    more = torch.randint(2, 30, (3, 60), generator=torch.Generator().manual_seed(0))
    given["input_ids"] = torch.cat([more[:, :30], given["input_ids"]], dim=1)
    given["attention_mask"] = torch.cat([torch.ones_like(more[:, :30]), given["attention_mask"]], 1)
    found, mask = encoded(model, **given_states(given)), given["attention_mask"].bool()
    expected = model.get_encoder()(**given).last_hidden_state.detach()
    assert (found is not None) == runs_directly(name)
    if found is None:
        return
    assert not bool(mask.all())
    torch.testing.assert_close(found[mask], expected[mask], rtol=1e-4, atol=1e-4)
    assert not bool(found[~mask].any())


@pytest.mark.parametrize("change", ["hook", "no mask", "embeddings", "nothing", "causal model"])
def test_an_encoder_with_unusual_inputs_is_that_of_transformers(change: str) -> None:
    model = wide("llama" if change == "causal model" else "marian")
    given = dict(prompts(model))
    if change == "hook":
        model.model.encoder.layers[0].register_forward_hook(lambda *_: None)
    elif change == "no mask":
        del given["attention_mask"]
    elif change == "embeddings":
        given["inputs_embeds"] = torch.zeros((3, 4, 64))
    elif change == "nothing":
        given["attention_mask"] = torch.zeros_like(given["attention_mask"])
    assert not encodes(model, given) or encoded(model, **given_states(given)) is None


def given_states(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs of ``generate`` as arguments of ``encoded``."""
    return {"tokens": given["input_ids"], "mask": given["attention_mask"]}


@pytest.mark.parametrize("change", ["nothing", "hook"])
def test_an_encoder_runs_when_the_search_starts(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that searches runs it, and transformers does if it cannot be run any more."""
    model, threads = wide("marian"), []
    right = encoder.Encoder.states

    def states(*given: Any) -> Tensor:
        threads.append(threading.current_thread())
        return right(*given)

    monkeypatch.setattr(encoder.Encoder, "states", states)
    wrapped = TransformersModel(model, **prompts(model))
    assert not threads
    if change == "hook":
        model.model.encoder.layers[0].register_forward_hook(lambda *_: None)
    first: list[Tensor] = []
    begun = threading.Thread(target=lambda: first.append(wrapped.start().detach()))
    begun.start()
    begun.join()
    assert set(threads) == (set() if change == "hook" else {begun})
    torch.testing.assert_close(
        first[0], TransformersModel(wide("marian"), **prompts(model)).start()
    )


def test_wrong_states_are_noticed_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = encoder.Encoder.states
    model = wide("marian")
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, logger="cpsbs"):
        patch.setattr(encoder.Encoder, "states", lambda *x: right(*x) * 1.01)
        _, found = steps_of(model)
    assert "the states of the encoder differ by 0.01" in caplog.text
    torch.testing.assert_close(found, steps_of(wide("marian"))[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_all_layers_are_one_call_where_their_parts_are_compiled(name: str) -> None:
    library: Any = compiled.library()
    if library is None:
        pytest.skip("there is no C compiler")
    direct = steps_of(wide(name))[0]._direct
    assert direct is not None
    assert (direct._decoder.compiled is not None) == bool(library.multiplies_floats())


@pytest.mark.parametrize("change", ["window", "rotation", "biases"])
def test_what_steps_of_ours_do_not_do_is_noticed(
    change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The first steps would not show it: a prefix must be long for it to count."""
    model = wide("t5" if change == "biases" else "qwen2")
    if change == "window":
        model.config.sliding_window = 8
        model.config.layer_types = ["full_attention", "sliding_attention"]
    elif change == "rotation":
        model.model.rotary_emb.rope_type = "dynamic"
    else:
        model.decoder.block[1].layer[0].SelfAttention.has_relative_attention_bias = True
    with caplog.at_level(logging.INFO, logger="cpsbs"), pytest.raises(UnknownArchitectureError):
        decoder_of(model)


def test_padding_between_tokens_counts_where_distances_do() -> None:
    """Rows of an encoder know which tokens of their sources they are, but not what lies between."""
    if compiled.library() is None:
        pytest.skip("there is no C compiler")
    for name, possible in (("t5", False), ("marian", True)):
        model = wide(name)
        given = dict(prompts(model))
        tokens = torch.randint(2, 30, (2, 9), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(tokens)
        assert encoded(model, tokens, mask) is not None
        mask[1, 2:4] = 0
        assert (encoded(model, tokens, mask) is not None) == possible
        given = {"input_ids": tokens, "attention_mask": mask}
        direct, ordinary = (TransformersModel(model, **given) for _ in range(2))
        ordinary._may_be_direct = False
        with torch.no_grad():
            torch.testing.assert_close(direct.start(), ordinary.start(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_large_products_are_left_to_the_threads_of_torch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = steps_of(wide(name))[1]
    monkeypatch.setattr(products, "PARALLEL", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    if compiled.library() is not None:
        monkeypatch.setattr(products.PackedProduct, "__call__", None)
    torch.testing.assert_close(steps_of(wide(name))[1], alone, rtol=1e-4, atol=1e-4)


def test_processors_see_the_whole_prefix() -> None:
    model, seen = wide("marian"), []

    def note(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(ids.clone())
        return scores

    inputs = prompts(model)
    wrapped = TransformersModel(model, logits_processor=[note], **inputs)
    beams = search(wrapped, 3, max_length=6, generator=0)
    assert wrapped._direct is not None
    assert not wrapped.concurrent
    known = {tuple(row) for ids in seen for row in ids.tolist()}
    first = beams.sequences[0, 0, :3].tolist()
    assert (PAD, *first) in known


def steps_of(model: Any, **changes: Any) -> tuple[TransformersModel, Tensor]:
    wrapped = TransformersModel(model, **prompts(model), **changes)
    with torch.no_grad():
        wrapped.start()
        scores = wrapped.advance(torch.tensor([0, 1, 2]), torch.tensor([5, 6, 7]))
    return wrapped, scores


@pytest.mark.parametrize(
    "change", ["small heads", "hook", "float64", "module", "forward", "own mask"]
)
def test_what_is_unusual_takes_ordinary_steps(
    change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With one line in the log, however many searches there are."""
    model, given = make("t5") if change == "small heads" else wide("marian"), {}
    layer: Any = None if change == "small heads" else model.model.decoder.layers[0]
    if change == "hook":
        layer.register_forward_hook(lambda *_: None)
    elif change == "float64":
        model = model.double()
    elif change == "module":
        layer.fc1 = torch.nn.Sequential(layer.fc1, Twice()).eval()
    elif change == "forward":
        layer.fc1.forward = lambda x: torch.zeros(*x.shape[:-1], 48)
    elif change == "own mask":
        given = {"decoder_attention_mask": torch.ones((3, 1), dtype=torch.int64)}
    with caplog.at_level(logging.INFO, logger="cpsbs"):
        for _ in range(2):
            assert steps_of(model, **given)[0]._direct is None
    said = [r.message for r in caplog.records if "ordinary steps of transformers" in r.message]
    assert len(said) == 1
    assert type(model).__name__ in said[0]


class Twice(torch.nn.Module):
    """A layer that is not of transformers."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_wrong_steps_are_noticed_and_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = decoder.Decoder.step
    monkeypatch.setattr(decoder.Decoder, "step", lambda *x: right(*x) * 1.01)
    with caplog.at_level(logging.INFO, logger="cpsbs"):
        wrapped, found = steps_of(wide("marian"))
    assert wrapped._direct is None
    assert "log-probabilities differ by" in caplog.text
    monkeypatch.undo()
    torch.testing.assert_close(found, steps_of(wide("marian"))[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("what", ["hook", "hook before", "forward"])
@pytest.mark.parametrize("name", ["marian", "llama"])
def test_what_is_hooked_later_is_noticed(name: str, what: str) -> None:
    """After a search that ran the layers directly."""
    model = wide(name)
    assert steps_of(model)[0]._direct is not None
    layer = (model.model.decoder if name == "marian" else model.model).layers[0]
    feed: Any = layer.fc2 if name == "marian" else layer.mlp.down_proj
    right = feed.forward
    if what == "hook":
        handle = feed.register_forward_hook(lambda *x: 0.3 * x[2])
    elif what == "hook before":
        handle = feed.register_forward_pre_hook(lambda _, x: (0.3 * x[0],))
    else:
        feed.forward = lambda x: 0.3 * right(x)
    wrapped, found = steps_of(model)
    assert wrapped._direct is None
    hooked = wide(name)
    layer = (hooked.model.decoder if name == "marian" else hooked.model).layers[0]
    other: Any = layer.fc2 if name == "marian" else layer.mlp.down_proj
    with torch.no_grad():
        other.weight.mul_(0.3)
        if other.bias is not None and what != "hook before":
            other.bias.mul_(0.3)
    torch.testing.assert_close(found, steps_of(hooked)[1], rtol=1e-3, atol=1e-3)
    if what == "forward":
        del feed.forward
    else:
        handle.remove()
    assert steps_of(model)[0]._direct is not None


def test_one_search_that_fails_is_no_reason_to_give_up() -> None:
    """Encoder states of another dtype, and a source with tokens that there are not."""
    model = wide("marian")
    given: Any = prompts(model)
    with torch.no_grad():
        states = model.get_encoder()(**given).last_hidden_state.double()
    given = {"encoder_outputs": BaseModelOutput(states), "attention_mask": given["attention_mask"]}
    assert steps_of(model)[0]._direct is not None
    with pytest.raises(RuntimeError), torch.no_grad():
        TransformersModel(model, **given).start()
    assert steps_of(model)[0]._direct is not None
    prepared.PREPARED.clear()
    wrong = prompts(model)
    wrong["input_ids"] = wrong["input_ids"] + 1000
    with pytest.raises(IndexError), torch.no_grad():
        TransformersModel(model, **wrong).start()
    assert steps_of(model)[0]._direct is not None
    assert prepared.PREPARED[model].encoder is not None


def _wrap(model: Any) -> None:
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def _holding(model: Any) -> Callable[..., None]:
    def hook(*given: object) -> None:
        assert model is not None

    return hook


CHANGES: dict[str, Callable[[Any], object]] = {
    "none": lambda model: None,
    "another forward": _wrap,
    "its own forward": lambda model: setattr(model, "forward", model.forward),
    "a hook": lambda model: model.register_forward_hook(_holding(model)),
    "a layer's hook": lambda model: model.model.layers[0].register_forward_pre_hook(
        _holding(model)
    ),
}
"""What may refer to the model that it belongs to."""


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_known_of_a_model_does_not_keep_it_alive(change: str) -> None:
    model = wide("llama")
    CHANGES[change](model)
    search(TransformersModel(model, **prompts(model)), 3, max_length=4, generator=0)
    assert model in prepared.PREPARED
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert not prepared.PREPARED


def test_a_search_at_the_last_position_says_nothing_of_others() -> None:
    """There the model's own steps fail, with which direct ones are compared."""
    model = wide("gpt2")
    ids = torch.full((1, model.config.n_positions - 1), 3)
    wrapped = TransformersModel(model, input_ids=ids, attention_mask=torch.ones_like(ids))
    assert search(wrapped, 2, max_length=2, generator=0).present.all()
    assert prepared.PREPARED[model].decoder is not None
    assert not prepared.PREPARED[model].verified
    assert steps_of(model)[0]._direct is not None


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_positions_that_are_given_count(name: str) -> None:
    """Whether or not the model has been compared before, and for that search alone."""
    model = wide(name)
    given = {**prompts(model), "position_ids": 3 * torch.arange(4).expand(3, 4)}
    ordinary = TransformersModel(model, **given)
    ordinary._may_be_direct = False
    expected = search(ordinary, 3, "top-k", max_length=6)
    for _ in range(2):
        found = search(TransformersModel(model, **given), 3, "top-k", max_length=6)
        assert torch.equal(found.sequences, expected.sequences)
        torch.testing.assert_close(found.log_prob, expected.log_prob)
        assert steps_of(model)[0]._direct is not None


def test_a_model_in_training_or_with_gradients_takes_ordinary_steps() -> None:
    model = wide("marian")
    wrapped = TransformersModel(model, **prompts(model))
    wrapped.start()
    scores = wrapped.advance(torch.tensor([0, 1, 2]), torch.tensor([5, 6, 7]))
    assert wrapped._direct is None
    assert scores.requires_grad
    model.train()
    assert steps_of(model)[0]._direct is None


@pytest.mark.parametrize("way", ["in place", "data", "replaced"])
def test_new_weights_are_noticed(way: str) -> None:
    model = wide("llama")
    before = steps_of(model)[1]
    weight = model.model.layers[1].mlp.up_proj.weight
    if way == "in place":
        with torch.no_grad():
            weight.mul_(-1)
    elif way == "data":
        weight.data *= -1
    else:
        model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(-weight.detach())
    wrapped, after = steps_of(model)
    assert wrapped._direct is not None
    assert not torch.allclose(before, after)
    prepared.PREPARED.clear()
    torch.testing.assert_close(after, steps_of(model)[1])


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_new"])
def test_gates_are_those_of_torch(activation: str) -> None:
    """Also where a row is no multiple of the numbers of a vector."""
    random = torch.Generator().manual_seed(0)
    for size in (1, 15, 16, 48, 50):
        x = 5 * torch.randn((3, 2 * size), generator=random)
        gate, value = x.chunk(2, dim=-1)
        found = products.gated_rows(x, activation)
        if found is None:
            pytest.skip("there is no C compiler")
        torch.testing.assert_close(found, ACTIVATIONS[activation][2](gate) * value)


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu", "gelu_new"])
@pytest.mark.parametrize("copy", [False, True])
def test_products_are_those_of_torch(activation: str | None, copy: bool) -> None:
    random = torch.Generator().manual_seed(0)
    x, first, second, bias, residual = (
        torch.randn(shape, generator=random)
        for shape in ((7, 24), (10, 24), (6, 24), (6,), (7, 16))
    )
    product = Product([(first, None), (second, bias)], activation, copy)
    wanted = x @ torch.cat([first, second]).T + torch.cat([torch.zeros(10), bias])
    if activation is None:
        torch.testing.assert_close(product(x, residual), wanted + residual)
        product.add_bias(torch.ones(16))
        torch.testing.assert_close(product(x), wanted + 1)
    else:
        kinds = {
            "relu": torch.relu,
            "silu": torch.nn.functional.silu,
            "gelu": torch.nn.functional.gelu,
            "gelu_new": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
        }
        torch.testing.assert_close(product(x), kinds[activation](wanted))


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("name", ["marian", "gpt2"])
def test_int8_steps_are_close_to_those_in_float32(name: str) -> None:
    """And they are those of the model's own forward pass, with the same int8 products."""
    exact = steps_of(wide(name))[1].log_softmax(-1)
    model = wide(name)
    quantize(model)
    wrapped, scores = steps_of(model)
    assert wrapped._direct is not None
    found = scores.log_softmax(-1)
    assert float((exact.exp() * (found - exact).abs()).sum(-1).max()) < 0.2
    assert not torch.equal(found, exact)
    wrapped = TransformersModel(model, **prompts(model))
    wrapped._may_be_direct = False
    with torch.no_grad():
        wrapped.start()
        own = wrapped.advance(torch.tensor([0, 1, 2]), torch.tensor([5, 6, 7])).log_softmax(-1)
    assert float((own.exp() * (found - own).abs()).sum(-1).max()) < 0.1


def test_defaults_of_torch_change_nothing() -> None:
    """Compiled functions write to addresses, so that every buffer must be what they take it for."""
    for kind in ("marian", "llama"):
        model = wide(kind)
        inputs = prompts(model)

        def found(inputs: Any = inputs, model: Any = model) -> Beams:
            return search(
                TransformersModel(model, **inputs), 3, "conditional-poisson",
                max_length=12, generator=0,
            )  # fmt: skip

        expected = found()
        dtype, device = torch.get_default_dtype(), torch.get_default_device()
        try:
            torch.set_default_dtype(torch.float64)
            again = found()
            torch.set_default_dtype(dtype)
            torch.set_default_device("meta")
            elsewhere = found()
        finally:
            torch.set_default_dtype(dtype)
            torch.set_default_device(device)
        for other in (again, elsewhere):
            assert torch.equal(other.sequences, expected.sequences)
            torch.testing.assert_close(other.log_prob, expected.log_prob, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["marian", "llama"])
def test_the_layout_of_a_mask_changes_nothing(kind: str) -> None:
    model = wide(kind)
    inputs = prompts(model)
    mask = inputs["attention_mask"]
    expected, found = (
        search(
            TransformersModel(model, **{**inputs, "attention_mask": given}),
            3, max_length=8, generator=0,
        )
        for given in (mask, mask.T.contiguous().T)
    )  # fmt: skip
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(found.log_prob, expected.log_prob)


def test_an_empty_source_takes_ordinary_steps() -> None:
    model = wide("marian")
    inputs = prompts(model)
    search(TransformersModel(model, **inputs), 2, max_length=4, generator=0)  # is compared
    mask = inputs["attention_mask"].clone()
    mask[1] = 0
    found = search(
        TransformersModel(model, **{**inputs, "attention_mask": mask}),
        2, max_length=4, generator=0,
    )  # fmt: skip
    assert bool(found.log_prob.isfinite().all())


def test_rows_out_of_order_are_refused() -> None:
    """Otherwise several rows would get the same slot."""
    prompt = [(torch.zeros((3, 2, 4, 16)), torch.zeros((3, 2, 4, 16)))]
    slots = Slots(prompt, torch.ones((3, 4), dtype=torch.bool))
    with pytest.raises(ValueError, match="out of the order of their sources"):
        slots.advance(torch.tensor([2, 0, 1]))
