"""Results on the disk: a Parquet file for each cell, there and complete or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cpsbs.experiments.cells import Cell
from cpsbs.extras import required

Row = dict[str, Any]


class Store:
    """A folder of results."""

    def __init__(self, folder: Path) -> None:
        self._pyarrow: Any = required("pyarrow", "parquet")
        self._parquet: Any = required("pyarrow.parquet", "parquet")
        self._folder = folder / "cells"
        self._folder.mkdir(parents=True, exist_ok=True)

    def has(self, cell: Cell) -> bool:
        """Whether it is done."""
        return self._file(cell).exists()

    def write(self, cell: Cell, rows: list[Row], seconds: float) -> None:
        """Keep what came out of a cell, with its settings and how long it took."""
        metadata = {"settings": json.dumps(dict(cell.settings)), "seconds": str(seconds)}
        table = self._pyarrow.Table.from_pylist(rows).replace_schema_metadata(metadata)
        file = self._file(cell)
        partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
        with partial.open("wb") as out:
            self._parquet.write_table(table, out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, file)

    def rows(self, cells: Iterable[Cell]) -> list[Row]:
        """All rows of these cells, each with the cell's settings; cells not done are left out."""
        found: list[Row] = []
        for cell in cells:
            if self.has(cell):
                table = self._parquet.read_table(self._file(cell))
                found += [{**cell.settings, **row} for row in table.to_pylist()]
        return found

    def on_other_devices(self, cells: Iterable[Cell]) -> list[Cell]:
        """Cells that are there and differ from some of these in the device alone, in their order,
        one device after the other.
        """

        def without_device(cell: Cell) -> str:
            rest = {name: value for name, value in cell.settings.items() if name != "device"}
            return json.dumps([cell.kind, rest], sort_keys=True)

        timed = [cell for cell in cells if "device" in cell.settings]
        names = {cell.name for cell in timed}
        place = {without_device(cell): n for n, cell in enumerate(timed)}
        found: list[tuple[str, int, Cell]] = []
        for kind in {cell.kind for cell in timed}:
            for file in self._folder.glob(f"{kind}-*.parquet"):
                metadata = self._parquet.read_schema(file).metadata
                cell = Cell(kind, json.loads(metadata[b"settings"]), 0.0)
                if cell.name not in names and without_device(cell) in place:
                    found.append((cell.settings["device"], place[without_device(cell)], cell))
        return [cell for _, _, cell in sorted(found, key=lambda entry: entry[:2])]

    def seconds(self, cell: Cell) -> float:
        """How long a cell took."""
        schema = self._parquet.read_schema(self._file(cell))
        return float(schema.metadata[b"seconds"])

    def _file(self, cell: Cell) -> Path:
        return self._folder / f"{cell.name}.parquet"
