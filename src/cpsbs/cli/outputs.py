"""Writes results to the terminal or a pipe, in the order of the input, or to a file.

A file is written in two steps. During the run, results are appended to ``FILE.partial``, one per
line, after a first line that describes the job. When all are there, they are written in the order
of the input to a temporary file with a random name in the same folder, which is then renamed, so
that FILE is complete whenever it exists. The first line of the partial file contains the random
name, so that the next run can remove a temporary file that a crash left behind. The same command
run again resumes from the partial file; a last line that a crash cut short is dropped.
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

from cpsbs.cli.formats import Format, file_format
from cpsbs.cli.stored import (
    LONGEST,
    bounded_lines,
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
)

Record = dict[str, Any]

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The error codes for a full disk, a used up quota, and a file of maximal size."""


class Sink(Protocol):
    """Receives records, each with a ``number``, in any order."""

    @property
    def done(self) -> Set[int]:
        """The numbers of the records received so far."""

    def write(self, records: list[Record]) -> None:
        """Receive the records of a batch."""

    def finish(self) -> None:
        """Complete the output, after all records were received."""

    def close(self) -> None:
        """Release the output, whether it is complete or not."""


class OrderedOutput:
    """Shows each record as soon as all records before it are shown."""

    def __init__(self, show: Callable[[Record], None], numbers: Sequence[int]) -> None:
        self.done: set[int] = set()
        self._show = show
        self._waiting: dict[int, Record] = {}
        self._order = sorted(numbers, reverse=True)

    def write(self, records: list[Record]) -> None:
        """Receive the records of a batch, and show those whose turn it is."""
        self._waiting |= {record["number"]: record for record in records}
        self.done |= {record["number"] for record in records}
        while self._order and self._order[-1] in self._waiting:
            # It is shown before it is dropped, so that Ctrl-C in between does not lose it.
            self._show(self._waiting[self._order[-1]])
            del self._waiting[self._order.pop()]

    def finish(self) -> None:
        """Do nothing, since the last record was shown when it came."""

    def close(self) -> None:
        """Show the records that still wait for earlier ones, which will never come."""
        for number in sorted(self._waiting):
            self._show(self._waiting[number])
            del self._waiting[number]


