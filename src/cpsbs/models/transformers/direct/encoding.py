"""Encoder states on a CPU, from an encoder whose layers are run directly.

The states that a model computes this way are compared with those of its own encoder for its first
batch. Where they differ, the encoder of transformers is used, and one line in the log says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cpsbs.models.transformers.direct.encoder import Encoder
from cpsbs.models.transformers.direct.families import has_encoder
from cpsbs.models.transformers.direct.prepared import PREPARING, one_thread, prepared, say
from cpsbs.models.transformers.int8 import is_quantized

TOLERANCE, INT8_TOLERANCE = 1e-4, 0.1
"""How much a state may differ, relative to its norm. With int8 weights, inputs that differ in the
last digit may be rounded to other integers."""

KNOWN_INPUTS = frozenset({"input_ids", "attention_mask"})
"""The inputs of a model for which direct encoding is right, besides settings of ``generate``."""


def encodes(model: Any, inputs: Mapping[str, Any]) -> bool:
    """Return whether an encoder depends on nothing but the tokens and the mask among the inputs.

    Then it may be run by itself, apart from ``generate``. It never synchronises with the device.
    """
    given = {name for name, value in inputs.items() if value is not None}
    tokens, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not has_encoder(model) or tokens is None or mask is None:
        return False
    if tokens.shape != mask.shape or mask.ndim != 2:
        return False
    return all(_is_setting(model, name) for name in given - KNOWN_INPUTS)


@torch.no_grad()
def encoded(model: Any, tokens: Tensor, mask: Tensor) -> Tensor | None:
    """Return the encoder's states [S, T, d], zero where there is padding, if they can be computed.

    The reason why they cannot is logged once for each model.

    Args:
        model: a transformers model with an encoder on a CPU, not in training mode.
        tokens: [S, T] the sources.
        mask: [S, T] which of the tokens are no padding.
    """
    mask = mask.bool()
    if not bool(mask.any(-1).all()):  # a source without tokens
        return None
    with PREPARING:
        known = prepared(model)
        encoder = known.encoder
        if encoder is None or not encoder.suits(mask):
            return None
        if one_thread() not in known.encoder_verified:
            # If the model itself fails, the inputs are at fault, and not the direct encoder.
            own = model.get_encoder()(input_ids=tokens, attention_mask=mask.long())
            try:
                _compare(model, encoder, own.last_hidden_state, tokens, mask)
                known.encoder_verified.add(one_thread())
            except Exception as error:
                known.encoder = None
                say(model, known, error)
                return None
    return encoder.states(tokens, mask)


def _is_setting(model: Any, name: str) -> bool:
    """Return whether this is a setting of ``generate`` that the encoder does not see."""
    return hasattr(model.generation_config, name) and not name.startswith("output_")


def _compare(model: Any, encoder: Encoder, own: Tensor, tokens: Tensor, mask: Tensor) -> None:
    """Raise if the states of some sources differ from the model's own [S, T, d]."""
    wanted = own[mask]
    gap = (encoder.states(tokens, mask)[mask] - wanted).norm(dim=-1)
    tolerance = INT8_TOLERANCE if is_quantized(model) else TOLERANCE
    relative = float((gap / wanted.norm(dim=-1)).max())
    if not relative <= tolerance:
        raise ValueError(f"the states of the encoder differ by {relative:.2g}")
