"""Selects rows of a model's inputs when hypotheses change rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Moves:
    """A selection of rows; calling it with a tensor returns the selected rows of that tensor."""

    parent: Tensor
    """[rows] which of the old rows each new row is."""
    changed: Tensor | None = None
    """The new rows that differ from the old ones in their places. If they are given, only these are
    written, into the tensor itself."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the selected rows of x."""
        if self.changed is None:
            return x.index_select(0, self.parent.to(x.device))
        x.index_copy_(0, self.changed, x.index_select(0, self.parent[self.changed]))
        return x[: len(self.parent)]


def rows_of_value(value: Any, moves: Moves) -> Any:
    """Return the selected rows of a tensor, or select those of all tensors in a ModelOutput."""
    if isinstance(value, Tensor):
        return moves(value) if value.ndim else value
    if hasattr(value, "keys") and hasattr(value, "__setitem__"):
        for key in list(value.keys()):
            if isinstance(value[key], Tensor):
                value[key] = rows_of_value(value[key], moves)
    return value
