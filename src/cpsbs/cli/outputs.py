"""Where results go: the terminal or a pipe, in the order of the input; or a file.

A file is written in two steps. While the work goes on, finished results are appended to
``FILE.partial``, a line each, after a first line that says what job it is. When all are there they
are written in the order of the input to a temporary file of a random name in the same folder, which
is then renamed, so that FILE is complete whenever it exists. The name stands in the first line of
the partial file, so that the next run can remove a temporary file that a crash left behind. The
same command run again goes on with the partial file; a last line that a crash cut short is dropped.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

from cpsbs.cli.stored import (
    LONGEST,
    bounded_lines,
    check_lines,
    check_parquet,
    header_in,
    header_line,
    is_regular,
    is_same,
    is_there,
    number_in,
    open_locked,
    open_regular,
    refuse_irregular,
    sync_folder,
    to_line,
    write_parquet,
)
from cpsbs.extras import required

Record = dict[str, Any]

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk is full, a quota is used up, or a file is as large as it may be."""


class Sink(Protocol):
    """Takes records, each with a ``number``, in any order."""

    @property
    def done(self) -> Set[int]:
        """The numbers of the records that it has."""

    def write(self, records: list[Record]) -> None:
        """Take the results of a batch."""

    def finish(self) -> None:
        """Complete the output, now that all results are there."""

    def close(self) -> None:
        """Let go of the output, whether it is finished or not."""


class InOrder:
    """Shows each record as soon as all before it are shown."""

    def __init__(self, show: Callable[[Record], None], numbers: Sequence[int]) -> None:
        self.done: set[int] = set()
        self._show = show
        self._waiting: dict[int, Record] = {}
        self._order = sorted(numbers, reverse=True)

    def write(self, records: list[Record]) -> None:
        """Take the results of a batch."""
        self._waiting |= {record["number"]: record for record in records}
        self.done |= {record["number"] for record in records}
        while self._order and self._order[-1] in self._waiting:
            # Shown before it is dropped, so that Ctrl-C in between does not lose it.
            self._show(self._waiting[self._order[-1]])
            del self._waiting[self._order.pop()]

    def finish(self) -> None:
        """Do nothing: the last record was shown when it came."""

    def close(self) -> None:
        """Show the records that still wait for earlier ones, which will not come any more."""
        for number in sorted(self._waiting):
            self._show(self._waiting[number])
            del self._waiting[number]


