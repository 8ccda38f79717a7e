"""The adapter for transformers models: its inputs, its logits processors, and its KV cache."""

from cpsbs.models.transformers.adapter import TransformersModel

__all__ = ["TransformersModel"]
