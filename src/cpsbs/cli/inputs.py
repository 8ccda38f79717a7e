"""Texts from arguments, a file or standard input, checked before any work is done."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

LONGEST_LINE = 2**20
"""The most bytes of a line. What has no ends of lines, as /dev/zero, is not read for ever."""

MOST_LINES = 10_000_000
"""The most lines of an input, all of which are held in memory."""


def read_texts(texts: Sequence[str] | None, file: Path | None) -> list[str]:
    """Return the arguments, or the lines of a file, or those of standard input."""
    if texts and file:
        raise ValueError("there are texts and --file; give one of them")
    if not texts and file is None and sys.stdin.isatty():
        raise ValueError("there is nothing to read: give texts, --file, or pipe lines in")
    if texts:
        for i, text in enumerate(texts):
            check_utf8(text, f"text {i + 1}")
        return list(texts)
    found = read_lines(file or Path("-"), "--file")
    if not found:
        raise ValueError("there are no texts: the input is empty")
    return found


def read_lines(file: Path, option: str) -> list[str]:
    """Return the lines of a file, or of standard input, which is called ``-``."""
    if str(file) == "-":
        return _lines(sys.stdin.buffer, "standard input")
    try:
        with file.open("rb") as lines:
            return _lines(lines, str(file))
    except OSError as error:
        raise ValueError(f"{option} is {file}, which cannot be read: {error.strerror}") from error


def read_references(
    references: Sequence[str] | None, file: Path | None, count: int
) -> list[str] | None:
    """Return one reference for each of the texts, if there are any."""
    if references and file:
        raise ValueError("there are --reference and --reference-file; give one of them")
    if not references and file is None:
        return None
    for i, reference in enumerate(references or ()):
        check_utf8(reference, f"reference {i + 1}")
    found = list(references) if references else read_lines(file or Path("-"), "--reference-file")
    if len(found) != count:
        raise ValueError(f"there are {len(found)} references for {count} texts; give one for each")
    return found


def check_utf8(argument: str, name: str) -> None:
    """Refuse an argument with bytes that are no text, which Python passes on as surrogates."""
    if not argument.isascii() and any("\ud800" <= c <= "\udfff" for c in argument):
        raise ValueError(
            f"{name} is {argument!r}, which is not UTF-8; is the terminal's encoding another one?"
        )


def _lines(data: IO[bytes], name: str) -> list[str]:
    # Only the ends of lines divide texts, not everything that str.splitlines takes for one.
    return [
        _decoded(line.removesuffix(b"\n"), name, number).removesuffix("\r")
        for number, line in enumerate(_bounded_lines(data, name), start=1)
    ]


def _bounded_lines(data: IO[bytes], name: str) -> Iterator[bytes]:
    """Yield the lines, and refuse what does not fit into memory before it is read."""
    number = 0
    while line := data.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
            raise ValueError(
                f"line {number} of {name} has more than {LONGEST_LINE:,} bytes; is it a text, with "
                "a line for each?"
            )
        if number > MOST_LINES:
            raise ValueError(f"{name} has more than {MOST_LINES:,} lines; split it")
        yield line


def _decoded(line: bytes, name: str, number: int) -> str:
    try:
        # A byte order mark may begin a file.
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8: line {number} has the byte 0x{error.object[error.start]:02x}; "
            "convert it, say with iconv"
        ) from error


def refuse(wrong: dict[int, str], way_out: str = ", or leave such lines out with --skip") -> None:
    """Name the first of the texts that cannot be used, and the way out."""
    if wrong:
        number, reason = next(iter(wrong.items()))
        others = f" ({len(wrong) - 1} more like it)" if len(wrong) > 1 else ""
        raise ValueError(f"text {number + 1} {reason}{others}; nothing was done. Fix it{way_out}")
