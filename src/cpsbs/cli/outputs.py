"""Where results go: the terminal or a pipe, in the order of the input; or a file.

A file is written in two steps. While the work goes on, finished results are appended to
``FILE.partial``, a line each, after a first line that says what job it is. When all are there they
are written beside it in the order of the input, and renamed, so that FILE is complete whenever it
exists. The same command run again goes on with the partial file; a line that a crash cut short is
dropped.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from cpsbs.extras import required

Record = dict[str, Any]

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, a quota, a file as large as it may be."""


class Sink(Protocol):
    """Takes records, each with a ``number``, in any order."""

    @property
    def done(self) -> Set[int]:
        """The numbers of those it has."""

    def write(self, records: list[Record]) -> None:
        """Take the results of a batch."""

    def finish(self) -> None:
        """All results are there."""

    def close(self) -> None:
        """No more will come, finished or not."""


class InOrder:
    """Shows each record as soon as all before it are shown."""

    def __init__(self, show: Callable[[Record], None], numbers: list[int]) -> None:
        self.done: set[int] = set()
        self._show = show
        self._waiting: dict[int, Record] = {}
        self._order = sorted(numbers, reverse=True)

    def write(self, records: list[Record]) -> None:
        """Take the results of a batch."""
        self._waiting |= {record["number"]: record for record in records}
        self.done |= {record["number"] for record in records}
        while self._order and self._order[-1] in self._waiting:
            self._show(self._waiting.pop(self._order.pop()))

    def finish(self) -> None:
        """The last one was shown when it came."""

    def close(self) -> None:
        """Nothing is held."""


class ResumableFile:
    """A file of JSON lines, or a Parquet file, that is complete or not there.

    Args:
        file: if its name ends in ``.parquet`` it is one, else it has JSON lines.
        job: what the results depend on. A file of another job is not touched.
        total: how many records there will be.
    """

    def __init__(self, file: Path, job: Record, total: int) -> None:
        self.file, self.partial = file, file.with_name(file.name + ".partial")
        self._job, self._total = job, total
        self._mark = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:16]
        self._offsets: dict[int, int] = {}
        if str(file) == "-":
            raise ValueError("--output is -; without --output, results go to standard output")
        if _is_parquet(file):
            required("pyarrow", "parquet")
        if not file.parent.is_dir():
            raise ValueError(f"--output is {file}, but there is no folder {file.parent}")
        self.complete = file.exists()
        self._out: IO[bytes] = io.BytesIO()
        if self.complete:
            if not _is_marked(file, self._mark):
                raise ValueError(
                    f"--output is {file}, which is there already and is not what this command "
                    "makes; delete it, or choose another name"
                )
            return
        _refuse_foreign(self.partial)
        # Not buffered: what could not be written is not tried again behind our back.
        self._out = self.partial.open("ab", buffering=0)
        try:
            _lock(self._out, self.partial)
            self._resume()
        except BaseException:
            self.close()
            raise

    @property
    def done(self) -> Set[int]:
        """The numbers of the records that are written."""
        return self._offsets.keys()

    def write(self, records: list[Record]) -> None:
        """Append, and see to it that it is on the disk before it counts as done."""
        begin = self.partial.stat().st_size
        offsets, lines = {}, b""
        for record in records:
            offsets[record["number"]] = begin + len(lines)
            marked = {**record, "job": self._mark}
            lines += json.dumps(marked, ensure_ascii=False).encode() + b"\n"
        self._append(lines)
        self._offsets |= offsets

    def finish(self) -> None:
        """Put the complete file in its place."""
        if len(self._offsets) != self._total:
            raise RuntimeError(f"{len(self._offsets)} of {self._total} results are there")
        whole = self.file.with_name(self.file.name + ".whole")
        try:
            with self._room_needed(), whole.open("wb") as out:
                if _is_parquet(self.file):
                    _write_parquet(out, [json.loads(line) for line in self._lines()])
                else:
                    out.writelines(self._lines())
                out.flush()
                os.fsync(out.fileno())
            os.replace(whole, self.file)
        except OSError:
            if whole.is_file():
                whole.unlink()
            raise
        self.close()
        self.partial.unlink()

    def close(self) -> None:
        """Let go of the partial file, as the end of the process does."""
        self._out.close()

    def _lines(self) -> Iterator[bytes]:
        """The records, in the order of the input."""
        with self.partial.open("rb") as stored:
            for _, offset in sorted(self._offsets.items()):
                stored.seek(offset)
                yield stored.readline()

    def _append(self, data: bytes) -> None:
        with self._room_needed():
            while data:
                data = data[self._out.write(data) :]
            os.fsync(self._out.fileno())

    @contextmanager
    def _room_needed(self) -> Iterator[None]:
        """A full disk is told as such."""
        try:
            yield
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise OSError(
                f"{self.file}: {os.strerror(error.errno)}; {len(self._offsets)} of {self._total} "
                "results are safe. Make room, and give the same command again"
            ) from error

    def _resume(self) -> None:
        """See what is there, and cut off what a crash left of a line."""
        with self.partial.open("rb") as stored:
            first = stored.readline()
            offset = stored.tell() if first.endswith(b"\n") else 0
            while offset and (line := stored.readline()).endswith(b"\n"):
                self._offsets[json.loads(line)["number"]] = offset
                offset = stored.tell()
        if self._offsets:
            self._check_same(json.loads(first)["job"])
        else:
            offset = 0  # a command that never got anywhere is in nobody's way
        self._out.truncate(offset)
        if not offset:
            self._append(BEGINNING + json.dumps(self._job).encode() + b"}\n")

    def _check_same(self, before: Record) -> None:
        names = sorted(self._job.keys() | before.keys())
        unlike = [n for n in names if self._job.get(n) != before.get(n)]
        if unlike:
            raise ValueError(
                f"{self.partial} was begun by another command; it differs in {', '.join(unlike)}. "
                "Give the same options to go on with it, or delete it"
            )


BEGINNING = b'{"job": '
"""Of every partial file."""


def _refuse_foreign(partial: Path) -> None:
    """Leave alone what only happens to be called so."""
    if partial.exists():
        with partial.open("rb") as stored:
            begin = stored.read(len(BEGINNING) + 1)
        if not begin.startswith(BEGINNING + b"{") and not (BEGINNING + b"{").startswith(begin):
            raise ValueError(f"{partial} is not of cpsbs; move it away")


def _is_parquet(file: Path) -> bool:
    return file.suffix.lower() == ".parquet"


def _is_marked(file: Path, mark: str) -> bool:
    """Whether the first record of a complete file is of this job."""
    try:
        if _is_parquet(file):
            table: Any = required("pyarrow.parquet", "parquet").read_table(file, columns=["job"])
            return bool(table["job"][0].as_py() == mark)
        with file.open("rb") as lines:
            return bool(json.loads(next(lines))["job"] == mark)
    except (OSError, ValueError, LookupError, TypeError, StopIteration):
        return False


def _write_parquet(out: IO[bytes], records: list[Record]) -> None:
    """A row for each record; its settings, which are a dictionary, as JSON."""
    pyarrow: Any = required("pyarrow", "parquet")
    parquet: Any = required("pyarrow.parquet", "parquet")
    for record in records:
        record["settings"] = json.dumps(record.get("settings"))
    parquet.write_table(pyarrow.Table.from_pylist(records), out)


def _lock(out: IO[bytes], file: Path) -> None:
    """Only one process may write; on systems that do not know such locks, nobody checks."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ValueError(f"{file} is being written by another process") from error
