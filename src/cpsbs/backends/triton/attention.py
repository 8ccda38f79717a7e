"""Replaces transformers' attention by our kernels, for keys and values that only they can read.

The attention that transformers calls is made for many queries, with keys for every row and head. In
a decoding step there is one query, and rows and heads share keys (see ``kernels.attention``).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes for which the kernels' float32 sums are exact enough."""

UNDERSTOOD = {
    *("module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal"),
    *("position_bias", "cache", "kwargs"),
}
"""Parameters of transformers' attention function whose meaning is known here."""

UNUSUAL = ("softcap", "s_aux", "head_mask", "layer_head_mask", "output_attentions", "cache")
"""Further arguments that a model may pass; with any of them, transformers' function is called."""

log = logging.getLogger("cpsbs")


class Held(Protocol):
    """A cache layer whose keys and values the model is shown only the shape of."""

    def attend(
        self, query: Tensor, mask: Tensor | None, bias: Tensor | None, scaling: float | None
    ) -> Tensor | None:
        """Return the output [rows, 1, heads, dim], or None if the kernel cannot compute it."""
        ...

    def is_shown_as(self, key: Tensor, value: Tensor) -> bool:
        """Return whether these tensors are what the model was shown."""
        ...


@contextlib.contextmanager
def one_query_attention(held: Sequence[Held]) -> Iterator[None]:
    """Let "sdpa" attention in this thread call ``attend`` of the layers held, where it can."""
    with _LOCK:
        _state.users += 1
        # If somebody has registered another function, theirs is the one to call.
        if _interface()["sdpa"] is sdpa_attention_forward and _state.understood:
            _interface.register("sdpa", _forward)
    before, _thread.held = _thread.held, held
    try:
        yield
    finally:
        _thread.held = before
        with _LOCK:
            _state.users -= 1
            if _state.users == 0 and _interface()["sdpa"] is _forward:
                _interface.register("sdpa", sdpa_attention_forward)


class _Thread(threading.local):
    held: Sequence[Held] = ()


class _State:
    users, broken = 0, False
    understood = set(inspect.signature(sdpa_attention_forward).parameters) <= UNDERSTOOD


_interface: Any = AttentionInterface
_thread, _state, _LOCK = _Thread(), _State(), threading.Lock()


def works() -> bool:
    """Return whether no kernel has failed so far, and transformers' function is the known one."""
    mine = (sdpa_attention_forward, _forward)
    return _state.understood and not _state.broken and _interface()["sdpa"] in mine


def _forward(*args: Any, **kwargs: Any) -> Any:
    """Call the kernels where possible, and ``sdpa_attention_forward`` elsewhere."""
    if _thread.held and not _state.broken:
        try:
            found = _if_possible(*args, **kwargs)
            if found is not None:
                return found, None
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _state.broken = True
            log.info("attention is computed without Triton: %s: %s", type(error).__name__, error)
    return sdpa_attention_forward(*args, **kwargs)


def _if_possible(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: Any = None,
    is_causal: Any = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return the kernels' output [rows, 1, heads, dim], or None where they do not apply.

    With a single query, ``is_causal`` makes no difference.
    """
    held = next((x for x in _thread.held if x.is_shown_as(key, value)), None)
    if held is None or query.ndim != 4:
        return None
    rows, heads, queries, dim = query.shape
    kv_heads, window = key.shape[1:3]
    added = [x for x in (attention_mask, position_bias) if x is not None]
    possible = (
        queries == 1
        and key.shape == value.shape == (rows, kv_heads, window, dim)
        and heads == kv_heads * getattr(module, "num_key_value_groups", 1)
        and dropout == 0
        and isinstance(scaling, float | int | None)
        and query.dtype == key.dtype
        and all(x.dtype in DTYPES and x.device == key.device for x in (query, *added))
        and all(x.ndim == 4 and x.shape[2:] == (1, window) for x in added)
        and all(x.shape[0] in (1, rows) and x.shape[1] in (1, heads) for x in added)
        and all(kwargs.get(name) is None or kwargs[name] is False for name in UNUSUAL)
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in (query, *added)))
        and not torch.compiler.is_compiling()
    )
    return held.attend(query, attention_mask, position_bias, scaling) if possible else None
