"""Sequence models: what the search needs of one (``base``), and adapters."""

from cpsbs.models.base import SequenceModel
from cpsbs.models.function import FunctionModel
from cpsbs.models.table import TableModel
from cpsbs.models.transformers.adapter import TransformersModel

__all__ = ["FunctionModel", "SequenceModel", "TableModel", "TransformersModel"]
