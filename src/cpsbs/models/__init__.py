"""Sequence models: the contract (``base``), a check of it (``checks``), and adapters."""

from cpsbs.models.base import FixedRowModel, SequenceModel, StoppingModel
from cpsbs.models.function import FunctionModel
from cpsbs.models.table import TableModel
from cpsbs.models.transformers.adapter import TransformersModel

__all__ = [
    "FixedRowModel",
    "FunctionModel",
    "SequenceModel",
    "StoppingModel",
    "TableModel",
    "TransformersModel",
]
