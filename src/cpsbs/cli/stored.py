"""Result files on the disk: only regular files, in bounded memory, with every line checked.

Whatever is found on the disk under the name of a result file may be cut short, damaged, or somebody
else's. The functions here say what is wrong with it in a ``ValueError``.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from cpsbs.extras import required
from cpsbs.search.beams import finite_json

LONGEST = 2**26
"""The most bytes in a line. A longer one is refused instead of being read into memory."""

GROUP = 2**24
"""About how many bytes of JSON become one row group of a Parquet file."""

BEGINNING = b'{"cpsbs": "partial", '
"""Every partial file begins with this."""

CAREFULLY = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
"""Flags for opening a file: no link is followed, and a named pipe does not block."""


def to_line(record: dict[str, Any]) -> bytes:
    """Return a record as a line of JSON; infinities and NaN, which JSON does not have, are null."""
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(finite_json(record), ensure_ascii=False, allow_nan=False)
    # Half of a surrogate pair, say from a file name that is not UTF-8, becomes an escape of JSON.
    return text.encode(errors="backslashreplace") + b"\n"


def is_there(path: Path) -> bool:
    """Return whether there is anything of this name, be it a link that leads nowhere."""
    return _mode(path) is not None


def is_regular(path: Path) -> bool:
    """Return whether there is a regular file of this name; a symbolic link is none."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def refuse_irregular(path: Path) -> None:
    """Refuse a name under which there is something other than a regular file."""
    mode = _mode(path)
    if mode is not None:
        _refuse_mode(path, mode)


def _mode(path: Path) -> int | None:
    # Not os.path.lexists, which takes a file that cannot be looked at for one that is not there.
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
        f"{path} is {kind}; results are only written to regular files. Choose another --output"
    )


def open_regular(path: Path, flags: int) -> int:
    """Open a file that is regular, and return its descriptor."""
    refuse_irregular(path)  # before it is opened, since opening a device can have consequences
    descriptor = os.open(path, flags | CAREFULLY, 0o666)
    try:
        _refuse_mode(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_locked(path: Path, flags: int) -> IO[bytes]:
    """Open a regular file that only one process may write at a time, without a buffer.

    On systems that do not have such locks, nothing keeps two processes apart.
    """
    # Not buffered: what could not be written must not be tried again behind our back.
    file = os.fdopen(open_regular(path, flags), "r+b", buffering=0)
    try:
        _lock(file)
        if not is_same(file, path):  # the process that had it has just removed it
            raise BlockingIOError
    except BlockingIOError:
        file.close()
        raise ValueError(f"{path} is being written by another process") from None
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
    """Return whether an open file is still the one of this name."""
    return is_regular(path) and os.path.samestat(os.fstat(file.fileno()), os.lstat(path))


def sync_folder(folder: Path) -> None:
    """See to it that the names in a folder are on the disk, where the system can do that."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # a file system that cannot do it
            raise
    finally:
        os.close(descriptor)


def bounded_lines(stored: IO[bytes]) -> Iterator[bytes]:
    """Return the lines of a file; of a line that is too long, pieces that are too long as well."""
    return iter(lambda: stored.readline(LONGEST + 1), b"")


def parsed(line: bytes) -> dict[str, Any]:
    """Return the JSON object in a line, or say what is wrong with the line."""
    if len(line) > LONGEST:
        raise ValueError("is longer than any that cpsbs writes")
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
    """Return the number of the result in a line of the job with this mark.

    Otherwise say what is wrong with the line.
    """
    record = parsed(line)
    if record.get("job") != mark:
        raise ValueError("was not written by this command")
    number = record.get("number")
    if type(number) is not int:  # True is an int too
        raise ValueError("has no number of a text")
    return number


def header_line(token: str, job: dict[str, Any]) -> bytes:
    """Return the first line of a partial file."""
    return BEGINNING + to_line({"token": token, "job": job}).removeprefix(b"{")


def header_in(line: bytes) -> dict[str, Any] | None:
    """Return what the first line of a partial file says, or None where a crash cut it short."""
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
        raise ValueError("is damaged: line 1 does not say what job it is")
    return found


def check_lines(stored: IO[bytes], mark: str, numbers: Sequence[int]) -> None:
    """Refuse a file of JSON lines that does not hold exactly these results in this order."""
    count = 0
    for count, line in enumerate(bounded_lines(stored), 1):
        if count > len(numbers):
            raise ValueError(f"it has more than {len(numbers)} lines")
        try:
            number = number_in(line, mark)
        except ValueError as error:
            raise ValueError(f"line {count} {error}") from error
        if number != numbers[count - 1]:
            raise ValueError(f"line {count} is not the result of text {numbers[count - 1] + 1}")
    if count < len(numbers):
        raise ValueError(f"it ends after {count} of {len(numbers)} results")


def check_parquet(stored: IO[bytes], mark: str, numbers: Sequence[int]) -> None:
    """Refuse a Parquet file that does not hold exactly these results in this order."""
    pyarrow: Any = required("pyarrow", "parquet")
    parquet: Any = required("pyarrow.parquet", "parquet")
    try:
        with parquet.ParquetFile(stored) as file:
            _check_columns(file, mark, numbers)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # it is the disk that failed, not the file that is wrong
        raise ValueError("it is not a whole Parquet file") from error


def _check_columns(file: Any, mark: str, numbers: Sequence[int]) -> None:
    rows = file.metadata.num_rows
    if rows != len(numbers):
        raise ValueError(f"it has {rows} rows instead of {len(numbers)}")
    kinds = {field.name: str(field.type) for field in file.schema_arrow}
    if (kinds.get("number"), kinds.get("job")) != ("int64", "string"):
        raise ValueError("it lacks the columns number and job")
    row = 0
    for batch in file.iter_batches(columns=["number", "job"]):
        for found in batch.to_pylist():
            if found["job"] != mark:
                raise ValueError(f"row {row + 1} was not written by this command")
            if found["number"] != numbers[row]:
                raise ValueError(f"row {row + 1} is not the result of text {numbers[row] + 1}")
            row += 1


def write_parquet(out: IO[bytes], lines: Callable[[], Iterator[bytes]]) -> None:
    """Write a row for each line of JSON; the settings, which are a dictionary, stay JSON.

    The lines are gone through twice, so that only some of them are in memory: first for the types
    of the columns, since a column may be empty in many lines, and then for the rows.
    """
    pyarrow: Any = required("pyarrow", "parquet")
    parquet: Any = required("pyarrow.parquet", "parquet")
    kinds = [pyarrow.Table.from_pylist(rows).schema for rows in _row_groups(lines())]
    schema = pyarrow.unify_schemas(kinds, promote_options="permissive")
    with parquet.ParquetWriter(out, schema) as writer:
        for rows in _row_groups(lines()):
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))


def _row_groups(lines: Iterator[bytes]) -> Iterator[list[dict[str, Any]]]:
    rows, size = [], 0
    for line in lines:
        record = parsed(line)
        rows.append(record | {"settings": json.dumps(record.get("settings"))})
        size += len(line)
        if size >= GROUP:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows
