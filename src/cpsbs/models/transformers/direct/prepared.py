"""What is known of the models that were asked to be run directly, and whether it is still true."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cpsbs.models.transformers.direct.decoder import Decoder
from cpsbs.models.transformers.direct.encoder import Encoder
from cpsbs.models.transformers.direct.families import (
    UnknownArchitectureError,
    decoder_of,
    encoder_of,
    parameters,
)

log = logging.getLogger("cpsbs")

SAMPLES = 8
"""How many numbers of every weight tell whether it has changed."""


class UnusualInputsError(Exception):
    """A model has inputs for which direct steps may be wrong; the message says which."""


@dataclass
class Prepared:
    """What is known of a model: its prepared parts, or why there are none."""

    state: WeightState
    decoder: Decoder | None = None
    encoder: Encoder | None = None
    verified: set[bool] = field(default_factory=set)
    """For which ways to compute the decoder was compared with the model's own; see ``one_thread``.
    """
    encoder_verified: set[bool] = field(default_factory=set)
    """The same for the encoder."""
    reason: Exception | None = None
    """Why there are none."""
    logged: bool = False


def one_thread() -> bool:
    """Return whether this thread computes alone, so that all it can is done by compiled loops."""
    return torch.get_num_threads() == 1


PREPARED: WeakKeyDictionary[Any, Prepared] = WeakKeyDictionary()
"""The models that were asked to be run directly."""

PREPARING = threading.Lock()
"""Held while a model is prepared: threads that search it at once must all take the same steps."""


def prepared(model: Any) -> Prepared:
    """Return what is known of a model; the caller holds ``PREPARING``."""
    state = WeightState.of(model)
    known = PREPARED.get(model)
    if known is None or known.state != state:
        known = PREPARED[model] = Prepared(state, logged=known is not None and known.logged)
        try:
            known.decoder = decoder_of(model)
            known.encoder = encoder_of(model)
        except Exception as error:
            # Without its traceback, whose frames would keep the model alive for ever.
            known.reason = error.with_traceback(None)
    return known


def say(model: Any, known: Prepared, error: Exception) -> None:
    """Log why a model takes ordinary steps, once."""
    expected = isinstance(error, UnknownArchitectureError | UnusualInputsError)
    reason = str(error) if expected else f"{type(error).__name__}: {error}"
    if not known.logged:
        log.info("%s takes the ordinary steps of transformers: %s", type(model).__name__, reason)
    known.logged = True


class WeightState:
    """Tells whether the weights of a model are still the same.

    Most ways to change a weight show in its version or its address. Those that do not, such as
    ``weight.data += …``, show in a sample of its numbers.
    """

    def __init__(self, places: list[tuple[int, int]], sample: Tensor) -> None:
        self._places, self._sample = places, sample

    @staticmethod
    def of(model: Any) -> WeightState:
        """Return the present state of a model's weights."""
        every = [x.detach() for x in parameters(model)]
        versions = [0 if x.is_inference() else x._version for x in every]
        places = [(x.data_ptr(), version) for x, version in zip(every, versions, strict=True)]
        flat = [x.reshape(-1) for x in every if x.numel()]
        some = [x[:: max(1, x.numel() // SAMPLES)].double() for x in flat]
        return WeightState(
            places, torch.cat(some) if some else torch.empty(0, dtype=torch.float32, device="cpu")
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WeightState):
            return NotImplemented
        return self._places == other._places and torch.equal(self._sample, other._sample)

    __hash__ = None  # type: ignore[assignment]
