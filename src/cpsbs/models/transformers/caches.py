"""Tells whether KV caches of transformers are empty, and makes independent copies of them."""

from __future__ import annotations

import copy
from typing import Any

CACHE = "past_key_values"
"""The name of the KV cache among a model's inputs."""


def apart(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return inputs with the same tensors, which are replaced without changing the ones given."""
    copies = {
        name: copy.copy(value) if hasattr(value, "keys") else value
        for name, value in kwargs.items()
    }
    if kwargs.get(CACHE) is not None:
        copies[CACHE] = shallow(kwargs[CACHE])
    return copies


def is_blank(cache: Any) -> bool:
    """Return whether nothing is in a KV cache, so that a shallow copy is a cache of its own."""
    if cache is None:
        return True
    parts = [
        getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")
    ]
    if any(part is not None for part in parts):
        return all(map(is_blank, parts))
    layers = getattr(cache, "layers", None)
    return layers is not None and not any(getattr(x, "is_initialized", True) for x in layers)


def shallow(cache: Any) -> Any:
    """Return a cache with the same tensors, whose layers replace them without writing into them."""
    cache = copy.copy(cache)
    if hasattr(cache, "is_updated"):
        cache.is_updated = dict(cache.is_updated)
    for name in ("self_attention_cache", "cross_attention_cache"):
        if hasattr(cache, name):
            setattr(cache, name, shallow(getattr(cache, name)))
    if hasattr(cache, "layers"):
        cache.layers = [copy.copy(layer) for layer in cache.layers]
    return cache
