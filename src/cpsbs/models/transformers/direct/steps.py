"""Decoding steps on a CPU that run the layers of a known architecture directly.

The ordinary steps of transformers reorder the KV cache at every step, give every hypothesis keys of
its own, and make some hundred calls besides those that compute. Direct steps make only these. What
a model computes this way is compared with its ordinary steps before it is relied on; where they
differ, or a model is not one that ``families`` knows, the search goes on with the ordinary steps
and says so once in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from cpsbs.backends.cpu.compiled import library
from cpsbs.models.transformers.direct.compiled_decoder import CompiledSteps
from cpsbs.models.transformers.direct.decoder import Decoder, Encoded
from cpsbs.models.transformers.direct.prepared import (
    PREPARING,
    UnusualInputsError,
    one_thread,
    prepared,
    say,
)
from cpsbs.models.transformers.direct.slots import Slots
from cpsbs.models.transformers.int8 import is_quantized

MOST_ROWS = 32
"""The most rows of a source without compiled attention: torch lets all rows of a source attend to
all of its slots, and the work for those that are masked grows with the number of rows."""

KNOWN_INPUTS = frozenset(
    {"attention_mask", "encoder_outputs", "past_key_values", "position_ids", "use_cache"}
    | {"logits_to_keep", "cache_position"}
)
"""The inputs of a model after its prefill for which direct steps are right."""

TOLERANCE, INT8_TOLERANCE = 1e-5, 1e-2
"""How much log-probabilities of direct and ordinary steps may differ, relative to 32 + the largest
score. With int8 weights, inputs that differ in the last digit may be rounded to other integers."""


class OrdinarySteps(Protocol):
    """The model's own steps, with which direct steps are compared before they are used."""

    vocab_size: int

    def prefill(self) -> Tensor:
        """Return the scores [sources, V] of the first token, if nothing has been computed yet."""
        ...

    def advance(self, parent: Tensor, token: Tensor) -> Tensor:
        """Return the scores [rows, V] of rows ``parent`` [rows] extended by ``token`` [rows]."""
        ...


@torch.no_grad()
def begin(
    model: Any,
    inputs: Mapping[str, Any],
    rows: int,
    reference: Callable[[], OrdinarySteps],
) -> DirectSteps | None:
    """Return direct steps after the prefill, or None where they are impossible.

    The reason is logged once for each model.

    Args:
        model: a transformers model on a CPU, not in training mode.
        inputs: what the model has after the prefill, with one row for each source; it is left as
            it is.
        rows: the most rows that a source gets in the first step.
        reference: returns the model's ordinary steps, which start from the same inputs.
    """
    with PREPARING:
        return _begin(model, inputs, rows, reference)


def _begin(
    model: Any, inputs: Mapping[str, Any], rows: int, reference: Callable[[], OrdinarySteps]
) -> DirectSteps | None:
    known = prepared(model)
    if known.reason is not None:
        say(model, known, known.reason)
    if known.decoder is None or (rows > MOST_ROWS and library() is None):
        return None
    try:
        if one_thread() not in known.verified:
            direct = DirectSteps.after_prefill(known.decoder, inputs)
            _compare(direct, reference(), _tolerance(model))
            known.verified.add(one_thread())
        return DirectSteps.after_prefill(known.decoder, inputs)
    except UnusualInputsError as error:
        say(model, known, error)
    except Exception as error:
        known.decoder = None
        say(model, known, error)
    return None


@torch.no_grad()
def begin_from_states(
    model: Any,
    inputs: Mapping[str, Any],
    start: Tensor,
    reference: Callable[[], OrdinarySteps],
) -> tuple[DirectSteps, Tensor] | None:
    """Return direct steps of a decoder, and the scores [S, V] of the first token.

    None where they are impossible; the reason is logged once for each model.

    Args:
        model: a transformers model with an encoder on a CPU, not in training mode.
        inputs: what the model has before the prefill, the encoder's states among it.
        start: [S, 1] the token with which each sequence starts.
        reference: returns the model's ordinary steps, before the prefill.
    """
    if library() is None:
        return None
    with PREPARING:
        known = prepared(model)
        if known.decoder is None or known.decoder.layers[0].cross is None:
            return None
        source = torch.arange(len(start), device="cpu")
        try:
            if one_thread() not in known.prefill_verified:
                direct, ordinary = DirectSteps.from_states(known.decoder, inputs), reference()
                tolerance = _tolerance(model)
                expected = _of_ordinary(ordinary.prefill)
                _check(direct.advance(source, start[:, 0]), expected, tolerance, 0)
                _compare(direct, ordinary, tolerance)
                known.prefill_verified.add(one_thread())
            steps = DirectSteps.from_states(known.decoder, inputs)
        except UnusualInputsError as error:
            say(model, known, error)
            return None
        except Exception as error:
            known.decoder = None
            say(model, known, error)
            return None
    return steps, steps.advance(source, start[:, 0])


