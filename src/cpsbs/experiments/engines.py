"""Computes many cells at once, by workers of this machine or of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cpsbs.experiments.cells import Cell
from cpsbs.experiments.store import Row
from cpsbs.workers import Crew, Failed, Pool


class CellsFailedError(RuntimeError):
    """Raised when some cells could not be computed, after all others were."""


@dataclass(frozen=True)
class Computed:
    """The rows of a cell, and the seconds that computing them took."""

    rows: list[Row]
    seconds: float


def compute_cells(
    pool: Pool, cells: Sequence[Cell], workers: int
) -> Iterator[tuple[Cell, Computed]]:
    """Yield cells with their results, in the order in which they are completed.

    Raises:
        CellsFailedError: at the end, if some cells failed.
    """
    crew = Crew(pool, min(workers, len(cells)))
    failed: list[str] = []
    try:
        for _, cell, event in crew.compute(cells):
            if isinstance(event, Failed):
                failed.append(f"{cell.name}: {event.kind}: {event.reason}")
            else:
                yield cell, Computed(*event.value)
    finally:
        crew.stop()
    if failed:
        raise CellsFailedError(f"{len(failed)} of {len(cells)} cells failed; {failed[0]}")