class ResumableFile:
    """A file of JSON lines, or a Parquet file, that is complete or not there.

    Args:
        file: if its name ends in ``.parquet`` it is a Parquet file, else it has JSON lines.
        job: what the results depend on. A file of another job is not touched.
        numbers: the numbers of the records that there will be.

    Attributes:
        complete: whether the file is there already, with all results of this job.
    """

    def __init__(self, file: Path, job: Record, numbers: Sequence[int]) -> None:
        _check_name(file)
        self.file, self.partial = file, file.with_name(file.name + ".partial")
        self.complete = False
        self._job: Record = json.loads(json.dumps(job))
        self._numbers = sorted(numbers)
        self._expected = set(numbers)
        self._mark = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:16]
        self._offsets: dict[int, int] = {}
        self._token = ""
        self._ready = False
        self._out: IO[bytes] | None = None
        try:
            with self._errors_told():
                self._open()
        except BaseException:
            self.close()
            raise

    @property
    def done(self) -> Set[int]:
        """The numbers of the records that are written."""
        return self._offsets.keys()

    def write(self, records: list[Record]) -> None:
        """Append records, which count as done when they are on the disk."""
        lines = {r["number"]: to_line({**r, "job": self._mark}) for r in records}
        for number, line in lines.items():
            if len(line) > LONGEST:
                raise ValueError(
                    f"the result of text {number + 1} takes {len(line):,} bytes; --output has room "
                    f"for {LONGEST:,}. Choose a smaller -k or --max-length"
                )
        with self._errors_told():
            offset = self._append(b"".join(lines.values()))
        for number, line in lines.items():
            self._offsets[number] = offset
            offset += len(line)

    def finish(self) -> None:
        """Put the complete file in its place."""
        if len(self._offsets) != len(self._numbers):
            raise RuntimeError(f"{len(self._offsets)} of {len(self._numbers)} results are there")
        with self._errors_told():
            try:
                self._write_temporary()
                # Renaming would replace it; there is no portable way to rename only to a free name.
                if is_there(self.file):
                    raise ValueError(
                        f"{self.file} was made by somebody else in the meantime. Move it away, and "
                        "give the same command again"
                    )
                os.replace(self._temporary, self.file)
            except BaseException:
                with suppress(OSError):
                    self._temporary.unlink(missing_ok=True)
                raise
            self._remove_partial()

    def close(self) -> None:
        """Let go of the partial file, as the end of the process does."""
        if self._out is not None:
            self._out.close()

    @property
    def _stored(self) -> IO[bytes]:
        assert self._out is not None
        return self._out

    @property
    def _temporary(self) -> Path:
        """Where the complete file is written before it gets its name."""
        return self.file.with_name(f".cpsbs-{self._token}")

    def _open(self) -> None:
        refuse_irregular(self.file)
        if is_regular(self.file):
            self._accept()
            return
        self._out = open_locked(self.partial, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        if is_regular(self.file):  # another process has just finished it
            self._accept()
        else:
            self._resume()
            self._ready = True

    def _accept(self) -> None:
        """Take the file that is there as complete, if it is."""
        check = check_parquet if _is_parquet(self.file) else check_lines
        with os.fdopen(open_regular(self.file, os.O_RDONLY), "rb") as stored:
            try:
                check(stored, self._mark, self._numbers)
            except ValueError as error:
                raise ValueError(
                    f"--output is {self.file}, which is there already and is not what this command "
                    f"writes: {error}. Delete it, or choose another name"
                ) from error
        self.complete = True
        if self._out is None and is_regular(self.partial):
            with suppress(ValueError):  # the process that wrote it is about to remove it
                self._out = open_locked(self.partial, os.O_RDWR)
        if self._out is not None:
            self._remove_leftovers()
            self.close()

    def _remove_leftovers(self) -> None:
        """Remove what a crash left after the file was complete, if it is of this job."""
        with self._reader() as stored:
            first = stored.readline(LONGEST + 1)
        with suppress(ValueError):  # it only happens to have this name
            header = header_in(first)
            if not first or (header and header["job"] == self._job):
                self._remove_partial()

    def _remove_partial(self) -> None:
        # First of all, the complete file's name must be on the disk.
        sync_folder(self.file.parent)
        ours = is_same(self._stored, self.partial)
        self.close()
        if ours:
            self.partial.unlink(missing_ok=True)

    def _write_temporary(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(open_regular(self._temporary, flags), "wb") as out:
            if _is_parquet(self.file):
                write_parquet(out, self._lines)
            else:
                out.writelines(self._lines())
            out.flush()
            os.fsync(out.fileno())

    def _reader(self) -> IO[bytes]:
        """Read the partial file from its beginning; appending goes on at its end."""
        stored = os.fdopen(os.dup(self._stored.fileno()), "rb")
        stored.seek(0)
        return stored

    def _lines(self) -> Iterator[bytes]:
        """Yield the lines of the records, in the order of the input."""
        with self._reader() as stored:
            for number, offset in sorted(self._offsets.items()):
                stored.seek(offset)
                line = stored.readline(LONGEST + 1)
                try:
                    same = number_in(line, self._mark) == number
                except ValueError:
                    same = False
                if not same:
                    raise ValueError(
                        f"{self.partial} was changed by somebody else in the meantime; give the "
                        "same command again to see which line it is"
                    )
                yield line

    def _append(self, data: bytes) -> int:
        """Write at the end of the partial file, and return where that was."""
        begin = os.fstat(self._stored.fileno()).st_size
        while data:
            data = data[self._stored.write(data) :]
        os.fsync(self._stored.fileno())
        return begin

    @contextmanager
    def _errors_told(self) -> Iterator[None]:
        """Tell an error of the system in a sentence, with what is safe and what to do."""
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise
            count = f"{len(self._offsets)} of {len(self._numbers)} results are safe"
            safe = count if self._ready else "no result that was there is lost"
            way_out = "Make room" if error.errno in NO_ROOM else "See what is wrong there"
            raise OSError(
                f"--output is {self.file}, which could not be read or written: "
                f"{os.strerror(error.errno)}; {safe}. {way_out}, and give the same command again"
            ) from error

    def _resume(self) -> None:
        """See which records are there, and cut off what a crash left of a line."""
        with self._reader() as stored:
            first = stored.readline(LONGEST + 1)
            try:
                header = header_in(first)
            except ValueError as error:
                raise ValueError(
                    f"{self.partial}, where results would be kept, {error}. Move it away, or "
                    "choose another --output"
                ) from error
            self._token = header["token"] if header else ""
            end = self._scan(stored, header["job"], len(first)) if header else 0
        if header and is_regular(self._temporary):
            self._temporary.unlink()
        if os.fstat(self._stored.fileno()).st_size != end:
            os.ftruncate(self._stored.fileno(), end)
        if not end:
            self._token = secrets.token_hex(8)
            self._append(header_line(self._token, self._job))
            sync_folder(self.file.parent)

    def _scan(self, stored: IO[bytes], job: Record, end: int) -> int:
        """Note the records behind the first line, and return where the last whole one ends.

        Zero is returned where there is none: a command that never got anywhere does not stand in
        the way of another one.
        """
        for count, line in enumerate(bounded_lines(stored), 2):
            if not line.endswith(b"\n") and len(line) <= LONGEST:
                break
            self._check_same(job)
            try:
                self._note(line, end)
            except ValueError as error:
                raise ValueError(
                    f"{self.partial}: line {count} {error}. Remove this line to have its text "
                    "computed again, or delete the file to begin anew"
                ) from error
            end += len(line)
        return end if self._offsets else 0

    def _note(self, line: bytes, offset: int) -> None:
        number = number_in(line, self._mark)
        if number not in self._expected:
            raise ValueError("has a number that no text has")
        if number in self._offsets:
            raise ValueError(f"is a second result of text {number + 1}")
        self._offsets[number] = offset

    def _check_same(self, before: Record) -> None:
        names = sorted(self._job.keys() | before.keys())
        unlike = [
            f"{name} ({_brief(before.get(name))} there, {_brief(self._job.get(name))} here)"
            for name in names
            if self._job.get(name) != before.get(name)
        ]
        if unlike:
            raise ValueError(
                f"{self.partial} was begun by another command; it differs in {', '.join(unlike)}. "
                "Give the same options to go on with it, or delete it"
            )


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _check_name(file: Path) -> None:
    """Refuse what cannot be the name of a result file."""
    if str(file) == "-":
        raise ValueError("--output is -; without --output, results go to standard output")
    if _is_parquet(file):
        required("pyarrow", "parquet")
    if not file.parent.is_dir():
        raise ValueError(f"--output is {file}, but there is no folder {file.parent}")
    if not file.name:
        raise ValueError(f"--output is {file}, which is a folder; give the name of a file")


def _is_parquet(file: Path) -> bool:
    return file.suffix.lower() == ".parquet"
