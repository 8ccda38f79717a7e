"""Keeps the parts of models that are run directly, and tells whether they are up to date."""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

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

SAMPLES = 8
"""How many numbers of every weight are compared to tell whether it has changed."""


class UnusualInputsError(Exception):
    """A model has inputs for which direct steps may be wrong; the message says which."""


@dataclass
class Prepared:
    """What is known of a model: its prepared parts, or why there are none."""

    state: WeightState
    decoder: Decoder | None = None
    encoder: Encoder | None = None
    verified: set[bool] = field(default_factory=set)
    """The values of ``one_thread`` for which the decoder was compared with the model's own."""
    prefill_verified: set[bool] = field(default_factory=set)
    """The same for the first step after an encoder and those that follow it."""
    encoder_verified: set[bool] = field(default_factory=set)
    """The same for the encoder."""
    reason: Exception | None = None
    """Why there are no prepared parts."""
    logged: bool = False


def one_thread() -> bool:
    """Return whether torch uses a single thread here, so that compiled loops do all they can."""
    return torch.get_num_threads() == 1


PREPARED: weakref.WeakKeyDictionary[Any, Prepared] = weakref.WeakKeyDictionary()
"""What is known of every model that was to be run directly."""

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
    ``weight.data += …``, show in a sample of its numbers. Modules, hooks and whatever replaces a
    ``forward`` are not held here, because they may refer to the model, which would never be freed.
    """

    def __init__(self, model: Any) -> None:
        self._modules = [weakref.ref(module) for module in modules_of(model)]
        found = self._found()
        assert found is not None
        self._parts, tensors, replaced = found
        self._replaced = [weakref.ref(x) for x in replaced if _can_be_referred_to(x)]
        every = [x.detach() for x in tensors]
        self._places = _places(tensors)
        # Views, which show the numbers as they are now as long as the addresses are the same.
        self._some = [_some(x.view(-1)) for x in every if x.is_contiguous()]
        self._scattered = [x for x in every if not x.is_contiguous()]
        self._sample = self._numbers()

    def holds(self) -> bool:
        """Return whether the weights and modules of the model are unchanged."""
        found = self._found()
        if found is None:
            return False
        parts, tensors, _ = found
        return (
            parts == self._parts
            and all(x() is not None for x in self._replaced)
            and _places(tensors) == self._places
            and torch.equal(self._numbers(), self._sample)
        )

    def _found(self) -> tuple[list[int], list[Tensor], list[Any]] | None:
        """Return the numbers of all modules and hooks, the weights, and what replaces ``forward``.

        None if a module is gone. It reads the dictionaries of the modules directly, because every
        search begins with this.
        """
        parts, tensors, replaced = list[int](), list[Tensor | None](), list[Any]()
        for reference in self._modules:
            module = reference()
            if module is None:
                return None
            own = vars(module)
            parts += map(id, own["_modules"].values())
            for hooks in (own["_forward_hooks"], own["_forward_pre_hooks"]):
                parts += hooks  # each has a number that no other hook ever gets
                parts.append(-1)
            tensors += own["_parameters"].values()
            tensors += own["_buffers"].values()
            if "forward" in own:
                parts.append(id(own["forward"]))
                replaced.append(own["forward"])
        return parts, [x for x in tensors if x is not None], replaced

    def _numbers(self) -> Tensor:
        """Return some numbers of every tensor."""
        every = [*self._some, *(_some(x.reshape(-1)) for x in self._scattered)]
        return torch.cat(every) if every else torch.empty(0, dtype=torch.float32, device="cpu")


def _places(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Return the address and the version of every tensor."""
    return [(x.data_ptr(), 0 if x.is_inference() else x._version) for x in tensors]


def _can_be_referred_to(x: Any) -> bool:
    """Return whether there are weak references to an object."""
    return type(x).__weakrefoffset__ != 0


def _some(x: Tensor) -> Tensor:
    """Return a view of about ``SAMPLES`` of the numbers [n], evenly spread."""
    return x[:: max(1, len(x) // SAMPLES)]
