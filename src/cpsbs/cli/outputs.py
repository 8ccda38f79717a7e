"""Writes results to a file, which is complete whenever it exists, and resumes after a crash.

A file is written in two steps. During the run, results are appended to ``FILE.partial``, one per
line, after a first line that describes the job. When all are there, they are written in the order
of the input to a temporary file with a random name in the same folder, which is then renamed, so
that FILE is complete whenever it exists. The first line of the partial file contains the random
name, so that the next run can remove a temporary file that a crash left behind. The same command
run again resumes from the partial file; a last line that a crash cut short is dropped.

The input comes in windows, and only the windows that are being worked on are held in memory. The
results of one window stand together in the partial file, in any order, after those of all windows
before. Every result has a mark: a hash of the job, and one of all input up to the end of its
window. A command that resumes reads its input again from the beginning, window by window, along
with the partial file, and compares the marks.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from cpsbs.cli.formats import Format, file_format, read_wide
from cpsbs.cli.ordered import Record
from cpsbs.cli.replay import Replay
from cpsbs.cli.source import Window
from cpsbs.cli.stored import (
    LONGEST,
    MARK,
    header_in,
    header_line,
    is_regular,
    is_same,
    is_there,
    open_locked,
    open_regular,
    refuse_irregular,
    sync_folder,
    to_line,
)

RESULT = re.compile(rb'\{"number": (\d+), ')
"""Matches the beginning of a line that ``ResumableFile`` writes."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The error codes for a full disk, a used up quota, and a file of maximal size."""


