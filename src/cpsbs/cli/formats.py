"""The formats of result files: what a file looks like when it is complete.

The ending of the name decides: ``.parquet`` is a Parquet file, ``.csv`` a CSV file, and anything
else JSON lines. A *wide* file has one row for each text; a *long* one, with ``--format long``, has
one for each sequence, with the columns of ``Beams.to_pandas``. Every row tells the job that wrote
it, so that the same command recognises its own complete file. A command may also write one field
alone, as plain text, to a file that ends in ``.txt``. A further ending, ``.gz`` or ``.zst``,
compresses the file.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from cpsbs.cli.compression import (
    check_available,
    compressing,
    decompressed,
    ending,
    is_compressed,
)
from cpsbs.cli.stored import bounded_lines, checked_number, number_in, parsed, to_line
from cpsbs.extras import required
from cpsbs.search.export import COLUMNS, sequence_rows

GROUP = 2**24
"""The approximate number of bytes of JSON that become one row group of a Parquet file."""

BREAKS = re.compile("\r\n|[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
"""Matches all that any program may take for the end of a line."""

Lines = Callable[[], Iterator[bytes]]
"""Returns the results as lines of JSON, one for each text, in their order; may be called again."""

Row = dict[str, Any]

Expected = Iterator[tuple[int, str]]
"""The number and the mark of every text that a file must have, in their order."""


class Format(Protocol):
    """Writes a complete file, and recognises one."""

    def write(self, out: IO[bytes], lines: Lines) -> None:
        """Write all results."""
        ...

    def check(self, stored: IO[bytes], expected: Expected) -> None:
        """Refuse a file that does not hold the results of these texts, written by this job."""
        ...


def file_format(file: Path, long: bool, plain: Format | None = None) -> Format:
    """Return the format of a file, by its name's ending; ``plain`` is that of text, if any."""
    if is_compressed(file):
        check_available(file)
        if ending(file) == ".parquet":
            raise ValueError(
                f"--output is {file}, but Parquet is compressed inside; leave out {file.suffix}"
            )
        return Compressed(file, file_format(Path(file.stem), long, plain))
    if ending(file) == ".txt" and plain is not None:
        return plain
    if ending(file) == ".parquet":
        required("pyarrow", "parquet")
        return LongParquet() if long else WideParquet()
    if ending(file) == ".csv":
        if not long:
            raise ValueError(
                f"--output is {file}, but a CSV file needs a row for each sequence; add "
                "--format long"
            )
        return LongCsv()
    return LongLines() if long else WideLines()


def read_wide(file: Path) -> Iterator[Row]:
    """Yield the records of a complete wide file."""
    if file.suffix.lower() == ".parquet":
        parquet: Any = required("pyarrow.parquet", "parquet")
        with parquet.ParquetFile(file) as stored:
            for row in _parquet_rows(stored, None):
                yield row | {"settings": json.loads(row["settings"])}
    else:
        with file.open("rb") as raw:
            yield from map(parsed, bounded_lines(decompressed(raw, file)))


def long_rows(record: Row) -> list[Row]:
    """Return a row for each sequence of a record, with all that is told of it."""
    rows = sequence_rows(record["number"], record, record["texts"])
    for rank, row in enumerate(rows):
        if "bleu" in record:
            row["bleu"] = record["bleu"][rank]
        if "job" in record:
            row["job"] = record["job"]
    return rows


class WideLines:
    """JSON lines, one for each text."""

    def write(self, out: IO[bytes], lines: Lines) -> None:
        """Write the lines as they are."""
        out.writelines(lines())

    def check(self, stored: IO[bytes], expected: Expected) -> None:
        """Check that there is a line for each text, in their order."""
        count = 0
        for count, line in enumerate(bounded_lines(stored), 1):
            number, mark = _next(expected, count, "lines")
            try:
                found = number_in(line, mark)
            except ValueError as error:
                raise ValueError(f"line {count} {error}") from error
            if found != number:
                raise ValueError(f"line {count} is not the result of text {number + 1}")
        _check_end(expected, count, "results")