class ResumableFile:
    """A file of results that is either complete or absent.

    Args:
        file: its path; see ``formats`` for what its ending means.
        job: everything that the results depend on. A file of another job is left alone.
        numbers: the numbers of all records that the file will have.
        long: whether the file has a row for each sequence, instead of one for each text.
        plain: the format of a file that ends in ``.txt``, if it is not JSON lines.

    Attributes:
        complete: whether the file already exists with all results of this job.
    """

    def __init__(
        self,
        file: Path,
        job: Record,
        numbers: Sequence[int],
        long: bool = False,
        plain: Format | None = None,
    ) -> None:
        _check_name(file)
        self._format = file_format(file, long, plain)
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
            with self._explaining_errors():
                self._open()
        except BaseException:
            self.close()
            raise

    @property
    def done(self) -> Set[int]:
        """The numbers of the records that are on the disk."""
        return self._offsets.keys()

    def write(self, records: list[Record]) -> None:
        """Append records; they count as done once they are on the disk."""
        lines = {r["number"]: to_line({**r, "job": self._mark}) for r in records}
        for number, line in lines.items():
            if len(line) > LONGEST:
                raise ValueError(
                    f"the result of text {number + 1} takes {len(line):,} bytes; a line of "
                    f"--output may have {LONGEST:,}. Choose a smaller -k or --max-length"
                )
        with self._explaining_errors():
            offset = self._append(b"".join(lines.values()))
        for number, line in lines.items():
            self._offsets[number] = offset
            offset += len(line)

    def finish(self) -> None:
        """Put the complete file in its place."""
        if len(self._offsets) != len(self._numbers):
            raise RuntimeError(
                f"only {len(self._offsets)} of {len(self._numbers)} results are there"
            )
        with self._explaining_errors():
            try:
                self._write_temporary()
                # Renaming would replace it: no portable call renames only to an unused name.
                if is_there(self.file):
                    raise ValueError(
                        f"{self.file} was created by another program in the meantime. Move it "
                        "away, and run the same command again"
                    )
                os.replace(self._temporary, self.file)
            except BaseException:
                with suppress(OSError):
                    self._temporary.unlink(missing_ok=True)
                raise
            self._remove_partial()

    def close(self) -> None:
        """Close the partial file, as the end of the process does."""
        if self._out is not None:
            self._out.close()

    @property
    def _stored(self) -> IO[bytes]:
        assert self._out is not None
        return self._out

    @property
    def _temporary(self) -> Path:
        """The path under which the complete file is written before it is renamed."""
        return self.file.with_name(f".cpsbs-{self._token}")

    def _open(self) -> None:
        refuse_irregular(self.file)
        if is_regular(self.file):
            self._accept()
            return
        self._out = open_locked(self.partial, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        if is_regular(self.file):  # another process has just completed it
            self._accept()
        else:
            self._resume()
            self._ready = True

    def _accept(self) -> None:
        """Check that the file that is there is complete, and clean up after it."""
        with os.fdopen(open_regular(self.file, os.O_RDONLY), "rb") as stored:
            try:
                self._format.check(stored, self._mark, self._numbers)
            except ValueError as error:
                raise ValueError(
                    f"--output is {self.file}, which exists already and is not what this command "
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
        """Remove the partial file that a crash left after completion, if it is of this job."""
        with self._reader() as stored:
            first = stored.readline(LONGEST + 1)
        with suppress(ValueError):  # the file only happens to have this name
            header = header_in(first)
            if not first or (header and header["job"] == self._job):
                self._remove_partial()

    def _remove_partial(self) -> None:
        # The name of the complete file must be on the disk before the partial file goes.
        sync_folder(self.file.parent)
        ours = is_same(self._stored, self.partial)
        self.close()
        if ours:
            self.partial.unlink(missing_ok=True)

    def _write_temporary(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(open_regular(self._temporary, flags), "wb") as out:
            self._format.write(out, self._lines)
            out.flush()
            os.fsync(out.fileno())

    def _reader(self) -> IO[bytes]:
        """Open the partial file for reading from its beginning; appending still goes to its end."""
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
                        f"{self.partial} was changed by another program in the meantime; run the "
                        "same command again to see which line it is"
                    )
                yield line

    def _append(self, data: bytes) -> int:
        """Write at the end of the partial file, and return the offset at which the data begins."""
        begin = os.fstat(self._stored.fileno()).st_size
        while data:
            data = data[self._stored.write(data) :]
        os.fsync(self._stored.fileno())
        return begin

    @contextmanager
    def _explaining_errors(self) -> Iterator[None]:
        """Turn an error of the system into a sentence that says what is safe and what to do."""
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise
            count = f"{len(self._offsets)} of {len(self._numbers)} results are safe"
            safe = count if self._ready else "no earlier result is lost"
            advice = "Free some space" if error.errno in NO_ROOM else "Fix this"
            raise OSError(
                f"--output is {self.file}, which could not be read or written: "
                f"{os.strerror(error.errno)}; {safe}. {advice}, and run the same command again"
            ) from error

    def _resume(self) -> None:
        """Find the records that are there, and cut off a line that a crash left incomplete."""
        with self._reader() as stored:
            first = stored.readline(LONGEST + 1)
            try:
                header = header_in(first)
            except ValueError as error:
                raise ValueError(
                    f"{self.partial}, to which results would be written, {error}. Move it away, or "
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
        """Record the offsets of all complete lines, and return where the last one ends.

        Return zero if there is none, so that a command that never wrote a result does not block
        another one.
        """
        for count, line in enumerate(bounded_lines(stored), 2):
            if not line.endswith(b"\n") and len(line) <= LONGEST:
                break
            self._check_same(job)
            try:
                self._note(line, end)
            except ValueError as error:
                raise ValueError(
                    f"{self.partial}: line {count} {error}. Remove this line to compute its "
                    "text again, or delete the file to start over"
                ) from error
            end += len(line)
        return end if self._offsets else 0

    def _note(self, line: bytes, offset: int) -> None:
        number = number_in(line, self._mark)
        if number not in self._expected:
            raise ValueError("has the number of no text")
        if number in self._offsets:
            raise ValueError(f"is another result of text {number + 1}")
        self._offsets[number] = offset

    def _check_same(self, before: Record) -> None:
        """Refuse a partial file that another job has written."""
        names = sorted(self._job.keys() | before.keys())
        unlike = [
            f"{name} ({_brief(before.get(name))} there, {_brief(self._job.get(name))} here)"
            for name in names
            if self._job.get(name) != before.get(name)
        ]
        if unlike:
            raise ValueError(
                f"{self.partial} was written by another command, which differs in "
                f"{', '.join(unlike)}. Give the same options to resume it, or delete it"
            )


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _check_name(file: Path) -> None:
    """Refuse a path that cannot be that of a result file."""
    if str(file) == "-":
        raise ValueError("--output is -; leave it out to write results to standard output")
    if not file.parent.is_dir():
        raise ValueError(f"--output is {file}, but there is no folder {file.parent}; create it")
    if not file.name:
        raise ValueError(f"--output is {file}, which is a folder; give the name of a file")
