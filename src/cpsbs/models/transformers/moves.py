"""Rows of a model's inputs that change places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Moves:
    """A new order of rows."""

    parent: Tensor
    """[rows] which rows they are."""
    anew: Tensor | None = None
    """If not all, those that are not yet what they will be; the tensor itself is changed."""

    def __call__(self, x: Tensor) -> Tensor:
        """The rows of x."""
        if self.anew is None:
            return x.index_select(0, self.parent.to(x.device))
        x.index_copy_(0, self.anew, x.index_select(0, self.parent[self.anew]))
        return x[: len(self.parent)]


def rows_of_value(value: Any, moves: Moves) -> Any:
    """Rows of a tensor, or of the tensors in a ModelOutput."""
    if isinstance(value, Tensor):
        return moves(value) if value.ndim else value
    if hasattr(value, "keys") and hasattr(value, "__setitem__"):
        for key in list(value.keys()):
            if isinstance(value[key], Tensor):
                value[key] = rows_of_value(value[key], moves)
    return value