class PlainTexts:
    """Text, with one field of each record on the line that has its number, and nothing else.

    Nothing in the file tells which job wrote it, so that a file that is there already is never
    taken for the result of this one.

    Args:
        field: the field.
        count: returns the number of lines, when all results are there. A line that has no record,
            since it was skipped, is empty.
    """

    def __init__(self, field: str, count: Callable[[], int]) -> None:
        self._field, self._count = field, count

    def write(self, out: IO[bytes], lines: Lines) -> None:
        """Write the fields, each on one line."""
        place = 0
        for record in map(parsed, lines()):
            out.write(b"\n" * (record["number"] - place))
            text = one_line(record[self._field])
            out.write(text.encode(errors="backslashreplace") + b"\n")
            place = record["number"] + 1
        out.write(b"\n" * (self._count() - place))

    def check(self, stored: IO[bytes], expected: Expected) -> None:
        """Refuse the file: nothing in it tells whether this command wrote it."""
        raise ValueError("plain text does not tell which command wrote it")


class Compressed:
    """Another format, compressed."""

    def __init__(self, file: Path, inner: Format) -> None:
        self._file, self._inner = file, inner

    def write(self, out: IO[bytes], lines: Lines) -> None:
        """Write all results, compressed."""
        with compressing(out, self._file) as compressed:
            self._inner.write(compressed, lines)

    def check(self, stored: IO[bytes], expected: Expected) -> None:
        """Check the decompressed file."""
        content = decompressed(stored, self._file)
        try:
            self._inner.check(content, expected)
        finally:
            content.detach()  # type: ignore[attr-defined]  # so that the file stays open


def one_line(text: str) -> str:
    """Return the text with a space instead of each line break."""
    return BREAKS.sub(" ", text)


class WideParquet:
    """Parquet, one row for each text; the settings, which are an object, stay JSON."""

    def write(self, out: IO[bytes], lines: Lines) -> None:
        """Write row groups, in bounded memory.

        The lines are read twice: first for the types of the columns, since a column may be empty
        in many lines, and then for the rows.
        """
        pyarrow: Any = required("pyarrow", "parquet")
        parquet: Any = required("pyarrow.parquet", "parquet")
        kinds = [pyarrow.Table.from_pylist(rows).schema for rows in _groups(lines(), _wide_row)]
        schema = pyarrow.unify_schemas(kinds, promote_options="permissive")
        with parquet.ParquetWriter(out, schema) as writer:
            for rows in _groups(lines(), _wide_row):
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))

    def check(self, stored: IO[bytes], expected: Expected) -> None:
        """Check footer, columns and the number of every row."""
        with _ParquetFile(stored, {"number": "int64", "job": "string"}) as file:
            count = 0
            for count, row in enumerate(_parquet_rows(file, ["number", "job"]), 1):
                number, mark = _next(expected, count, "rows")
                try:
                    found = checked_number(row, mark)
                except ValueError as error:
                    raise ValueError(f"row {count} {error}") from error
                if found != number:
                    raise ValueError(f"row {count} is not the result of text {number + 1}")
            _check_end(expected, count, "results")


class LongLines:
    """JSON lines, one for each sequence."""

    def write(self, out: IO[bytes], lines: Lines) -> None:
        """Write a line for each sequence."""
        for line in lines():
            out.writelines(to_line(row) for row in long_rows(parsed(line)))

    def check(self, stored: IO[bytes], expected: Expected) -> None:
        """Check that the lines are those of all texts, in their order."""

        def rows() -> Iterator[Row]:
            for count, line in enumerate(bounded_lines(stored), 1):
                try:
                    yield parsed(line)
                except ValueError as error:
                    raise ValueError(f"line {count} {error}") from error

        _check_long(rows(), expected)


class LongCsv:
    """CSV with a header, one row for each sequence; tokens are a JSON list."""

    def write(self, out: IO[bytes], lines: Lines) -> None:
        """Write a header and a row for each sequence."""
        header: list[str] = []
        for line in lines():
            for row in long_rows(parsed(line)):
                if not header:
                    header = list(row)
                    out.write(_csv_line(header))
                out.write(
                    _csv_line([json.dumps(v) if k == "tokens" else v for k, v in row.items()])
                )

    def check(self, stored: IO[bytes], expected: Expected) -> None:
        """Check that the rows are those of all texts, in their order."""
        text = io.TextIOWrapper(stored, encoding="utf-8", errors="replace", newline="")
        try:
            _check_long(map(_from_csv, csv.DictReader(text, strict=True)), expected)
        except csv.Error as error:
            raise ValueError(f"it is not CSV: {error}") from error
        finally:
            text.detach()


