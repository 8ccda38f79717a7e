"""Small transformers models whose heads have 16 numbers, as compiled attention needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    MT5Config,
    MT5ForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.models.tiny import EOS, PAD

ENDS: dict[str, Any] = {"eos_token_id": EOS, "pad_token_id": PAD}

BOTH: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "init_std": 0.3,
    "scale_embedding": True,
    **ENDS,
}

GATED: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    **ENDS,
}


def _llama(tokens: int) -> Any:
    return LlamaForCausalLM(LlamaConfig(vocab_size=tokens, **GATED))


def _qwen2(tokens: int) -> Any:
    """Like Llama, with biases of queries, keys and values."""
    model: Any = Qwen2ForCausalLM(Qwen2Config(vocab_size=tokens, **GATED))
    for layer in model.model.layers:
        for name in "qkv":
            torch.nn.init.normal_(getattr(layer.self_attn, f"{name}_proj").bias)
    return model


def _gpt2(tokens: int) -> Any:
    sizes: dict[str, Any] = {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(vocab_size=tokens, **sizes, **ENDS))


def _marian(tokens: int) -> Any:
    own: dict[str, Any] = {"vocab_size": tokens, "decoder_vocab_size": tokens}
    own |= {"decoder_start_token_id": PAD, "activation_function": "swish"}
    return MarianMTModel(MarianConfig(**own, **BOTH))


def _bart(tokens: int) -> Any:
    config = BartConfig(vocab_size=tokens, decoder_start_token_id=EOS, **BOTH)
    return BartForConditionalGeneration(config)


def _t5(
    tokens: int,
    feed: str = "relu",
    config: Any = T5Config,
    kind: Any = T5ForConditionalGeneration,
) -> Any:
    """Distances count up to 20, so that it shows what is done with those beyond."""
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    own: dict[str, Any] = {"relative_attention_max_distance": 20, "feed_forward_proj": feed}
    own |= {"relative_attention_num_buckets": 8, "decoder_start_token_id": PAD, **sizes, **ENDS}
    model: Any = kind(config(vocab_size=tokens, **own))
    for stack in (model.encoder, model.decoder):
        bias = stack.block[0].layer[0].SelfAttention.relative_attention_bias
        torch.nn.init.normal_(bias.weight, std=2.0)
    return model


def _gated_t5(tokens: int) -> Any:
    """As T5 1.1 is: with a gate."""
    return _t5(tokens, "gated-gelu")


def _mt5(tokens: int) -> Any:
    """As T5, with scores that the model does not scale; its norm does here, for flat ones."""
    model = _t5(tokens, "gated-gelu", MT5Config, MT5ForConditionalGeneration)
    with torch.no_grad():
        model.decoder.final_layer_norm.weight.mul_(0.125)
    return model


MAKERS: dict[str, Callable[[int], Any]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "gpt2": _gpt2,
    "marian": _marian,
    "bart": _bart,
    "t5": _t5,
    "gated-t5": _gated_t5,
    "mt5": _mt5,
}


def wide(name: str, vocab_size: int = 30) -> Any:
    """Return a model in evaluation mode, always the same one."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = MAKERS[name](vocab_size)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias += torch.randn(vocab_size)
    torch.set_rng_state(state)
    return model.eval()
