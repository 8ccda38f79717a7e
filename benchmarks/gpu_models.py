"""Models with random weights, in the shapes that ``benchmarks.gpu`` measures."""

from __future__ import annotations

from typing import Any

import torch

DEVICE = torch.device("cuda")


def marian(vocabulary: int = 50_000) -> Any:
    """6 + 6 layers, d = 512, with a vocabulary of this size."""
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=vocabulary, decoder_vocab_size=vocabulary, d_model=512, encoder_layers=6,
        decoder_layers=6, encoder_attention_heads=8, decoder_attention_heads=8,
        encoder_ffn_dim=2048, decoder_ffn_dim=2048, max_position_embeddings=512, eos_token_id=1,
        pad_token_id=0, decoder_start_token_id=0, forced_eos_token_id=None,
    )  # fmt: skip
    model: Any = MarianMTModel(config)
    return model.half().to(DEVICE).eval()


def llama() -> Any:
    """The shape of a Llama with one billion parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=4096,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    make: Any = LlamaForCausalLM
    with DEVICE:
        model = make(config)
    return model.to(torch.bfloat16).eval()


def large(hidden: int, inner: int, layers: int, heads: int, tokens: int) -> Any:
    """A Llama of another shape, with random weights that are made on the card."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=tokens, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=4096,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    make: Any = LlamaForCausalLM
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with DEVICE:
            return make(config).eval()
    finally:
        torch.set_default_dtype(before)
