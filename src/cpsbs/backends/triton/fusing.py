"""Lets the layers of known models compute with fewer launches inside of a recorded step.

In a decoding step most of the time goes into launches and small operators between the matrix
products. For the classes in ``LAYERS``, a layer's ``forward`` is replaced while a step is recorded:
norms, rotary embeddings and gates are one kernel each (``kernels.layers``), sums are done by the
matrix products themselves, and products that do not depend on each other run side by side. Weights
are read where they are, so that training in place is seen.

The first steps are compared with the model's ordinary ones (``fixed_steps``). Where they differ,
the layers compute as transformers has them, and so do layers that somebody has changed by hooks or
adapters.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cpsbs.backends.triton import kernels
from cpsbs.backends.triton.attention import DTYPES

LAYERS = {"LlamaDecoderLayer": ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")}
"""The classes of layers that are known, by name, with the modules that they must consist of."""


@contextlib.contextmanager
def fused_layers(model: Any) -> Iterator[bool]:
    """Replace the layers of a model that are known; yields whether there are any."""
    replaced = [layer for layer in model.modules() if _is_known(layer)]
    try:
        for layer in replaced:
            layer.forward = functools.partial(_forward, layer, layer.forward)
        yield bool(replaced)
    finally:
        for layer in replaced:
            del layer.forward


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
    return bool(hooks) or "forward" in module.__dict__


def _forward(layer: Any, original: Callable[..., Any], hidden_states: Tensor, **kwargs: Any) -> Any:
    """Compute a layer for one token of each row; ``hidden_states`` is overwritten and returned."""
    rows, queries, dim = hidden_states.shape
    cos: Any
    sin: Any
    cos, sin = kwargs.get("position_embeddings") or (None, None)
    cache = kwargs.get("past_key_values")
    known = cos is not None and cos.shape[1:] == sin.shape[1:] == (1, layer.self_attn.head_dim)
    possible = known and queries == 1 and cache is not None and hidden_states.is_contiguous()
    if not possible or hidden_states.dtype != layer.mlp.up_proj.weight.dtype:
        return original(hidden_states, **kwargs)
    hidden = hidden_states.view(rows, dim)
    attended = _attended(
        layer.self_attn, _normed(hidden, layer.input_layernorm), cache, cos, sin,
        kwargs.get("attention_mask"),
    )  # fmt: skip
    hidden.addmm_(attended, layer.self_attn.o_proj.weight.t())
    x, mlp = _normed(hidden, layer.post_attention_layernorm), layer.mlp
    gate, up = _side_by_side(x, mlp.gate_proj, mlp.up_proj)
    from cpsbs.backends.triton.kernels.layers import silu_times

    silu_times(gate, up)
    hidden.addmm_(gate, mlp.down_proj.weight.t())
    return hidden_states


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