class LongParquet:
    """Parquet, one row for each sequence."""

    def write(self, out: IO[bytes], lines: Lines) -> None:
        """Write row groups, in bounded memory."""
        pyarrow: Any = required("pyarrow", "parquet")
        parquet: Any = required("pyarrow.parquet", "parquet")
        kinds: dict[str, Any] = dict.fromkeys((*COLUMNS, "bleu"), pyarrow.float64())
        kinds |= dict.fromkeys(("source", "rank", "length"), pyarrow.int64())
        kinds |= dict.fromkeys(("text", "job"), pyarrow.string())
        kinds |= {"tokens": pyarrow.list_(pyarrow.int64()), "finished": pyarrow.bool_()}
        writer = None
        try:
            for rows in _groups(lines(), long_rows):
                if writer is None:
                    schema = pyarrow.schema([(name, kinds[name]) for name in rows[0]])
                    writer = parquet.ParquetWriter(out, schema)
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
        finally:
            if writer is not None:
                writer.close()

    def check(self, stored: IO[bytes], expected: Expected) -> None:
        """Check footer, columns and the source of every row."""
        kinds = {"source": "int64", "rank": "int64", "job": "string"}
        with _ParquetFile(stored, kinds) as file:
            _check_long(_parquet_rows(file, list(kinds)), expected)


def _next(expected: Expected, count: int, what: str) -> tuple[int, str]:
    """Return the number and the mark of the next text, if there is one."""
    found = next(expected, None)
    if found is None:
        raise ValueError(f"it has more than {count - 1} {what}")
    return found


def _check_end(expected: Expected, count: int, what: str) -> None:
    """Refuse a file that ends before the last text."""
    missing = sum(1 for _ in expected)
    if missing:
        raise ValueError(f"it ends after {count} of {count + missing} {what}")


def _check_long(rows: Iterable[Row], expected: Expected) -> None:
    """Refuse rows that are not those of all texts in their order, each ranked from 0 on.

    Rows that are missing at the very end of the last text cannot be noticed.
    """
    texts, rank, number, mark = 0, 0, -1, ""
    for count, row in enumerate(rows, 1):
        if row.get("rank") == 0:
            texts, rank = texts + 1, 0
            number, mark = _next(expected, texts, "texts")
        try:
            found = checked_number({"number": row.get("source"), "job": row.get("job")}, mark)
        except ValueError as error:
            raise ValueError(f"row {count} {error}") from error
        if (found, row.get("rank")) != (number, rank):
            raise ValueError(f"row {count} is not the sequence that belongs there")
        rank += 1
    _check_end(expected, texts, "texts")


def _csv_line(values: Iterable[Any]) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(values)
    return buffer.getvalue().encode(errors="backslashreplace")


def _from_csv(row: Row) -> Row:
    """Return what a check reads of a row; what is no number belongs nowhere."""
    numbers = {
        name: int(row[name]) if str(row.get(name)).isdecimal() else None
        for name in ("source", "rank")
    }
    return {**numbers, "job": row.get("job")}


class _ParquetFile:
    """Opens a Parquet file whose columns must have these types, and explains pyarrow's errors."""

    def __init__(self, stored: IO[bytes], kinds: dict[str, str]) -> None:
        self._stored, self._kinds = stored, kinds

    def __enter__(self) -> Any:
        parquet: Any = required("pyarrow.parquet", "parquet")
        try:
            self._file = parquet.ParquetFile(self._stored)
        except Exception as error:
            self._explain(error)
            raise
        found = {field.name: str(field.type) for field in self._file.schema_arrow}
        if any(found.get(name) != kind for name, kind in self._kinds.items()):
            raise ValueError(f"it lacks the columns {' and '.join(self._kinds)}")
        return self._file

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._file.close()
        if error is not None:
            self._explain(error)

    def _explain(self, error: BaseException) -> None:
        pyarrow: Any = required("pyarrow", "parquet")
        disk_failed = isinstance(error, OSError) and error.errno is not None
        if isinstance(error, pyarrow.ArrowException | OSError) and not disk_failed:
            raise ValueError("it is not a complete Parquet file") from error


def _parquet_rows(file: Any, columns: list[str] | None) -> Iterator[Row]:
    for batch in file.iter_batches(columns=columns):
        yield from batch.to_pylist()


def _wide_row(record: Row) -> list[Row]:
    return [record | {"settings": json.dumps(record.get("settings"))}]


def _groups(lines: Iterator[bytes], to_rows: Callable[[Row], list[Row]]) -> Iterator[list[Row]]:
    """Yield the rows of the lines, in groups of about ``GROUP`` bytes of JSON."""
    rows: list[Row] = []
    size = 0
    for line in lines:
        rows += to_rows(parsed(line))
        size += len(line)
        if size >= GROUP:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows
