"""Lets transformers prepare a model's inputs, and refuses what would distort the search.

Settings of a checkpoint that change the distribution are reset or refused, so that nothing creeps
in that the caller did not ask for. Prompts that do not end where the model is to continue are
refused too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cpsbs.models.transformers.modules import modules_of
from cpsbs.models.transformers.usual import USUAL, note_usual_inputs, usual_inputs

NEUTRAL: dict[str, Any] = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": None,
    "sequence_bias": None,
    "watermarking_config": None,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
}
"""Settings that can change the distribution, each with the value that does not."""

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings that transformers ignores without ``do_sample=True``."""


def inherited(model: Any, config: Any) -> dict[str, Any]:
    """Return the checkpoint's settings in ``config`` that change the distribution."""
    own = model.generation_config
    found = {name: getattr(own, name, None) for name in NEUTRAL}
    return {
        name: value
        for name, value in found.items()
        if value is not None and value != NEUTRAL[name] and getattr(config, name, None) == value
    }


def prepare(model: Any, processors: list[Any], **inputs: Any) -> dict[str, Any]:
    """Return what transformers passes to a decoding method, as arguments of ``from_generate``.

    Settings of the checkpoint that change the distribution are reset, unless the inputs name them;
    those that cannot be reset are refused. An encoder may be run later (``states_later``).
    """
    refuse_empty(inputs.get("input_ids"))
    _refuse_without_effect(inputs)
    own = inherited(model, model.generation_config)
    stubborn = [name for name in own if NEUTRAL[name] is None and name not in inputs]
    if stubborn:
        raise ValueError(
            f"model.generation_config sets {', '.join(stubborn)}, which changes the distribution; "
            "set it to None"
        )
    plain = {name: NEUTRAL[name] for name in own if name not in inputs}
    plain |= {"num_beams": 1, "num_return_sequences": 1}
    if not {"max_new_tokens", "max_length"} & inputs.keys():
        plain["max_new_tokens"] = 1

    def keep(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        return {
            "input_ids": input_ids,
            "config": generation_config,
            "processors": logits_processor,
            "criteria": stopping_criteria,
            "kwargs": kwargs,
        }

    later = states_later(model, inputs)
    usual = later is not None and not processors and inputs.keys() == USUAL
    given = inputs
    if later is not None:
        given = {**inputs, "encoder_outputs": _blank_states(model, inputs)}
    if usual:
        known = usual_inputs(model, inputs, given["encoder_outputs"])
        if known is not None:
            return {**known, "states": later}
    with evaluating(model):
        kept: dict[str, Any] = model.generate(
            **given, **plain, logits_processor=processors, custom_generate=keep
        )
    if usual:
        note_usual_inputs(model, inputs, kept)
    return {**kept, "states": later}


def _blank_states(model: Any, inputs: dict[str, Any]) -> Any:
    """Return what stands for the encoder's states until they are computed; its shape is read."""
    from transformers.modeling_outputs import BaseModelOutput

    size = (*inputs["input_ids"].shape, model.config.hidden_size)
    blank: Any = torch.zeros((), dtype=model.dtype, device=inputs["input_ids"].device).expand(size)
    return BaseModelOutput(blank)


def states_later(model: Any, inputs: dict[str, Any]) -> Callable[[], Tensor] | None:
    """Return a function that computes the encoder's states, if that needs nothing of ``generate``.

    It is called when the search starts. On a CPU that is in the thread that searches, so that
    several batches are encoded at once.
    """
    tokens = inputs.get("input_ids")
    if not isinstance(tokens, Tensor) or not model.config.is_encoder_decoder or model.training:
        return None
    from cpsbs.models.transformers.direct.encoding import encodes

    return partial(_states, model, inputs) if encodes(model, inputs) else None


def _states(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the encoder's states: on a CPU from its layers, elsewhere from its forward pass."""
    from cpsbs.models.transformers.direct.encoding import encoded

    tokens, mask = inputs["input_ids"], inputs["attention_mask"]
    states = encoded(model, tokens, mask) if tokens.device.type == "cpu" else None
    if states is not None:
        return states
    with evaluating(model), torch.no_grad():
        found: Tensor = model.get_encoder()(input_ids=tokens, attention_mask=mask).last_hidden_state
    return found


def _refuse_without_effect(inputs: dict[str, Any]) -> None:
    """Refuse settings that the search replaces, or that transformers would ignore."""
    for name in ("num_beams", "num_return_sequences"):
        if inputs.get(name) is not None:
            raise ValueError(f"{name} is {inputs[name]!r}; leave it out: the search takes k")
    if inputs.get("do_sample") or inputs.get("generation_config") is not None:
        return
    for name in SAMPLING:
        value = inputs.get(name)
        if value is not None and value != NEUTRAL[name]:
            raise ValueError(
                f"{name} is {value!r}, which transformers ignores without do_sample=True; give the "
                "search temperature or nucleus instead, or pass do_sample=True as well"
            )


@contextmanager
def naming_last_position(model: Any) -> Iterator[None]:
    """Raise a ValueError that names the limit where a model fails past its last position."""
    try:
        yield
    except IndexError as error:
        most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if most is None:
            raise
        whole = "max_length" if model.config.is_encoder_decoder else "the prompt and max_length"
        raise ValueError(
            f"the model failed on one more token ({error}); its max_position_embeddings is {most}, "
            f"which {whole} must not exceed"
        ) from error


def refuse_empty(input_ids: Tensor | None) -> None:
    """Refuse a batch without sources."""
    if input_ids is not None and not len(input_ids):
        raise ValueError("input_ids has no rows; a search needs at least one source")


def refuse_right_padding(ids: Tensor, mask: Tensor | None, pad: int | None) -> None:
    """Refuse prompts [B, t] that do not end where the model is to continue.

    The mask [B, t] says what is padding. If the caller gave none, transformers takes the padding
    token for padding, except where it also ends sequences. Then ``pad`` is that token, and a row
    that ends with it, where others do not, is taken to be padded.
    """
    padded = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    if mask is not None and mask.ndim == 2:
        padded |= mask[:, -1] == 0
    if pad is not None:
        ends = ids[:, -1] == pad
        padded |= ends & (ids != pad).any(-1) & ~ends.all()
    if bool(padded.any()):
        row = int(padded.nonzero()[0, 0])
        raise ValueError(
            f"input_ids is padded on the right in row {row}; prompts of a decoder-only model must "
            'be padded on the left: set tokenizer.padding_side = "left", and pass the attention '
            "mask"
        )


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Switch off dropout in a model that is being trained, and switch it on again afterwards.

    With dropout there is no one distribution to sample from.
    """
    training = [module for module in modules_of(model) if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
