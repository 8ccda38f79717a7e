"""Where the parts of a decoder are in the models of transformers: a table of names.

A family names the modules of one architecture. What transformers does with them is written in
``decoder``; ``steps`` compares the result with the model's own forward pass before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, silu

from cpsbs.models.transformers.direct.attention import Heads
from cpsbs.models.transformers.direct.decoder import Decoder
from cpsbs.models.transformers.direct.encoder import Encoder
from cpsbs.models.transformers.direct.layers import (
    Cross,
    Embed,
    Embedding,
    Layer,
    LayerNorm,
    Norm,
    UpAndDown,
)
from cpsbs.models.transformers.direct.products import ACTIVATIONS, Product, product_of
from cpsbs.models.transformers.int8 import Int8Linear

MOST_COPIED = 2**30
"""The most bytes of weights that are copied into another layout; larger models are used as they
are."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class UnknownArchitectureError(Exception):
    """A model cannot be run directly; the message says why."""


def decoder_of(model: Any) -> Decoder:
    """Return the prepared parts of a model's decoder.

    Raises:
        UnknownArchitectureError: if the model is not one that the table knows, or is not as
            transformers made it.
    """
    kind = type(model)
    family = FAMILIES.get(kind.__name__)
    if family is None or not kind.__module__.startswith("transformers."):
        raise UnknownArchitectureError("its architecture is not in the table")
    _refuse_changed(model)
    return family(model)


def has_encoder(model: Any) -> bool:
    """Return whether a model has an encoder of an architecture that the table knows."""
    return type(model).__name__ in ENCODERS


def encoder_of(model: Any) -> Encoder | None:
    """Return the prepared parts of the encoder of a model that ``decoder_of`` knows, if it has one.

    None too if the architecture of its encoder is not in the table.
    """
    family = ENCODERS.get(type(model).__name__)
    return None if family is None else family(model)


def _refuse_changed(model: nn.Module) -> None:
    """Raise if some module is not one of transformers or torch, or has hooks."""
    for name, module in model.named_modules():
        own = type(module).__module__.startswith(("transformers.models.", "torch.nn.modules."))
        known = own or isinstance(module, Int8Linear) or _is_plain(module)
        hooked = any(getattr(module, hooks) for hooks in HOOKS) or "forward" in vars(module)
        if not known or hooked or hasattr(module, "parametrizations"):
            what = "has hooks" if hooked else f"is a {type(module).__name__}"
            raise UnknownArchitectureError(f"its module {name} {what}")
    numbers = {x.dtype for x in model.parameters() if x.is_floating_point()}
    if numbers != {torch.float32}:
        raise UnknownArchitectureError("its weights are not all float32")


def _is_plain(module: nn.Module) -> bool:
    """Return whether this is one of the layers or activations that transformers shares."""
    shared = ("transformers.activations", "transformers.pytorch_utils")
    return type(module).__module__ in shared


def _copies(model: nn.Module) -> bool:
    """Return whether the weights are small enough to be copied."""
    return sum(x.numel() * x.element_size() for x in model.parameters()) <= MOST_COPIED


def _activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise UnknownArchitectureError(f"its activation is {name}")
    return name


def _layer_norm(module: nn.LayerNorm) -> Norm:
    if len(module.normalized_shape) != 1 or module.weight is None:
        raise UnknownArchitectureError("a norm has no weight, or is over several dimensions")
    bias = None if module.bias is None else module.bias.detach()
    return LayerNorm(module.weight.detach(), bias, module.eps)


def _bart(model: Any) -> Decoder:
    """Marian and BART: post-norm, and learnt or sinusoidal positions."""
    decoder, copy = model.model.decoder, _copies(model)
    layers = []
    for layer, plain in zip(decoder.layers, _bart_layers(decoder, model), strict=True):
        other = layer.encoder_attn
        cross = Cross(
            _layer_norm(layer.encoder_attn_layer_norm),
            product_of(other.q_proj, copy=copy),
            product_of(other.k_proj, other.v_proj, copy=copy),
            product_of(other.out_proj, copy=copy),
        )
        layers.append(replace(plain, cross=cross))
    return Decoder(
        embed=_bart_embed(decoder),
        layers=tuple(layers),
        heads=_bart_heads(decoder),
        norm_first=False,
        norm=None,
        head=_head(model.lm_head, model.final_logits_bias[0], copy),
    )


def _bart_encoder(model: Any) -> Encoder:
    encoder = model.model.encoder
    return Encoder(
        embed=_bart_embed(encoder),
        layers=tuple(_bart_layers(encoder, model)),
        heads=_bart_heads(encoder),
        norm_first=False,
        norm=None,
    )


def _bart_layers(stack: Any, model: Any) -> list[Layer]:
    """Return the layers of an encoder or a decoder, without cross-attention."""
    activation, copy = _activation(model.config.activation_function), _copies(model)
    layers = []
    for layer in stack.layers:
        own = layer.self_attn
        up = product_of(layer.fc1, activation=activation, copy=copy)
        down = product_of(layer.fc2, copy=copy)
        layers.append(
            Layer(
                _layer_norm(layer.self_attn_layer_norm),
                product_of(own.q_proj, own.k_proj, own.v_proj, copy=copy),
                product_of(own.out_proj, copy=copy),
                None,
                _layer_norm(layer.final_layer_norm),
                UpAndDown(up, down),
            )
        )
    return layers


