"""Tiny transformers models with random weights; nothing is downloaded."""

from __future__ import annotations

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
    T5Config,
    T5ForConditionalGeneration,
)

EOS, PAD = 1, 0


def llama(vocab_size: int = 30) -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            eos_token_id=EOS,
            pad_token_id=PAD,
            bos_token_id=2,
            initializer_range=0.4,
        )
    )


def gpt2(vocab_size: int = 30) -> Any:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab_size,
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            eos_token_id=EOS,
            pad_token_id=PAD,
            bos_token_id=2,
            initializer_range=0.4,
        )
    )


ENCODER_DECODER: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "forced_eos_token_id": EOS,
    "init_std": 0.4,
}


def marian(vocab_size: int = 30) -> Any:
    return MarianMTModel(
        MarianConfig(
            vocab_size=vocab_size,
            decoder_vocab_size=vocab_size,
            decoder_start_token_id=PAD,
            **ENCODER_DECODER,
        )
    )


def bart(vocab_size: int = 30) -> Any:
    """Unlike Marian it learns its positions."""
    settings: dict[str, Any] = {"vocab_size": vocab_size, "bos_token_id": 2}
    return BartForConditionalGeneration(
        BartConfig(decoder_start_token_id=EOS, **settings, **ENCODER_DECODER)
    )


def t5(vocab_size: int = 30) -> Any:
    settings: dict[str, Any] = {"decoder_start_token_id": PAD}
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=vocab_size,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            eos_token_id=EOS,
            pad_token_id=PAD,
            initializer_factor=2.0,
            **settings,
        )
    )


MODELS = {"llama": llama, "gpt2": gpt2, "marian": marian, "bart": bart, "t5": t5}


def make(name: str, vocab_size: int = 30, seed: int = 0) -> Any:
    """A model in evaluation mode, its weights decided by the seed."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = MODELS[name](vocab_size).eval()
    torch.set_rng_state(state)
    return model


def prompts(model: Any) -> dict[str, torch.Tensor]:
    """Three inputs of different lengths, padded on the side that the model wants."""
    rows = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
    longest = max(map(len, rows))
    left = not model.config.is_encoder_decoder
    ids, mask = [], []
    for row in rows:
        missing = [PAD] * (longest - len(row))
        ids.append(missing + row if left else row + missing)
        ones, zeros = [1] * len(row), [0] * len(missing)
        mask.append(zeros + ones if left else ones + zeros)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def alone(inputs: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """One of the inputs without its padding."""
    keep = inputs["attention_mask"][row].bool()
    return {name: value[row : row + 1, keep] for name, value in inputs.items()}


@torch.no_grad()
def teacher_forced(model: Any, inputs: dict[str, torch.Tensor], sequence: list[int]) -> float:
    """Log p of a sequence after one unpadded input, in one pass over the whole of it."""
    tokens = torch.tensor([sequence])
    if model.config.is_encoder_decoder:
        start = torch.tensor([[model.config.decoder_start_token_id]])
        decoder = torch.cat([start, tokens[:, :-1]], dim=-1)
        logits = model(**inputs, decoder_input_ids=decoder).logits
    else:
        ids = torch.cat([inputs["input_ids"], tokens[:, :-1]], dim=-1)
        logits = model(input_ids=ids).logits[:, inputs["input_ids"].shape[-1] - 1 :]
    log_p = logits.double().log_softmax(-1).gather(-1, tokens[..., None])
    return float(log_p.sum())
