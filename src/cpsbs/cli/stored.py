"""Reads and checks result files on the disk, in bounded memory.

A file with the name of a result file may be cut short, damaged, a device, or somebody else's. The
functions here raise a ``ValueError`` that says what is wrong with it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from cpsbs.search.export import finite_json

LONGEST = 2**26
"""The maximal number of bytes in a line; a longer one is refused, and not read into memory."""

MARK = 16
"""The number of characters of a mark that tell the job; those behind them tell its input."""

BEGINNING = b'{"cpsbs": "partial", '
"""The first bytes of every partial file."""

CAREFULLY = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
"""Flags for opening a file without following links, and without blocking on a named pipe."""


class OtherInputError(ValueError):
    """Raised for a result that the same command has computed from other texts."""


def to_line(record: dict[str, Any]) -> bytes:
    """Return a record as a line of JSON, with null for infinities and NaN, which JSON lacks."""
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(finite_json(record), ensure_ascii=False, allow_nan=False)
    # Half of a surrogate pair, such as in a file name that is not UTF-8, becomes an escape.
    return text.encode(errors="backslashreplace") + b"\n"


def is_there(path: Path) -> bool:
    """Return whether anything has this name, even if it is a link that leads nowhere."""
    return _mode(path) is not None


def is_regular(path: Path) -> bool:
    """Return whether this is a regular file, which a symbolic link is not."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def refuse_irregular(path: Path) -> None:
    """Refuse a path at which there is something other than a regular file."""
    mode = _mode(path)
    if mode is not None:
        _refuse_mode(path, mode)


def _mode(path: Path) -> int | None:
    # os.path.lexists would call a file absent that must not be inspected.
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return None


def _refuse_mode(path: Path, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    if stat.S_ISLNK(mode):
        kind = f"a symbolic link to {os.readlink(path)}"
    elif stat.S_ISDIR(mode):
        kind = "a folder"
    else:
        kind = "a named pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
    raise ValueError(
        f"{path} is {kind}; results are written to regular files only. Choose another --output"
    )


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file, and return its descriptor."""
    refuse_irregular(path)  # before opening, which can have consequences for a device
    descriptor = os.open(path, flags | CAREFULLY, 0o666)
    try:
        _refuse_mode(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_locked(path: Path, flags: int) -> IO[bytes]:
    """Open a regular file that only one process may write at a time, without a buffer.

    On systems without file locks, two processes can write it at once.
    """
    # A buffer would try again, later, to write what could not be written.
    file = os.fdopen(open_regular(path, flags), "r+b", buffering=0)
    try:
        _lock(file)
        if not is_same(file, path):  # the process that had locked it has just removed it
            raise BlockingIOError
    except BlockingIOError:
        file.close()
        raise ValueError(
            f"{path} is being written by another process; wait for it, or stop it"
        ) from None
    except BaseException:
        file.close()
        raise
    return file


def _lock(file: IO[bytes]) -> None:
    try:
        import fcntl
    except ImportError:
        return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_same(file: IO[bytes], path: Path) -> bool:
    """Return whether an open file is still the one at this path."""
    return is_regular(path) and os.path.samestat(os.fstat(file.fileno()), os.lstat(path))


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk, where the system supports that."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # the file system does not support it
            raise
    finally:
        os.close(descriptor)


def bounded_lines(stored: IO[bytes]) -> Iterator[bytes]:
    """Return the lines of a file; an overlong one comes in pieces that are overlong, too."""
    return iter(lambda: stored.readline(LONGEST + 1), b"")


def parsed(line: bytes) -> dict[str, Any]:
    """Return the JSON object in a line, or raise a ``ValueError`` that says what is wrong."""
    if len(line) > LONGEST:
        raise ValueError("is longer than any line that cpsbs writes")
    if not line.endswith(b"\n"):
        raise ValueError("is cut short")
    try:
        found = json.loads(line.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError("is not JSON") from error
    if not isinstance(found, dict):
        raise ValueError("is not a JSON object")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def number_in(line: bytes, mark: str) -> int:
    """Return the number of the result in a line, which the job with this mark must have written.

    Raises:
        ValueError: if the line is not a result of that job; it says why.
    """
    return checked_number(parsed(line), mark)


def checked_number(record: dict[str, Any], mark: str) -> int:
    """Return the number of a record, which the job with this mark must have written.

    Raises:
        ValueError: if the record is not a result of that job; it says why.
    """
    job = record.get("job")
    if job != mark:
        if isinstance(job, str) and job[:MARK] == mark[:MARK] and len(job) == len(mark):
            raise OtherInputError("was computed from another input")
        raise ValueError("was not written by this command")
    number = record.get("number")
    if type(number) is not int:  # True is an int too
        raise ValueError("has no number that is an integer")
    return number


def header_line(token: str, job: dict[str, Any]) -> bytes:
    """Return the first line of a partial file."""
    return BEGINNING + to_line({"token": token, "job": job}).removeprefix(b"{")


def header_in(line: bytes) -> dict[str, Any] | None:
    """Return the content of the first line of a partial file, or None if a crash cut it short."""
    if not line.endswith(b"\n") and len(line) <= LONGEST:
        if line.startswith(BEGINNING) or BEGINNING.startswith(line):
            return None
        raise ValueError("was not written by cpsbs")
    if not line.startswith(BEGINNING):
        raise ValueError("was not written by cpsbs")
    try:
        found = parsed(line)
    except ValueError as error:
        raise ValueError(f"is damaged: line 1 {error}") from error
    token, job = found.get("token"), found.get("job")
    if not isinstance(token, str) or not re.fullmatch("[0-9a-f]{16}", token):
        raise ValueError("is damaged: line 1 has no token")
    if not isinstance(job, dict):
        raise ValueError("is damaged: line 1 does not describe the job")
    return found
