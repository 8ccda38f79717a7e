"""What a transformers model holds after the prefill, from where steps of fixed shape continue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, EncoderDecoderCache

from cpsbs.backends.triton.workspace import Shape, ladder

ATTENTION = ("sdpa", "eager")
"""Attention implementations of transformers that take a mask to add to the scores."""

UNDERSTOOD = {
    *("past_key_values", "use_cache", "attention_mask", "decoder_attention_mask"),
    *("encoder_outputs", "position_ids", "cache_position", "logits_to_keep"),
}
"""Inputs of a model whose part in a step is known here."""


ENOUGH_HEADS = 128
"""With fewer heads in all sources together, a program of the attention handles a single row: there
would be too few programs that handle several to keep a card busy."""


class NotPossibleError(Exception):
    """Says why this search cannot have steps of fixed shape."""


@dataclass(frozen=True)
class PrefilledState:
    """The KV cache and masks of a model after the prefill, with a row for each of b sources."""

    states: list[Tensor]
    """[b, heads, length, dim] keys and values of all layers"""
    mask: Tensor
    """[b, length] which tokens of the prompt are attended to"""
    cross: list[Tensor]
    """[b, heads, source length, dim] keys and values of the cross-attention, if any"""
    cross_mask: Tensor
    """[b, source length] which tokens of the source are attended to"""
    hidden: int
    """The dimension of the encoder's states; 0 without an encoder."""
    position: Tensor
    """[b] the position of the next token"""

    @classmethod
    def of(cls, model: Any, inputs: Mapping[str, Any]) -> PrefilledState:
        """Return the state in a model's inputs, or raise a NotPossibleError that says why not."""
        cache: Any = inputs.get("past_key_values")
        unknown = [name for name in inputs.keys() - UNDERSTOOD if inputs[name] is not None]
        attention = model.config._attn_implementation
        for obstacle, reason in (
            (cache is None or inputs.get("use_cache") is False, "it does not use its cache"),
            (unknown, f"it has the inputs {', '.join(sorted(unknown))}"),
            (hasattr(model, "_reorder_cache"), "it reorders its cache itself"),
            (attention not in ATTENTION, f"its attention is {attention}"),
            (torch.is_autocast_enabled(model.device.type), "autocast is on"),
        ):
            if obstacle:
                raise NotPossibleError(reason)
        both = isinstance(cache, EncoderDecoderCache)
        if both != bool(model.config.is_encoder_decoder):
            raise NotPossibleError(f"its cache is a {type(cache).__name__}")
        states = _states(cache.self_attention_cache if both else cache)
        cross = _states(cache.cross_attention_cache) if both else []
        mask = _mask(inputs.get("decoder_attention_mask" if both else "attention_mask"), states[0])
        cross_mask = _mask(inputs.get("attention_mask"), cross[0]) if both else mask[:, :0]
        hidden = inputs["encoder_outputs"][0].shape[-1] if both else 0
        position = _position(inputs.get("position_ids"), mask)
        return cls(states, mask, cross, cross_mask, hidden, position)

    @property
    def sources(self) -> int:
        """b, the number of sources."""
        return len(self.states[0])

    @property
    def length(self) -> int:
        """The length of the prompts, with their padding."""
        return self.states[0].shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self.states[0].dtype

    @property
    def device(self) -> torch.device:
        """The device of keys and values."""
        return self.states[0].device

    def tensors(self) -> tuple[list[Tensor], Tensor, list[Tensor], Tensor, Tensor]:
        """Return what ``Workspace.fill`` copies into its buffers."""
        return self.states, self.mask, self.cross, self.cross_mask, self.position

    def of_sources(self, some: slice) -> PrefilledState:
        """Return the state of some of the sources."""
        states, cross = ([x[some] for x in held] for held in (self.states, self.cross))
        mask, cross_mask, position = (x[some] for x in (self.mask, self.cross_mask, self.position))
        return PrefilledState(states, mask, cross, cross_mask, self.hidden, position)

    def shape(self, k: int, steps: int, own_positions: bool) -> Shape:
        """Return the shape of the buffers for K rows a source and up to ``steps`` more tokens."""
        cuda = self.device.type == "cuda"
        return Shape(
            sources=self.sources,
            k=k,
            capacity=ladder(self.length + steps, 32),
            states=(len(self.states), *self.states[0].shape[1::2]),
            cross=(len(self.cross), *self.cross[0].shape[1::2]) if self.cross else (0, 0, 0),
            source_length=ladder(self.cross[0].shape[2], 16) if self.cross else 0,
            hidden=self.hidden,
            dtype=self.dtype,
            device=self.device,
            stream=torch.cuda.current_stream(self.device).cuda_stream if cuda else 0,
            own_positions=own_positions,
            together=self.sources * self.states[0].shape[1] >= ENOUGH_HEADS,
        )


def _states(cache: Any) -> list[Tensor]:
    """Return the keys and values [b, heads, length, dim] of all layers."""
    kinds = {type(layer) for layer in cache.layers}
    if kinds != {DynamicLayer} or cache.offloading:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise NotPossibleError(f"its cache is of the kind {names or 'empty'}")
    states = [state for layer in cache.layers for state in (layer.keys, layer.values)]
    if len({(state.shape, state.dtype, state.device) for state in states}) > 1:
        raise NotPossibleError("its layers differ in shape or device")
    return states


def _mask(given: Any, state: Tensor) -> Tensor:
    """Return a mask [b, length] of what the state holds; the given one may be longer, or None."""
    b, length = len(state), state.shape[2]
    if given is None:
        return torch.ones((b, length), dtype=torch.bool, device=state.device)
    if given.ndim != 2 or len(given) != b or given.shape[1] < length:
        raise NotPossibleError(f"its mask has the shape {list(given.shape)}")
    mask: Tensor = given[:, :length].to(device=state.device, dtype=torch.bool)
    return mask


def _position(given: Tensor | None, mask: Tensor) -> Tensor:
    """Return the position [b] of the token after a prompt.

    Args:
        given: the positions of the prompt's tokens, which the caller may have chosen, and the next
            one, which transformers has added to them; or None.
        mask: [b, length] which tokens are attended to, which are counted if no positions are given.
    """
    b, length = mask.shape
    if given is None:
        return mask.sum(-1)
    if given.ndim != 2 or given.shape[1] != length + 1:
        raise NotPossibleError(f"its positions have the shape {list(given.shape)}")
    return given[:, -1].to(mask.device).expand(b)
