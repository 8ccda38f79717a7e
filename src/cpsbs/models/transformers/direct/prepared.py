"""What is known of the models that were asked to be run directly, and whether it is still true."""

from __future__ import annotations

import logging
import operator
import threading
from dataclasses import dataclass, field
from itertools import chain
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
)
from cpsbs.models.transformers.modules import modules_of

log = logging.getLogger("cpsbs")

HELD = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")
"""The dictionaries in which torch keeps what a module consists of."""

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
    prefill_verified: set[bool] = field(default_factory=set)
    """The same for the first step after an encoder and those that follow it."""
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
    known = PREPARED.get(model)
    if known is None or not known.state.holds():
        logged = known is not None and known.logged
        known = PREPARED[model] = Prepared(WeightState(model), logged=logged)
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
    """Tells whether the weights of a model are still the same, and what its modules compute.

    Most ways to change a weight show in its version or its address. Those that do not, such as
    ``weight.data += …``, show in a sample of its numbers.
    """

    def __init__(self, model: Any) -> None:
        self._tables: list[dict[Any, Any]] = [
            vars(module)[name] for module in modules_of(model) for name in HELD
        ]
        """Where torch keeps what each module consists of."""
        self._own: list[dict[str, Any]] = [vars(module) for module in modules_of(model)]
        """The attributes of each module, among which somebody may put another ``forward``."""
        self._held = self._holding()
        every = [x.detach() for x in self._held if isinstance(x, Tensor)]
        self._places = self._standing()
        # Views, which show the numbers as they are now as long as the addresses are the same.
        self._some = [_some(x.view(-1)) for x in every if x.is_contiguous()]
        self._scattered = [x for x in every if not x.is_contiguous()]
        self._sample = self._numbers()

    def holds(self) -> bool:
        """Return whether the weights of the model are what they were."""
        held = self._holding()
        same = len(held) == len(self._held) and all(map(operator.is_, held, self._held))
        return (
            same and self._standing() == self._places and torch.equal(self._numbers(), self._sample)
        )

    def _holding(self) -> list[Any]:
        """Return all modules, parameters, buffers and hooks, and what stands in for ``forward``."""
        replaced = [own["forward"] for own in self._own if "forward" in own]
        return [*chain.from_iterable(map(dict.values, self._tables)), *replaced]

    def _standing(self) -> list[tuple[int, int]]:
        """Return the address and the version of every tensor."""
        tensors = [x for x in self._held if isinstance(x, Tensor)]
        return [(x.data_ptr(), 0 if x.is_inference() else x._version) for x in tensors]

    def _numbers(self) -> Tensor:
        """Return some numbers of every tensor."""
        every = [*self._some, *(_some(x.reshape(-1)) for x in self._scattered)]
        return torch.cat(every) if every else torch.empty(0, dtype=torch.float32, device="cpu")


def _some(x: Tensor) -> Tensor:
    """Return a view of about ``SAMPLES`` of the numbers [n], evenly spread."""
    return x[:: max(1, len(x) // SAMPLES)]
