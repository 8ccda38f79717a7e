"""Caches what transformers prepares for the usual inputs of an encoder–decoder model.

Its preparation copies and validates whole configurations, which takes as long as a dozen steps of a
small search. With nothing but tokens and their mask, and without processors or stopping criteria,
only tensors differ from one batch to the next. So the rest is kept, and reused as long as the
model's configurations do not change.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from cpsbs.models.transformers.caches import CACHE, is_blank, shallow

OURS = ("MaxLengthCriteria", "EosTokenCriteria")
"""Stopping criteria that the search itself applies."""

USUAL = {"input_ids", "attention_mask"}
"""The names of the usual inputs."""

MADE = {"attention_mask", "encoder_outputs", CACHE, "use_cache"}
"""The names of what transformers makes of them."""


@dataclass(frozen=True)
class _Noted:
    """What transformers has prepared for some usual inputs of a model."""

    settings: tuple[dict[str, Any], dict[str, Any]]
    """The model's configurations at that time."""
    start: int
    """The token with which sequences start."""
    kept: dict[str, Any]
    """The arguments of a decoding method, without processors and stopping criteria."""


_NOTED: WeakKeyDictionary[Any, _Noted] = WeakKeyDictionary()


def usual_inputs(model: Any, inputs: dict[str, Any], states: Any) -> dict[str, Any] | None:
    """Return what transformers would prepare, or None where that is not known.

    Args:
        model: a transformers model.
        inputs: the usual inputs.
        states: what stands for the encoder's states.
    """
    noted = _NOTED.get(model)
    if noted is None or noted.settings != _settings(model):
        return None
    tokens = inputs["input_ids"]
    start = torch.full((len(tokens), 1), noted.start, device=tokens.device)
    kwargs = {
        **noted.kept["kwargs"],
        "attention_mask": inputs["attention_mask"],
        "encoder_outputs": states,
        CACHE: shallow(noted.kept["kwargs"][CACHE]),
    }
    return {**noted.kept, "input_ids": start, "kwargs": kwargs}


def note_usual_inputs(model: Any, inputs: dict[str, Any], kept: dict[str, Any]) -> None:
    """Note what transformers has prepared for the usual inputs, unless it is more than usual."""
    kwargs, start = kept["kwargs"], kept["input_ids"]
    criteria = {type(criterion).__name__ for criterion in kept["criteria"]}
    one_token = start.shape[1] == 1 and bool((start == start[0, 0]).all())
    plain = not kept["processors"] and criteria <= set(OURS) and one_token
    if not plain or kwargs.keys() != MADE or not is_blank(kwargs[CACHE]):
        return
    if not torch.equal(kwargs["attention_mask"], inputs["attention_mask"]):
        return
    tensors = {"attention_mask": None, "encoder_outputs": None}
    cache = copy.deepcopy(kwargs[CACHE])  # before anything is in it
    noted = {**kept, "criteria": [], "kwargs": {**kwargs, **tensors, CACHE: cache}}
    _NOTED[model] = _Noted(copy.deepcopy(_settings(model)), int(start[0, 0]), noted)


def _settings(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all that a model's configurations hold."""
    return vars(model.config), vars(model.generation_config)
