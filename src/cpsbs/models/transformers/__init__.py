"""Models of transformers: the adapter, its processors and KV cache; the hook for generate."""

from cpsbs.models.transformers.adapter import TransformersModel

__all__ = ["TransformersModel"]
