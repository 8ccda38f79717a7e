"""Models of transformers: the adapter, its processors, and its KV cache."""

from cpsbs.models.transformers.adapter import TransformersModel

__all__ = ["TransformersModel"]
