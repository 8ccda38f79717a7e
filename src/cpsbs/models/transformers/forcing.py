"""Teacher forcing of transformers models: the scores of all tokens of given sequences, in one pass.

The search asks for one token after the other and keeps a KV cache; here all tokens are known, so
that a single forward pass without a cache tells the scores of all of them, and autograd can go
through it. An encoder runs again, once for each source of the block: what the search has computed
was computed without gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MASK = "attention_mask"


def forced_logits(
    model: Any,
    inputs: dict[str, Any],
    prompt: Tensor,
    mask: Tensor | None,
    source: Tensor,
    tokens: Tensor,
) -> Tensor:
    """Return [n, T, V] the logits of every token of n sequences, given the tokens before it.

    Args:
        model: a transformers model, in evaluation mode.
        inputs: what the caller would pass to ``generate``.
        prompt: [B, P] the tokens after which decoding begins: the prompt of a decoder-only model,
            or the start tokens of a decoder.
        mask: [B, ·] the attention mask of the prompt, or of the encoder's input; None for ones.
        source: [n] the source of each sequence, ascending.
        tokens: [n, T] the sequences, padded after their end.
    """
    before = torch.cat([prompt[source], tokens[:, :-1]], dim=-1)
    # A wrapper with adapters passes everything on, and names nothing.
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    forward = _parameters(inner.forward)
    rows: dict[str, Any] = {name: value for name, value in inputs.items() if name in forward}
    if model.config.is_encoder_decoder:
        rows = _encoded(model, rows, mask, source, len(prompt))
        rows["decoder_input_ids"] = before
    else:
        rows = {name: _of(value, source, len(prompt)) for name, value in rows.items()}
        ones = torch.ones_like(before)
        if mask is not None:
            ones[:, : prompt.shape[-1]] = mask[source]
        rows |= {"input_ids": before, MASK: ones}
        if "position_ids" in forward:
            rows["position_ids"] = (ones.cumsum(-1) - 1).clamp(min=0)
    if "logits_to_keep" in forward:  # a long prompt has logits that nobody reads
        rows["logits_to_keep"] = tokens.shape[-1]
    if "use_cache" in forward:
        rows["use_cache"] = False
    logits: Tensor = model(**rows, return_dict=True).logits
    return logits[:, -tokens.shape[-1] :]


def _encoded(
    model: Any, inputs: dict[str, Any], mask: Tensor | None, source: Tensor, sources: int
) -> dict[str, Any]:
    """Return the inputs of a decoder, whose encoder runs once for each different source."""
    inputs = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
    distinct, row = torch.unique_consecutive(source, return_inverse=True)
    outputs = inputs.pop("encoder_outputs", None)
    if outputs is None:
        encoder = model.get_encoder()
        takes = _parameters(encoder.forward)
        own = {n: _of(v, distinct, sources) for n, v in inputs.items() if n in takes}
        if mask is not None:
            own[MASK] = mask[distinct]
        outputs = encoder(**own, return_dict=True)
    else:  # given by the caller, who computed it as they like
        row = source
    shown = type(outputs)(last_hidden_state=outputs[0][row])
    return {"encoder_outputs": shown} | ({} if mask is None else {MASK: mask[source]})


def _of(value: Any, rows: Tensor, sources: int) -> Any:
    """Return these rows of an input that has one for each source; anything else as it is."""
    has_rows = isinstance(value, Tensor) and value.ndim > 0 and len(value) == sources
    return value[rows] if has_rows else value


def _parameters(function: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
