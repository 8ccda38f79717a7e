"""Attention of models to keys and values that lie in another way than transformers has them.

What transformers calls otherwise is made for many queries and for keys of every row and head; in a
decoding step there is one query, and rows and heads share keys (see ``kernels.attention``).
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
"""Those whose sums in float32 are good enough."""

UNDERSTOOD = {
    *("module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal"),
    *("position_bias", "kwargs"),
}
"""Parameters of transformers' function whose meaning is known here."""

UNUSUAL = ("softcap", "s_aux", "head_mask", "layer_head_mask", "output_attentions")
"""What a model may also ask for; transformers' function decides what becomes of it."""

log = logging.getLogger("cpsbs")


class Held(Protocol):
    """Keys and values of a layer of which the model is given only the shape."""

    def attend(
        self, query: Tensor, mask: Tensor | None, bias: Tensor | None, scaling: float | None
    ) -> Tensor | None:
        """[rows, 1, heads, dim], or None if the kernel cannot."""
        ...

    def is_meant(self, key: Tensor, value: Tensor) -> bool:
        """Whether these are what the model was given."""
        ...


@contextlib.contextmanager
def one_query_attention(held: Sequence[Held]) -> Iterator[None]:
    """In this thread, attention "sdpa" of models to what is held comes from its kernels."""
    with _LOCK:
        _state.users += 1
        # Whoever has put something else there wants that.
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
    """Whether no kernel has failed so far, and transformers calls what is known here."""
    mine = (sdpa_attention_forward, _forward)
    return _state.understood and not _state.broken and _interface()["sdpa"] in mine


def _forward(*args: Any, **kwargs: Any) -> Any:
    """In place of ``sdpa_attention_forward``."""
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
    """[rows, 1, heads, dim], or None. It does not matter whether one query is causal."""
    held = next((x for x in _thread.held if x.is_meant(key, value)), None)
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
