"""Lets the layers of known models compute with fewer launches inside of a recorded step.

In a decoding step most of the time goes into launches and small operators between the matrix
products. For the classes in ``LAYERS``, a layer's ``forward`` is replaced while a step is recorded:
norms, rotary embeddings and gates are one kernel each (``kernels.layers``), sums are done by the
matrix products themselves, and products that do not depend on each other run side by side. For few
rows a layer is six launches (``_of_few_rows``). Weights are read where they are, so that training
in place is seen.

The first steps are compared with the model's ordinary ones (``fixed_steps``). Where they differ,
the layers compute as transformers has them, and so do layers that somebody has changed by hooks or
adapters.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cpsbs.backends.triton import kernels
from cpsbs.backends.triton.attention import DTYPES
from cpsbs.backends.triton.layers import TableLayer

LAYERS = {"LlamaDecoderLayer": ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")}
"""The classes of layers that are known, by name, with the modules that they must consist of."""


OURS = "_cpsbs_replaces_it_for_a_moment"
"""The attribute by which the functions that replace ``forward`` here are known."""


class Normed:
    """Norms of hidden states that were computed together with these, one launch before they are
    asked for: by the layer before, which adds up its output anyway.
    """

    def __init__(self) -> None:
        self._held: tuple[Any, Tensor, Tensor] | None = None

    def keep(self, norm: Any, hidden: Tensor, normed: Tensor) -> None:
        """Keep what this norm makes of the hidden states [rows, dim]."""
        self._held = norm, hidden, normed

    def take(self, norm: Any, hidden: Tensor) -> Tensor:
        """Return what this norm makes of the hidden states [rows, dim]."""
        held, self._held = self._held, None
        if held is not None and held[0] is norm and held[1].data_ptr() == hidden.data_ptr():
            return held[2]
        return _normed(hidden, norm)


_FUSING = threading.RLock()
"""Held while layers are replaced: another thread would take ours for the model's own."""


@contextlib.contextmanager
def fused_layers(model: Any) -> Iterator[bool]:
    """Replace the layers of a model that are known; yields whether there are any."""
    with _FUSING, _replaced_layers(model) as any_layers:
        yield any_layers


@contextlib.contextmanager
def _replaced_layers(model: Any) -> Iterator[bool]:
    modules = list(model.modules())
    layers = [layer for layer in modules if _is_known(layer)]
    # What normalises the output of each layer: the norm of the next one, or that of the model.
    last = _norm_after(modules, layers[-1]) if layers else None
    after = [layer.input_layernorm for layer in layers[1:]] + [last]
    normed, replaced = Normed(), list(layers)
    try:
        for layer, norm in zip(layers, after, strict=True):
            ours = functools.partial(_forward, layer, layer.forward, normed, norm)
            layer.forward = _in_this_thread(ours, layer.forward)
        if last is not None:
            ours = functools.partial(_final, last, last.forward, normed)
            last.forward = _in_this_thread(ours, last.forward)
            replaced.append(last)
        yield bool(layers)
    finally:
        for layer in replaced:
            del layer.forward


