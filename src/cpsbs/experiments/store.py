"""Stores results on the disk: one Parquet file per cell, either complete or absent.

A file counts as a result only if it can be read completely and names this very cell as its own.
Cells whose files were damaged, cut short, renamed or copied are computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from cpsbs.experiments.cells import Cell
from cpsbs.extras import required

Row = dict[str, Any]

Stamp = tuple[int, int, int]
"""The inode, size and modification time of a file, which change whenever the file does."""

METADATA = (b"cell", b"seconds", b"digest")
"""The metadata that every file has."""


@dataclass(frozen=True)
class _Result:
    """The content of a file that can be read completely."""

    cell: str
    """The identity of the cell whose result this is."""
    seconds: float
    table: Any


class Store:
    """A folder of results.

    Args:
        folder: results are in its subfolder ``cells``, which the first result creates.
    """

    def __init__(self, folder: Path) -> None:
        self._pyarrow: Any = required("pyarrow", "parquet")
        self._parquet: Any = required("pyarrow.parquet", "parquet")
        self.folder = folder / "cells"
        # Thousands of files are needed again and again; each is read once, until it changes.
        self._read: dict[str, tuple[Stamp, _Result | str]] = {}

    def has(self, cell: Cell) -> bool:
        """Return whether the result of a cell is there and can be used."""
        return isinstance(self._find(cell), _Result)

    def unusable(self, cells: Iterable[Cell]) -> list[str]:
        """Return a phrase about each file that is named after one of these cells, but is not its
        result.
        """
        found = ((self._file(cell), self._find(cell)) for cell in cells)
        return [f"{file} cannot be used ({why})" for file, why in found if isinstance(why, str)]

    def write(self, cell: Cell, rows: list[Row], seconds: float) -> None:
        """Store the rows of a cell, and how long it took, in place of its previous file."""
        table = self._pyarrow.Table.from_pylist(rows)
        metadata = {"cell": cell.identity, "seconds": repr(float(seconds))}
        metadata["digest"] = _digest(metadata["cell"], metadata["seconds"], table)
        with replacing(self._file(cell)) as out:
            self._parquet.write_table(table.replace_schema_metadata(metadata), out)

    def rows(self, cells: Iterable[Cell]) -> list[Row]:
        """Return all rows of these cells, each with the cell's settings.

        Cells without a usable result are left out.
        """
        found: list[Row] = []
        for cell in cells:
            result = self._find(cell)
            if isinstance(result, _Result):
                found += [{**cell.settings, **row} for row in result.table.to_pylist()]
        return found

    def devices(self) -> list[str]:
        """Return the names of all devices that there are times for, on whatever machine."""
        results = [self._content(file) for file in self.folder.glob("runtime-*.parquet")]
        cells = [json.loads(r.cell) for r in results if isinstance(r, _Result)]
        return sorted({settings["device"] for kind, settings in cells if kind == "runtime"})

    def seconds(self, cell: Cell) -> float:
        """Return how long a stored cell took."""
        result = self._find(cell)
        if not isinstance(result, _Result):
            raise ValueError(f"there is no result of {cell.name} in {self.folder}; compute it")
        return result.seconds

    def _file(self, cell: Cell) -> Path:
        return self.folder / f"{cell.name}.parquet"

    def _find(self, cell: Cell) -> _Result | str | None:
        """Return the result of a cell, why its file is unusable, or None if there is no file."""
        found = self._content(self._file(cell))
        if isinstance(found, _Result) and found.cell != cell.identity:
            return "it is the result of another cell"
        return found

    def _content(self, file: Path) -> _Result | str | None:
        """Return the content of a file, why it is unusable, or None if there is no file."""
        try:
            status = file.lstat()
        except FileNotFoundError:
            return None
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        known = self._read.get(file.name)
        if known is None or known[0] != stamp:
            regular = stat.S_ISREG(status.st_mode)
            content = self._checked(file) if regular else "it is not a regular file"
            known = self._read[file.name] = (stamp, content)
        return known[1]

    def _checked(self, file: Path) -> _Result | str:
        try:
            source = self._pyarrow.BufferReader(file.read_bytes())
            table = self._parquet.ParquetFile(source).read(use_threads=False)
            metadata = table.schema.metadata or {}
            cell, seconds, digest = (metadata[name].decode() for name in METADATA)
            intact = digest == _digest(cell, seconds, table)
        except KeyError:
            return "it does not name the cell whose result it is"
        except Exception as error:  # arbitrary bytes can fail anywhere within Arrow
            return f"it cannot be read: {type(error).__name__}"
        if not intact:
            return "its content differs from what was written"
        return _Result(cell, float(seconds), table)


def _digest(cell: str, seconds: str, table: Any) -> str:
    """Return a digest of the content of a file, which is the same in every version of Arrow."""
    content = json.dumps([cell, seconds, table.to_pydict()])
    return hashlib.sha256(content.encode()).hexdigest()


@contextmanager
def replacing(file: Path) -> Iterator[IO[bytes]]:
    """Open a new file for writing, which replaces ``file`` once it is on the disk.

    If the block fails, nothing has changed. A link at that path is replaced and not followed; a
    folder is moved aside, since it may contain something that is needed.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    # The name is unique: no other process has this file open, and it is not a link.
    partial = file.with_name(f"{file.name}.{uuid4().hex}.partial")
    try:
        with partial.open("xb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        if file.is_dir() and not file.is_symlink():
            file.rename(file.with_name(f"{file.name}.{uuid4().hex}.aside"))
        os.replace(partial, file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # other systems cannot open a folder
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
