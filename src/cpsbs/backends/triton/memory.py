"""How much memory a search takes on a GPU, predicted from the model's configuration.

Everything is proportional to the number of sources. For each source, with K hypotheses, V tokens in
the vocabulary, numbers of ``size`` bytes, and ``kv`` bytes of keys and values for a token,

- the KV cache takes K · capacity · (kv + size + 4), with the mask and the table of places;
- the cross-attention takes S · (kv + K · size) for a source of S tokens;
- the logits of a step take 3 · K · V · size, because the model makes them in two operations and
  the search reads a third copy;
- the selection takes 2 bytes for each of the K · V candidates;
- the layers of a step take K · (8 · d + 3 · d_ff) · size;
- the prefill of n tokens takes n · (2 · kv + (8 · d + 3 · d_ff) · size + 2 · n), and 12 · V;
- the trail takes K · T · 40.

Libraries take ``ONCE`` bytes more for themselves, for the first search of a process.
``tests/backends/test_memory.py`` compares this with what searches take on a card.
"""

from __future__ import annotations

from typing import Any

import torch

from cpsbs.backends.triton.workspace import ladder

ONCE = 2**28
"""The memory that cuBLAS and others allocate when they are first used, whatever the search."""

SEARCH_SHARE = 0.5
"""The share of the card, less the model's weights, that one search may take by default: what is
kept for other shapes and whatever else runs on the card must fit beside it."""


def bytes_per_source(model: Any, k: int, prompt: int, steps: int) -> int:
    """Return the most memory that a search takes for each source.

    Args:
        model: the transformers model.
        k: K.
        prompt: the most tokens of a prompt, or of a source to translate.
        steps: the most tokens that will be added.
    """
    config, size = model.config.get_text_config(), model.dtype.itemsize
    translates = bool(model.config.is_encoder_decoder)

    def number(*names: str) -> int:
        found = (getattr(config, name, None) for name in names)
        return int(next(value for value in found if value))

    hidden = number("hidden_size")
    heads = number("decoder_attention_heads", "num_attention_heads")
    head_size = getattr(config, "head_dim", None) or hidden // heads
    layers = number("decoder_layers", "num_decoder_layers", "num_hidden_layers")
    inner = getattr(config, "decoder_ffn_dim", None) or getattr(config, "intermediate_size", None)
    of_layers = (8 * hidden + 3 * (inner or 4 * hidden)) * size
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    kv = 2 * layers * kv_heads * head_size * size
    capacity = ladder((1 if translates else prompt) + steps, 32)
    cross = ladder(prompt, 16) * (kv + k * size) if translates else 0
    vocabulary = number("vocab_size")
    total: int = (
        k * capacity * (kv + size + 4)
        + cross
        + k * vocabulary * (3 * size + 2)
        + k * of_layers
        + prompt * (2 * kv + of_layers + 2 * prompt)
        + 12 * vocabulary
        + k * steps * 40
    )
    return total


def sources_that_fit(model: Any, k: int, prompt: int, steps: int) -> int:
    """Return how many sources, at least one, fit into ``SEARCH_SHARE`` of the model's card."""
    total = torch.cuda.get_device_properties(model.device).total_memory
    weights = sum(x.nbytes for x in model.parameters())
    room = SEARCH_SHARE * (total - weights) - ONCE
    return max(1, int(room / bytes_per_source(model, k, prompt, steps)))
