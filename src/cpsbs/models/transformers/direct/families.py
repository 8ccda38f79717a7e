"""Finds the parts of encoders and decoders in models of transformers, by a table of names.

A family names the modules of one architecture. What transformers does with them is written in
``decoder``; ``steps`` compares the result with the model's own forward pass before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cpsbs.backends.cpu.compiled import attends
from cpsbs.models.transformers.direct.attention import Distances, Heads
from cpsbs.models.transformers.direct.decoder import Decoder
from cpsbs.models.transformers.direct.encoder import Encoder
from cpsbs.models.transformers.direct.layers import (
    Cross,
    Embed,
    Embedding,
    FeedForward,
    Gated,
    Layer,
    LayerNorm,
    Norm,
    Places,
    UpAndDown,
)
from cpsbs.models.transformers.direct.products import ACTIVATIONS, Product, product_of
from cpsbs.models.transformers.direct.rotation import Rotation
from cpsbs.models.transformers.int8 import Int8Linear

MOST_COPIED = 2**30
"""The most bytes of weights that are copied into another layout; larger models are used as they
are."""

ROTATIONS = ("default", "linear", "llama3", "yarn")
"""The rotary embeddings of transformers whose angles depend on positions alone."""

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
        raise UnknownArchitectureError("its architecture is none of those that are run directly")
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
    """Return the parts of Marian or BART: post-norm, and learnt or sinusoidal positions."""
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
    """Return the parts of GPT-2: pre-norm, learnt positions, weights that are stored transposed."""
    decoder, config, copy = model.transformer, model.config, _copies(model)
    if config.add_cross_attention or config.scale_attn_by_inverse_layer_idx:
        raise UnknownArchitectureError("it has cross-attention, or scales attention by layers")
    activation = _activation(config.activation_function)

    def product(layer: Any, activation: str | None = None) -> Product:
        weight = layer.quantized if isinstance(layer, Int8Linear) else layer.weight.T
        return Product([(weight, layer.bias)], activation, copy)

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
    """Return the parts of Llama and others: RMS norm, rotary embeddings, a gate, shared keys."""
    decoder, config, copy = model.model, model.config, _copies(model)
    activation = _activation(config.hidden_act)
    kinds = getattr(config, "layer_types", None)
    if getattr(config, "sliding_window", None) and (not kinds or {*kinds} != {"full_attention"}):
        raise UnknownArchitectureError("its layers attend to a sliding window")
    if decoder.rotary_emb.rope_type not in ROTATIONS:
        raise UnknownArchitectureError(
            f"its rotation, {decoder.rotary_emb.rope_type}, may depend on the length"
        )
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
                Gated(both, activation, product_of(mlp.down_proj, copy=copy)),
            )
        )
    attention = decoder.layers[0].self_attn
    dim, queries = attention.head_dim, config.num_attention_heads
    return Decoder(
        embed=Embedding(decoder.embed_tokens.weight.detach(), 1.0, None, None),
        layers=tuple(layers),
        heads=Heads(queries, config.num_key_value_heads, dim, attention.scaling),
        norm_first=True,
        norm=_rms_norm(decoder.norm),
        head=_head(model.lm_head, None, copy),
        places=Places(rotation=Rotation(decoder.rotary_emb)),
    )


def _t5(model: Any) -> Decoder:
    """Return the parts of T5: RMS norm first, and attention scores that depend on distances."""
    config, copy = model.config, _copies(model)
    layers = []
    for block, plain in zip(model.decoder.block, _t5_layers(model.decoder, copy), strict=True):
        other = block.layer[1].EncDecAttention
        cross = Cross(
            _rms_norm(block.layer[1].layer_norm),
            product_of(other.q, copy=copy),
            product_of(other.k, other.v, copy=copy),
            product_of(other.o, copy=copy),
        )
        layers.append(replace(plain, cross=cross))
    norm = _rms_norm(model.decoder.final_layer_norm)
    scaled = config.tie_word_embeddings and config.model_type != "mt5"
    if getattr(config, "scale_decoder_outputs", scaled):
        norm = replace(norm, weight=norm.weight * config.d_model**-0.5)
    return Decoder(
        embed=Embedding(model.decoder.embed_tokens.weight.detach(), 1.0, None, None),
        layers=tuple(layers),
        heads=_t5_heads(model.decoder),
        norm_first=True,
        norm=norm,
        head=_head(model.lm_head, None, copy),
        places=_t5_places(model.decoder),
    )


def _t5_encoder(model: Any) -> Encoder:
    encoder = model.encoder
    return Encoder(
        embed=Embedding(encoder.embed_tokens.weight.detach(), 1.0, None, None),
        layers=tuple(_t5_layers(encoder, _copies(model))),
        heads=_t5_heads(encoder),
        norm_first=True,
        norm=_rms_norm(encoder.final_layer_norm),
        places=_t5_places(encoder),
    )


def _t5_layers(stack: Any, copy: bool) -> list[Layer]:
    """Return the layers of an encoder or a decoder, without cross-attention."""
    layers = []
    for block in stack.block:
        own, feed = block.layer[0].SelfAttention, block.layer[-1].DenseReluDense
        activation = _activation(stack.config.dense_act_fn)
        down = product_of(feed.wo, copy=copy)
        run: FeedForward
        if hasattr(feed, "wi_0"):
            run = Gated(product_of(feed.wi_0, feed.wi_1, copy=copy), activation, down)
        else:
            run = UpAndDown(product_of(feed.wi, activation=activation, copy=copy), down)
        layers.append(
            Layer(
                _rms_norm(block.layer[0].layer_norm),
                product_of(own.q, own.k, own.v, copy=copy),
                product_of(own.o, copy=copy),
                None,
                _rms_norm(block.layer[-1].layer_norm),
                run,
            )
        )
    return layers


def _t5_heads(stack: Any) -> Heads:
    attention = stack.block[0].layer[0].SelfAttention
    number, dim = attention.n_heads, attention.key_value_proj_dim
    if not attends(dim):
        raise UnknownArchitectureError(
            "its attention depends on distances, and there is no compiled attention for heads of "
            f"size {dim}"
        )
    return Heads(number, number, dim, attention.scaling)


def _t5_places(stack: Any) -> Places:
    """Return what the first layer of a stack adds to the scores of all layers."""
    attention = stack.block[0].layer[0].SelfAttention
    if any(block.layer[0].SelfAttention.has_relative_attention_bias for block in stack.block[1:]):
        raise UnknownArchitectureError("its layers have different biases of distances")
    reach = attention.relative_attention_max_distance
    bucket = attention._relative_position_bucket(
        torch.arange(-reach, reach + 1, device="cpu"),
        bidirectional=not attention.is_decoder,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=reach,
    )
    bias = attention.relative_attention_bias.weight.detach()[bucket].T.contiguous()
    return Places(distances=Distances(bias))


FAMILIES: dict[str, Callable[[Any], Decoder]] = {
    "MarianMTModel": _bart,
    "BartForConditionalGeneration": _bart,
    "GPT2LMHeadModel": _gpt2,
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _llama,
    "Qwen2ForCausalLM": _llama,
    "T5ForConditionalGeneration": _t5,
    "MT5ForConditionalGeneration": _t5,
}
"""The function that finds the parts of each architecture, by the name of its class."""

ENCODERS: dict[str, Callable[[Any], Encoder]] = {
    "MarianMTModel": _bart_encoder,
    "BartForConditionalGeneration": _bart_encoder,
    "T5ForConditionalGeneration": _t5_encoder,
    "MT5ForConditionalGeneration": _t5_encoder,
}
"""The same for encoders."""


def _rms_norm(module: Any) -> LayerNorm:
    return LayerNorm(module.weight.detach(), None, module.variance_epsilon, centred=False)


def _head(layer: Any, bias: Tensor | None, copy: bool) -> Product:
    """Return the projection to the vocabulary, with a bias besides that of the layer."""
    product = product_of(layer, copy=copy)
    if bias is not None and bool(bias.any()):
        product.add_bias(bias)
    return product