def _bart_heads(stack: Any) -> Heads:
    number, dim = stack.layers[0].self_attn.num_heads, stack.layers[0].self_attn.head_dim
    return Heads(number, number, dim, dim**-0.5)


def _bart_embed(stack: Any) -> Embed:
    scale = getattr(stack, "embed_scale", getattr(stack.embed_tokens, "embed_scale", 1.0))
    tokens, positions = stack.embed_tokens.weight, stack.embed_positions.weight
    first = getattr(stack.embed_positions, "offset", 0)
    norm = getattr(stack, "layernorm_embedding", None)
    after = None if norm is None else _layer_norm(norm)
    return Embedding(tokens.detach(), scale, positions.detach()[first:], after)


def _gpt2(model: Any) -> Decoder:
    """GPT-2: pre-norm, learnt positions, and weights that are stored transposed."""
    decoder, config, copy = model.transformer, model.config, _copies(model)
    if config.add_cross_attention or config.scale_attn_by_inverse_layer_idx:
        raise UnknownArchitectureError("it has cross-attention, or scales attention by layers")
    activation = _activation(config.activation_function)

    def product(layer: Any, activation: str | None = None) -> Product:
        return Product([(layer.weight.T, layer.bias)], activation, copy)

    layers = []
    for block in decoder.h:
        up, down = product(block.mlp.c_fc, activation), product(block.mlp.c_proj)
        layers.append(
            Layer(
                _layer_norm(block.ln_1),
                product(block.attn.c_attn),
                product(block.attn.c_proj),
                None,
                _layer_norm(block.ln_2),
                UpAndDown(up, down),
            )
        )
    attention = decoder.h[0].attn
    number, dim = attention.num_heads, attention.head_dim
    return Decoder(
        embed=Embedding(decoder.wte.weight.detach(), 1.0, decoder.wpe.weight.detach(), None),
        layers=tuple(layers),
        heads=Heads(number, number, dim, attention.scaling),
        norm_first=True,
        norm=_layer_norm(decoder.ln_f),
        head=_head(model.lm_head, None, copy),
    )


def _llama(model: Any) -> Decoder:
    """Llama: RMS norm first, rotary positions, a gate, and keys that several queries share."""
    decoder, config, copy = model.model, model.config, _copies(model)
    activation = _activation(config.hidden_act)
    if activation not in ("silu", "swish"):
        raise UnknownArchitectureError(f"its gate is {activation}")
    layers = []
    for layer in decoder.layers:
        own, mlp = layer.self_attn, layer.mlp
        both = product_of(mlp.gate_proj, mlp.up_proj, copy=copy)
        layers.append(
            Layer(
                _rms_norm(layer.input_layernorm),
                product_of(own.q_proj, own.k_proj, own.v_proj, copy=copy),
                product_of(own.o_proj, copy=copy),
                None,
                _rms_norm(layer.post_attention_layernorm),
                partial(_gated, both, product_of(mlp.down_proj, copy=copy)),
            )
        )
    attention = decoder.layers[0].self_attn
    dim, queries = attention.head_dim, config.num_attention_heads
    return Decoder(
        embed=lambda token, position: embedding(token, decoder.embed_tokens.weight),
        layers=tuple(layers),
        heads=Heads(queries, config.num_key_value_heads, dim, attention.scaling),
        norm_first=True,
        norm=_rms_norm(decoder.norm),
        head=_head(model.lm_head, None, copy),
        rotate=partial(_rotation, decoder.rotary_emb),
    )


FAMILIES: dict[str, Callable[[Any], Decoder]] = {
    "MarianMTModel": _bart,
    "BartForConditionalGeneration": _bart,
    "GPT2LMHeadModel": _gpt2,
    "LlamaForCausalLM": _llama,
}
"""The function that finds the parts of each architecture, by the name of its class."""

ENCODERS: dict[str, Callable[[Any], Encoder]] = {
    "MarianMTModel": _bart_encoder,
    "BartForConditionalGeneration": _bart_encoder,
}
"""The same for encoders."""


def _gated(both: Product, down: Product, x: Tensor, residual: Tensor) -> Tensor:
    gate, up = both(x).chunk(2, dim=-1)
    return down(silu(gate).mul_(up), residual)


def _rms_norm(module: Any) -> Norm:
    weight, eps = module.weight, module.variance_epsilon
    return lambda x: torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def _rotation(module: Any, position: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function that rotates heads [n, heads, dim] by their positions [n]."""
    cos, sin = (
        x[0, :, None]
        for x in module(torch.empty(0, dtype=torch.float32, device="cpu"), position[None])
    )

    def rotated(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        product: Tensor = x * cos + turned * sin
        return product

    return rotated


def _head(layer: Any, bias: Tensor | None, copy: bool) -> Product:
    """Return the projection to the vocabulary, with a bias besides that of the layer."""
    product = product_of(layer, copy=copy)
    if bias is not None and bool(bias.any()):
        product.add_bias(bias)
    return product