class DirectSteps:
    """The steps of one search.

    Args:
        decoder: the prepared parts of the model.
        slots: the keys and values of the prefixes.
        encoded: the keys and values of the encoder's states, if there is an encoder.
    """

    def __init__(self, decoder: Decoder, slots: Slots, encoded: Encoded | None) -> None:
        self._decoder, self._slots, self._encoded = decoder, slots, encoded

    @staticmethod
    def after_prefill(decoder: Decoder, inputs: Mapping[str, Any]) -> DirectSteps:
        """Return the steps of a model after its own prefill; see ``begin``."""
        _refuse_unusual(inputs)
        cache, mask = inputs.get("past_key_values"), inputs.get("attention_mask")
        if cache is None or (mask is not None and mask.ndim != 2):
            raise UnusualInputsError("it has no KV cache, or an attention mask of another shape")
        encoded, crosses = None, decoder.layers[0].cross is not None
        prompt = _keys_and_values(cache.self_attention_cache if crosses else cache)
        sources, _, length, _ = prompt[0][0].shape
        visible = torch.ones((sources, length), dtype=torch.bool, device="cpu")
        if crosses:
            if mask is not None and not bool(mask.any(-1).all()):
                raise UnusualInputsError("one of its sources is empty")
            encoded = Encoded(_keys_and_values(cache.cross_attention_cache), mask)
        elif mask is not None:
            visible = mask[:, :length].bool()  # transformers has added the next token to it
        position = inputs.get("position_ids")  # to which the next one has been added, too
        if position is not None and bool((position[..., -1] != visible.sum(-1)).any()):
            raise UnusualInputsError("the positions of its tokens are not those of its mask")
        return DirectSteps(decoder, Slots(prompt, visible), encoded)

    @staticmethod
    def from_states(decoder: Decoder, inputs: Mapping[str, Any]) -> DirectSteps:
        """Return the steps of a decoder without a prefix; see ``begin_from_states``."""
        _refuse_unusual(inputs)
        states, mask = inputs["encoder_outputs"].last_hidden_state, inputs.get("attention_mask")
        if mask is None or mask.shape != states.shape[:2] or not bool(mask.any(-1).all()):
            raise UnusualInputsError("it has no attention mask of the encoder's states")
        if states.dtype != torch.float32:
            raise UnusualInputsError(f"the states of its encoder are {states.dtype}")
        heads, sources = decoder.heads, len(states)
        shape = (sources, heads.keys, 0, heads.dim)
        nothing = torch.empty(shape, dtype=torch.float32, device="cpu")
        slots = Slots([(nothing, nothing)] * len(decoder.layers), nothing[:, 0, :, 0].bool())
        return DirectSteps(decoder, slots, Encoded.of_states(decoder, states, mask.bool()))

    @property
    def sources(self) -> int:
        """The number of sources."""
        return self._slots.sources

    def compiled(self) -> CompiledSteps | None:
        """Return what takes several of these steps in one call, if all of them is compiled."""
        return CompiledSteps.of(self._decoder, self._slots, self._encoded)

    def advance(self, parent: Tensor, token: Tensor) -> Tensor:
        """Return the scores [rows, V] of rows ``parent`` [rows] extended by ``token`` [rows]."""
        left = self._slots.advance(parent)
        if left is not None and self._encoded is not None:
            self._encoded.keep(left)
        return self._decoder.step(token, self._slots, self._encoded)


def _refuse_unusual(inputs: Mapping[str, Any]) -> None:
    """Raise if a model has inputs for which direct steps may be wrong."""
    given = {name for name, value in inputs.items() if value is not None}
    unusual = sorted(given - KNOWN_INPUTS)
    if unusual:
        raise UnusualInputsError(f"it was given {', '.join(unusual)}")


def _keys_and_values(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the keys and values [S, heads, T, dim] of all layers of a plain KV cache."""
    from transformers.cache_utils import DynamicLayer

    if not hasattr(cache, "layers") or any(type(x) is not DynamicLayer for x in cache.layers):
        raise UnusualInputsError(f"its KV cache is a {type(cache).__name__} of other layers")
    return [(layer.keys, layer.values) for layer in cache.layers]


def _tolerance(model: Any) -> float:
    """Return how much log-probabilities may differ, relative to 32 + the largest score."""
    return INT8_TOLERANCE if is_quantized(model) else TOLERANCE


def _compare(direct: DirectSteps, reference: OrdinarySteps, tolerance: float) -> None:
    """Raise if direct steps give other scores than ordinary ones.

    In the first step every source gets two rows, in the second these change places, and in the
    third every other source loses one of them.
    """
    sources = torch.arange(direct.sources, device="cpu")
    twice = sources.repeat_interleave(2)
    swapped = torch.arange(len(twice), device="cpu") ^ 1
    some = (torch.arange(len(twice), device="cpu") % 4 != 1).nonzero()[:, 0]
    for n, parent in enumerate((twice, swapped, some)):
        # Every row and step gets another token, so that a mistaken row or position shows.
        token = (7 * torch.arange(len(parent), device="cpu") + 3 + n) % reference.vocab_size
        expected = _of_ordinary(partial(reference.advance, parent, token))
        found = direct.advance(parent, token)
        _check(found, expected, tolerance, n + 1)


def _of_ordinary(compute: Callable[[], Tensor]) -> Tensor:
    """Return scores of the ordinary steps.

    Where these fail, as they do past the last position of a model, this search cannot be compared;
    that says nothing against direct steps in others.
    """
    try:
        return compute()
    except Exception as error:
        reason = f"its own steps cannot be compared: {type(error).__name__}: {error}"
        raise UnusualInputsError(reason) from None


def _check(found: Tensor, expected: Tensor, tolerance: float, step: int) -> None:
    """Raise if scores [n, V] differ by more than rounding explains."""
    p, wanted = expected.softmax(-1), expected.log_softmax(-1)
    gap = torch.where(p > 0, p * (found.log_softmax(-1) - wanted).abs(), 0.0).sum(-1).amax()
    scale = expected.masked_fill(expected.isinf(), 0.0).abs().amax()
    if not bool(gap <= tolerance * (32 + scale)):
        raise ValueError(f"log-probabilities differ by {float(gap):.2g} at step {step}")