def _in_this_thread(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is ours in this thread and the original one in all others.

    Another thread may prefill with the same model meanwhile.
    """
    here = threading.get_ident()

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return (ours if threading.get_ident() == here else original)(*args, **kwargs)

    setattr(forward, OURS, True)
    return forward


def _norm_after(modules: list[Any], layer: Any) -> Any | None:
    """Return the norm that a model applies to the output of its last layer, if it is known."""
    of_layer = {id(module) for module in layer.modules()}
    kind, rest = type(layer.input_layernorm), modules[modules.index(layer) :]
    found = [x for x in rest if id(x) not in of_layer and type(x) is kind and not _is_changed(x)]
    return found[0] if len(found) == 1 else None


def _final(norm: Any, original: Callable[..., Any], normed: Normed, hidden_states: Tensor) -> Any:
    """Compute the norm of the output of the last layer, for one token of each row."""
    rows, queries, dim = hidden_states.shape
    if queries != 1 or hidden_states.dtype not in DTYPES or not hidden_states.is_contiguous():
        return original(hidden_states)
    return normed.take(norm, hidden_states.view(rows, dim)).view_as(hidden_states)


def can_fuse(model: Any) -> bool:
    """Return whether some layers of a model are known, and kernels run where it is."""
    return kernels.usable(model.device) and any(_is_known(layer) for layer in model.modules())


def _is_known(layer: Any) -> bool:
    """Return whether a layer is of a known class, and nobody has changed it."""
    names = LAYERS.get(type(layer).__name__)
    if names is None or names != tuple(sorted(dict(layer.named_children()), key=names.index)):
        return False
    if any(_is_changed(module) for module in layer.modules()):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    linears = [getattr(attention, f"{name}_proj") for name in "qkvo"]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    weights = [x.weight for x in linears]
    weights += [layer.input_layernorm.weight, layer.post_attention_layernorm.weight]
    return (
        all(type(x) is nn.Linear and x.bias is None for x in linears)
        and len({(x.dtype, x.device) for x in weights}) == 1
        and weights[0].dtype in DTYPES
        and isinstance(mlp.act_fn, nn.SiLU | _silu_class())
        and attention.config._attn_implementation == "sdpa"
        and attention.head_dim >= 2
        and attention.head_dim & (attention.head_dim - 1) == 0
    )


@functools.cache
def _silu_class() -> Any:
    """Return transformers' own class for SiLU."""
    from transformers.activations import ACT2FN

    return type(ACT2FN["silu"])


def _is_changed(module: Any) -> bool:
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or replaced_forward(module) is not None


def replaced_forward(module: Any) -> Any | None:
    """Return what somebody has put in the place of a module's ``forward``, if it is not ours."""
    found = module.__dict__.get("forward")
    return None if hasattr(found, OURS) else found


def _forward(
    layer: Any,
    original: Callable[..., Any],
    prepared: Normed,
    after: Any | None,
    hidden_states: Tensor,
    **kwargs: Any,
) -> Any:
    """Compute a layer for one token of each row; ``hidden_states`` is overwritten and returned.

    Args:
        layer: the layer.
        original: its own forward pass.
        prepared: holds the norm of the hidden states, if the layer before has computed it.
        after: what normalises the output.
        hidden_states: [rows, 1, dim]
        kwargs: what else the model passes to a layer.
    """
    rows, queries, dim = hidden_states.shape
    cos: Any
    sin: Any
    cos, sin = kwargs.get("position_embeddings") or (None, None)
    cache = kwargs.get("past_key_values")
    known = cos is not None and cos.shape[1:] == sin.shape[1:] == (1, layer.self_attn.head_dim)
    possible = known and queries == 1 and cache is not None and hidden_states.is_contiguous()
    if not possible or hidden_states.dtype != layer.mlp.up_proj.weight.dtype:
        return original(hidden_states, **kwargs)
    hidden, mask = hidden_states.view(rows, dim), kwargs.get("attention_mask")
    normed = prepared.take(layer.input_layernorm, hidden)
    if after is not None and _of_few_rows(
        layer, hidden, normed, cache, (cos[:, 0], sin[:, 0]), mask, after, prepared
    ):
        return hidden_states
    attended = _attended(layer.self_attn, normed, cache, cos, sin, mask)
    hidden.addmm_(attended, layer.self_attn.o_proj.weight.t())
    x, mlp = _normed(hidden, layer.post_attention_layernorm), layer.mlp
    gate, up = _side_by_side(x, mlp.gate_proj, mlp.up_proj)
    from cpsbs.backends.triton.kernels.layers import silu_times

    silu_times(gate, up)
    hidden.addmm_(gate, mlp.down_proj.weight.t())
    return hidden_states


def _of_few_rows(
    layer: Any,
    hidden: Tensor,
    normed: Tensor,
    cache: Any,
    angles: tuple[Tensor, Tensor],
    mask: Tensor | None,
    after: Any,
    prepared: Normed,
) -> bool:
    """Compute a layer in six launches, with products that leave their parts to what reads them.

    Returns whether that was possible; nothing has changed if it was not.
    """
    from cpsbs.backends.triton.kernels import few_rows

    attention, mlp = layer.self_attn, layer.mlp
    weights = [getattr(attention, f"{name}_proj").weight for name in "qkvo"]
    *attending, out = weights
    gate, up, down = (getattr(mlp, f"{name}_proj").weight for name in ("gate", "up", "down"))
    every = (tuple(attending), (out,), (gate,), (down,))
    contiguous = all(w.is_contiguous() for w in (*weights, gate, up, down, normed))
    slots = getattr(cache, "layers", [])
    held = slots[attention.layer_idx] if len(slots) > attention.layer_idx else None
    possible = contiguous and hidden.dtype.itemsize == 2 and isinstance(held, TableLayer)
    if not possible or not all(
        few_rows.suits(len(hidden), group[0].shape[1], *(w.shape[0] for w in group))
        for group in every
    ):
        return False
    assert isinstance(held, TableLayer)
    parts = few_rows.products_in_parts(normed, *attending)
    attended = held.attend_to_parts(parts, angles, mask, attention.scaling)
    if attended is None:
        return False
    parts = few_rows.products_in_parts(attended.view(len(hidden), -1), out)
    norm = layer.post_attention_layernorm
    normed = few_rows.add_and_normalize(parts, hidden, norm.weight, norm.variance_epsilon)
    parts = few_rows.products_in_parts(few_rows.gated_product(normed, gate, up), down)
    normed = few_rows.add_and_normalize(parts, hidden, after.weight, after.variance_epsilon)
    prepared.keep(after, hidden, normed)
    return True


def _normed(x: Tensor, norm: Any) -> Tensor:
    """Return x [rows, dim] after an RMS norm."""
    from cpsbs.backends.triton.kernels.layers import rms_norm

    out = torch.empty_like(x)
    rms_norm(x, norm.weight, norm.variance_epsilon, out)
    return out


def _attended(
    attention: Any, x: Tensor, cache: Any, cos: Tensor, sin: Tensor, mask: Tensor | None
) -> Tensor:
    """Return what the attention finds for x [rows, dim], before the last product."""
    from cpsbs.backends.triton.kernels.layers import rotate

    rows, width = len(x), attention.head_dim
    q, k, v = (
        y.view(rows, -1, width)
        for y in _side_by_side(x, attention.q_proj, attention.k_proj, attention.v_proj)
    )
    rotate(q, k, cos[:, 0], sin[:, 0])
    keys, values = cache.update(k[:, :, None], v[:, :, None], attention.layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    out, _ = attend(
        attention, q[:, :, None], keys, values, mask, dropout=0.0, scaling=attention.scaling
    )
    found: Tensor = out.reshape(rows, -1)
    return found


def _side_by_side(x: Tensor, *products: Any) -> list[Tensor]:
    """Return the products of x with several matrices, on a GPU at the same time.

    Each is too small to keep the card busy. Their results belong to the streams they were made on;
    the next products there wait until the layer has come to them, so that none is overwritten.
    """
    if x.device.type != "cuda":
        return [linear(x, product.weight) for product in products]
    current = torch.cuda.current_stream()
    beside = [_stream(current.device, i) for i in range(len(products) - 1)]
    for stream in beside:
        stream.wait_stream(current)
    found = []
    for product, stream in zip(products, [*beside, current], strict=True):
        with torch.cuda.stream(stream):
            found.append(linear(x, product.weight))
    for stream in beside:
        current.wait_stream(stream)
    return found


@functools.cache
def _stream(device: Any, number: int) -> Any:
    make: Any = torch.cuda.Stream
    return make(device)
