"""Computes Marian, as transformers defines it, on packed sentences.

The parameters are those of a ``MarianMTModel``, so that exporting the model is saving it. Only the
forward pass is written anew, because that of transformers pads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import MarianConfig, MarianMTModel

from training.batches import LONGEST, Batch
from training.tokenizer import END_ID, PAD_ID


def marian(vocabulary: int, layers: tuple[int, int] = (8, 4), width: int = 256) -> Any:
    """Return a model with fresh weights.

    Post-norm layers are hard to train when there are many; the initial scales are DeepNorm's (Wang
    et al. 2022), with the factor on the residual stream divided out of what is added to it.
    """
    encoder, decoder = layers
    config = MarianConfig(
        vocab_size=vocabulary,
        decoder_vocab_size=vocabulary,
        d_model=width,
        encoder_layers=encoder,
        decoder_layers=decoder,
        encoder_attention_heads=width // 64,
        decoder_attention_heads=width // 64,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_position_embeddings=256,
        activation_function="swish",
        scale_embedding=True,
        dropout=0.1,
        attention_dropout=0.0,
        pad_token_id=PAD_ID,
        eos_token_id=END_ID,
        decoder_start_token_id=PAD_ID,
        forced_eos_token_id=None,
    )
    model: Any = MarianMTModel(config)
    with torch.no_grad():
        model.model.shared.weight.normal_(std=width**-0.5)[PAD_ID] = 0.0
    shared = (encoder**4 * decoder) ** (1 / 16)
    for layer in model.model.encoder.layers:
        _initialize(layer, alpha=0.81 * shared, beta=0.87 / shared)
    for layer in model.model.decoder.layers:
        _initialize(layer, alpha=(3 * decoder) ** 0.25, beta=(12 * decoder) ** -0.25)
    return model


def _initialize(layer: Any, alpha: float, beta: float) -> None:
    for name, module in layer.named_modules():
        if isinstance(module, torch.nn.Linear):
            part = name.rsplit(".")[-1]
            gain = 1.0 if part in ("q_proj", "k_proj") else beta
            gain /= alpha if part in ("out_proj", "fc2") else 1.0
            torch.nn.init.xavier_normal_(module.weight, gain)
            torch.nn.init.zeros_(module.bias)


class Parts(NamedTuple):
    """The parts of the forward pass, either eager or compiled."""

    embedded: Callable[..., Tensor]
    encoder_layer: Callable[..., Tensor]
    decoder_layer: Callable[..., Tensor]
    cross_entropy: Callable[..., Tensor]

    def compiled(self) -> Parts:
        """Return the parts compiled; all layers of a kind share one compilation."""
        return Parts(*(torch.compile(part, dynamic=False) for part in self))


def loss(model: Any, batch: Batch, label_smoothing: float, parts: Parts) -> Tensor:
    """Return the mean cross-entropy of the tokens of the target."""
    encoder, decoder = model.model.encoder, model.model.decoder
    source, target = batch.source, batch.target
    states = parts.embedded(encoder, source.tokens, source.places)
    for layer in encoder.layers:
        states = parts.encoder_layer(layer, states, source.bounds)
    before = torch.where(target.places > 0, target.tokens.roll(1), PAD_ID)
    x = parts.embedded(decoder, before, target.places)
    for layer in decoder.layers:
        x = parts.decoder_layer(layer, x, states, target.bounds, source.bounds)
    return parts.cross_entropy(model.lm_head, x, target.tokens, label_smoothing)


def embedded(side: Any, tokens: Tensor, places: Tensor) -> Tensor:
    """Return the embeddings of the tokens and of their positions."""
    x = side.embed_tokens(tokens) * side.embed_scale + side.embed_positions.weight[places]
    return F.dropout(x, side.dropout, side.training)


def encoder_layer(layer: Any, x: Tensor, bounds: Tensor) -> Tensor:
    """Compute one layer of the encoder."""
    within = _attention(layer.self_attn, x, x, bounds, bounds, causal=False)
    x = layer.self_attn_layer_norm(_plus(layer, x, within))
    return _feed_forward(layer, x)


def decoder_layer(
    layer: Any, x: Tensor, states: Tensor, bounds: Tensor, source_bounds: Tensor
) -> Tensor:
    """Compute one layer of the decoder."""
    within = _attention(layer.self_attn, x, x, bounds, bounds, causal=True)
    x = layer.self_attn_layer_norm(_plus(layer, x, within))
    across = _attention(layer.encoder_attn, x, states, bounds, source_bounds, causal=False)
    x = layer.encoder_attn_layer_norm(_plus(layer, x, across))
    return _feed_forward(layer, x)


def cross_entropy(head: Any, x: Tensor, tokens: Tensor, label_smoothing: float) -> Tensor:
    """Return the mean cross-entropy of the tokens, except filler."""
    logits = head(x).float()
    return F.cross_entropy(logits, tokens, ignore_index=PAD_ID, label_smoothing=label_smoothing)


EAGER = Parts(embedded, encoder_layer, decoder_layer, cross_entropy)


def _plus(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    return x + F.dropout(y, layer.dropout, layer.training)


def _feed_forward(layer: Any, x: Tensor) -> Tensor:
    y = layer.fc2(F.silu(layer.fc1(x)))
    normed: Tensor = layer.final_layer_norm(_plus(layer, x, y))
    return normed


def _attention(
    module: Any, x: Tensor, states: Tensor, bounds: Tensor, state_bounds: Tensor, causal: bool
) -> Tensor:
    heads = (-1, module.num_heads, module.head_dim)
    q = module.q_proj(x).view(heads)
    k, v = module.k_proj(states).view(heads), module.v_proj(states).view(heads)
    y = packed_attention(q, k, v, bounds, state_bounds, causal)
    out: Tensor = module.out_proj(y.flatten(1))
    return out


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, q_bounds: Tensor, k_bounds: Tensor, causal: bool
) -> Tensor:
    """Return [tokens, heads, d] attention within each sentence, by flash attention on a GPU."""
    if q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        window = (-1, 0) if causal else (-1, -1)
        out: Any = varlen_attn(q, k, v, q_bounds, k_bounds, LONGEST, LONGEST, window_size=window)
        return out  # type: ignore[no-any-return]
    q_at, k_at = torch.arange(len(q)), torch.arange(len(k))
    q_sentence = torch.searchsorted(q_bounds[1:], q_at, right=True)
    k_sentence = torch.searchsorted(k_bounds[1:], k_at, right=True)
    allowed = q_sentence[:, None] == k_sentence
    if causal:
        allowed &= q_at[:, None] >= k_at
    allowed |= ~allowed.any(
        -1, keepdim=True
    )  # filler that has nothing to attend to attends to everything
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)[0].transpose(0, 1)
