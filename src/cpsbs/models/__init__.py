"""Models: where the scores of the next token come from.

``base`` defines what the search asks of a model, and ``cpsbs.check_model`` checks one. ``table``,
``function`` and ``transformers`` are models.
"""

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
