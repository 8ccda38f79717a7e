"""Reads texts from arguments, a file or standard input, one by one."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO

from cpsbs.cli.compression import check_available, decompressed, is_compressed
from cpsbs.text import Prompt

LONGEST_LINE = 2**20
"""The maximal number of bytes in a line, so that input without line ends (/dev/zero) is refused."""

COUNTED = 2**30
"""The maximal size of a file whose lines are counted before they are read, which takes a second."""

Line = str | ValueError
"""A text, or what is wrong with a line that is none."""


@dataclass(frozen=True)
class Lines:
    """Texts that come one by one, and may come without an end."""

    found: Iterator[Line]
    total: Callable[[int], int | None]
    """Returns how many there are, when so many were read: exactly, nearly, or None if unknown."""
    given: Sequence[str] | None = None
    """The texts, if they are arguments."""


def read_texts(texts: Sequence[str] | None, file: Path | None, skip: bool = False) -> Lines:
    """Return the texts given as arguments, else the lines of the file or of standard input.

    The first line is read at once, so that an input that cannot be read is refused early.
    """
    if texts and file:
        raise ValueError("texts and --file are both given; give one of them")
    if not texts and file is None and sys.stdin.isatty():
        raise ValueError("there is no input; give texts, or --file, or pipe lines in")
    if texts:
        for i, text in enumerate(texts):
            check_utf8(text, f"text {i + 1}")
        return _arguments(texts)
    lines = _begun(open_lines(file or Path("-"), "--file", skip))
    if lines is None:
        raise ValueError("the input is empty; give at least one text")
    return lines


def read_references(
    references: Sequence[str] | None, file: Path | None, texts: Lines
) -> Lines | None:
    """Return one reference per text, or None if no references are given."""
    if references and file:
        raise ValueError("--reference and --reference-file are both given; give one of them")
    if not references and file is None:
        return None
    for i, reference in enumerate(references or ()):
        check_utf8(reference, f"reference {i + 1}")
    if references:
        found = _arguments(references)
    else:
        opened = open_lines(file or Path("-"), "--reference-file", False)
        found = _begun(opened) or _arguments([])
    counts = [None if lines.given is None else len(lines.given) for lines in (found, texts)]
    if None not in counts and counts[0] != counts[1]:
        raise ValueError(
            f"there are {counts[0]} references for {counts[1]} texts; give one per text"
        )
    return found


def read_lines(file: Path, option: str, skip: bool = False) -> Iterator[Line]:
    """Yield the lines of a file, or of standard input if the file is called ``-``.

    With ``skip``, a line that is not UTF-8 is yielded as an error instead of raised.
    """
    return open_lines(file, option, skip).found


def open_lines(file: Path, option: str, skip: bool) -> Lines:
    """Open a file of texts, or standard input if the file is called ``-``."""
    if str(file) == "-":
        return Lines(_lines(sys.stdin.buffer, "standard input", skip), lambda _: None)
    check_available(file)
    with _explaining_errors(file, option):
        size = _regular_size(file)
        countable = size is not None and size <= COUNTED and not is_compressed(file)
        counted = _count(file) if countable else None
        raw = file.open("rb")

    def total(read: int) -> int | None:
        if counted is not None or size is None:
            return counted
        return read if raw.closed else round(read * size / max(1, raw.tell()))

    def lines() -> Iterator[Line]:
        with raw, _explaining_errors(file, option):
            yield from _lines(decompressed(raw, file), str(file), skip)

    return Lines(lines(), total)


def _arguments(texts: Sequence[str]) -> Lines:
    return Lines(iter(texts), lambda _: len(texts), texts)


def _begun(lines: Lines) -> Lines | None:
    """Read the first line, and return all of them, or None if there is none."""
    first = next(lines.found, None)
    return None if first is None else Lines(chain([first], lines.found), lines.total)


def _regular_size(file: Path) -> int | None:
    """Return the size of a regular file; other files do not tell how much there is to read."""
    found = file.stat()
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _count(file: Path) -> int:
    """Return the number of lines."""
    count, last = 0, b"\n"
    with file.open("rb") as raw:
        while block := raw.read(2**20):
            count, last = count + block.count(b"\n"), block[-1:]
    return count + (last != b"\n")


@contextmanager
def _explaining_errors(file: Path, option: str) -> Iterator[None]:
    """Turn an error of the system into one that names the option."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option} is {file}, which cannot be read: {error.strerror}") from error


def read_prompt(number: int, text: str, chat: bool) -> Prompt:
    """Return what a text stands for: itself, or a conversation with ``--chat``.

    That is the messages that it holds as JSON, or the text as a user's message.
    """
    if not chat:
        return text
    if not text.lstrip().startswith(("[", '{"messages"')):
        return [{"role": "user", "content": text}]
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"text {number + 1} begins like a JSON list of messages, but is none: {error}"
        ) from error
    messages: Prompt = found["messages"] if isinstance(found, dict) else found
    return messages


def check_utf8(argument: str, name: str) -> None:
    """Refuse an argument that is not UTF-8, whose bytes Python passes on as surrogates."""
    if not argument.isascii() and any("\ud800" <= c <= "\udfff" for c in argument):
        raise ValueError(
            f"{name} is {argument!r}, which is not UTF-8; set the terminal's encoding to UTF-8"
        )


def _lines(data: IO[bytes], name: str, skip: bool) -> Iterator[Line]:
    # Only "\n" separates texts, not every character at which str.splitlines splits.
    for number, line in enumerate(_bounded_lines(data, name), start=1):
        try:
            yield _decoded(line.removesuffix(b"\n"), name, number).removesuffix("\r")
        except ValueError as error:
            if not skip:
                raise
            yield error


def _bounded_lines(data: IO[bytes], name: str) -> Iterator[bytes]:
    """Yield the lines, and refuse too long ones before they are read into memory."""
    number = 0
    while line := _line(data, name):
        number += 1
        if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
            raise ValueError(
                f"line {number} of {name} has more than {LONGEST_LINE:,} bytes; give a text "
                "file with one text per line"
            )
        yield line


def _line(data: IO[bytes], name: str) -> bytes:
    try:
        return data.readline(LONGEST_LINE + 1)
    except ValueError as error:  # from decompression
        raise ValueError(f"{name} cannot be read: {error}") from error


def _decoded(line: bytes, name: str, number: int) -> str:
    try:
        # The file may begin with a byte order mark.
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8: line {number} has the byte 0x{error.object[error.start]:02x}; "
            "convert it to UTF-8, for example with iconv"
        ) from error


def refuse_texts(
    unusable: dict[int, str],
    advice: str = "Fix it, or skip it with --skip",
    left: str = "nothing was computed",
) -> None:
    """Raise a ``ValueError`` about the first text that cannot be used, if there is one.

    Args:
        unusable: what is wrong with each unusable text, by its number.
        advice: what the user can do, as a sentence without its full stop.
        left: what was not done because of it.
    """
    if unusable:
        number, reason = next(iter(unusable.items()))
        others = f" (and {len(unusable) - 1} more texts are unusable)" if len(unusable) > 1 else ""
        raise ValueError(f"text {number + 1} {reason}{others}; {left}. {advice}")