class ResumableFile:
    """A file of results that is either complete or absent.

    Args:
        file: its path; see ``formats`` for what its ending means.
        job: everything that the results depend on, besides the input. A file of another job is
            left alone.
        long: whether the file has a row for each sequence, instead of one for each text.
        plain: the format of a file that ends in ``.txt``, if it is not JSON lines.
        seen: called with every record that is there already, or is written.
        total: returns how many records the file will have, or None if that is not known.

    Attributes:
        complete: whether the file already exists; ``check`` tells whether it is of this job.
        count: the number of records that are on the disk, as far as windows have begun.
    """

    def __init__(
        self,
        file: Path,
        job: Record,
        long: bool = False,
        plain: Format | None = None,
        seen: Callable[[Record], None] | None = None,
        total: Callable[[], int | None] = lambda: None,
    ) -> None:
        _check_name(file)
        self._format = file_format(file, long, plain)
        self.file, self.partial = file, file.with_name(file.name + ".partial")
        self.complete = False
        self.count = 0
        self._job: Record = json.loads(json.dumps(job))
        self._mark = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:MARK]
        self._seen, self._total = seen, total
        self._windows: list[tuple[int, str]] = []  # how many records each has, and their mark
        self._missing: dict[int, str] = {}  # the mark of each record that is expected
        self._replay: Replay | None = None
        self._header = 0
        self._token = ""
        self._ready = False
        self._out: IO[bytes] | None = None
        try:
            with self._explaining_errors():
                self._open()
        except BaseException:
            self.close()
            raise

    def begin(self, window: Window) -> set[int]:
        """Expect the records of another window, and return the numbers of those that are there."""
        mark = self._mark_of(window)
        done: set[int] = set()
        if self._replay is not None:
            with self._explaining_errors():
                done = self._replay.window(window, mark, self._seen)
                self.count += len(done)
                if len(done) < len(window.numbers):
                    self._end_replay()
        self._windows.append((len(window.numbers), mark))
        self._missing.update(dict.fromkeys(set(window.numbers) - done, mark))
        return done

    def write(self, records: list[Record]) -> None:
        """Append records that are missing; they count as done once they are on the disk."""
        lines = {}
        for record in records:
            number = record["number"]
            lines[number] = line = to_line({**record, "job": self._missing[number]})
            if len(line) > LONGEST:
                raise ValueError(
                    f"the result of text {number + 1} takes {len(line):,} bytes; a line of "
                    f"--output may have {LONGEST:,}. Choose a smaller -k or --max-length"
                )
        with self._explaining_errors():
            self._append(b"".join(lines.values()))
        self.count += len(lines)
        for number in lines:
            del self._missing[number]
        if self._seen is not None:
            for record in records:
                self._seen(record)

    def finish(self) -> None:
        """Put the complete file in its place."""
        total = sum(count for count, _ in self._windows)
        if self.count != total:
            raise RuntimeError(f"only {self.count} of {total} results are there")
        with self._explaining_errors():
            self._end_replay()
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
        if self._replay is not None:
            self._replay.close()
        if self._out is not None:
            self._out.close()

    def _mark_of(self, window: Window) -> str:
        return f"{self._mark}-{window.digest}"

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
        self.complete = is_regular(self.file)
        if self.complete:
            return
        self._out = open_locked(self.partial, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self.complete = is_regular(self.file)  # another process has just completed it
        if not self.complete:
            self._resume()
            self._ready = True

    def check(self, windows: Iterable[Window]) -> None:
        """Check that the file that is there has the results of all windows, and clean up after it.

        With ``seen``, which needs a wide file, the file is read twice at the same time.
        """
        with (
            self._explaining_errors(),
            os.fdopen(open_regular(self.file, os.O_RDONLY), "rb") as stored,
        ):
            try:
                self._format.check(stored, self._expected(windows))
            except ValueError as error:
                raise ValueError(
                    f"--output is {self.file}, which exists already and is not what this command "
                    f"writes: {error}. Delete it, or choose another name"
                ) from error
            if self._out is None and is_regular(self.partial):
                with suppress(ValueError):  # the process that wrote it is about to remove it
                    self._out = open_locked(self.partial, os.O_RDWR)
            if self._out is not None:
                self._remove_leftovers()
                self.close()

    def _expected(self, windows: Iterable[Window]) -> Iterator[tuple[int, str]]:
        records = read_wide(self.file) if self._seen else None
        for window in windows:
            for number in window.numbers:
                yield number, self._mark_of(window)
                # The next one is asked for when this one has been checked.
                if records is not None and self._seen is not None:
                    self._seen(next(records))

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
            end = self._header
            for count, mark in self._windows:
                stored.seek(end)
                offsets = {}
                for _ in range(count):
                    line = stored.readline(LONGEST + 1)
                    offsets[self._number(line, mark)] = end
                    end += len(line)
                if len(offsets) < count:
                    self._refuse_changes()
                for number, offset in sorted(offsets.items()):
                    stored.seek(offset)
                    line = stored.readline(LONGEST + 1)
                    if self._number(line, mark) != number:
                        self._refuse_changes()
                    yield line

    def _number(self, line: bytes, mark: str) -> int:
        """Return the number in a line that this process has written or checked already."""
        found = RESULT.match(line)
        if not found or not line.endswith(b'"job": "%s"}\n' % mark.encode()):
            self._refuse_changes()
        return int(found[1])

    def _refuse_changes(self) -> NoReturn:
        raise ValueError(
            f"{self.partial} was changed by another program in the meantime; run the same command "
            "again to see which line it is"
        )

    def _append(self, data: bytes) -> None:
        """Write at the end of the partial file."""
        while data:
            data = data[self._stored.write(data) :]
        os.fsync(self._stored.fileno())

    @contextmanager
    def _explaining_errors(self) -> Iterator[None]:
        """Turn an error of the system into a sentence that says what is safe and what to do."""
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise
            count = f"{of_total(self.count, self._total())} results are safe"
            safe = count if self._ready else "no earlier result is lost"
            advice = "Free some space" if error.errno in NO_ROOM else "Fix this"
            raise OSError(
                f"--output is {self.file}, which could not be read or written: "
                f"{os.strerror(error.errno)}; {safe}. {advice}, and run the same command again"
            ) from error

    def _resume(self) -> None:
        """Find out whether there are results to resume from, or begin the partial file."""
        with self._reader() as stored:
            first = stored.readline(LONGEST + 1)
            try:
                header = header_in(first)
            except ValueError as error:
                raise ValueError(
                    f"{self.partial}, to which results would be written, {error}. Move it away, or "
                    "choose another --output"
                ) from error
            second = stored.readline(LONGEST + 1)
        self._token, self._header = header["token"] if header else "", len(first)
        # A command that never wrote a result does not block another one.
        resumed = header is not None and (second.endswith(b"\n") or len(second) > LONGEST)
        if header and resumed:
            self._check_same(header["job"])
        if header and is_regular(self._temporary):
            self._temporary.unlink()
        if resumed:
            self._replay = Replay(self._reader(), self.partial, self._header)
            return
        os.ftruncate(self._stored.fileno(), 0)
        self._token = secrets.token_hex(8)
        line = header_line(self._token, self._job)
        self._header = len(line)
        self._append(line)
        sync_folder(self.file.parent)

    def _end_replay(self) -> None:
        """Cut off a line that a crash left incomplete, from where on new results are written."""
        if self._replay is not None:
            end = self._replay.end()
            if os.fstat(self._stored.fileno()).st_size != end:
                os.ftruncate(self._stored.fileno(), end)
            self._replay.close()
            self._replay = None

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


def of_total(count: int, total: int | None) -> str:
    """Return a count, and out of how many it is where that is known."""
    return f"{count:,}" if total is None else f"{count:,} of {total:,}"


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
