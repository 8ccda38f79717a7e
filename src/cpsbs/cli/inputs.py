"""Reads texts from arguments, a file or standard input, and checks them before any work is done."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from cpsbs.text import Prompt

LONGEST_LINE = 2**20
"""The maximal number of bytes in a line, so that input without line ends (/dev/zero) is refused."""

MOST_LINES = 10_000_000
"""The maximal number of lines of an input, all of which are held in memory."""


def read_texts(texts: Sequence[str] | None, file: Path | None) -> list[str]:
    """Return the texts given as arguments, else the lines of the file or of standard input."""
    if texts and file:
        raise ValueError("texts and --file are both given; give one of them")
    if not texts and file is None and sys.stdin.isatty():
        raise ValueError("there is no input; give texts, or --file, or pipe lines in")
    if texts:
        for i, text in enumerate(texts):
            check_utf8(text, f"text {i + 1}")
        return list(texts)
    found = read_lines(file or Path("-"), "--file")
    if not found:
        raise ValueError("the input is empty; give at least one text")
    return found


def read_lines(file: Path, option: str) -> list[str]:
    """Return the lines of a file, or of standard input if the file is called ``-``."""
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
    """Return one reference per text, or None if no references are given."""
    if references and file:
        raise ValueError("--reference and --reference-file are both given; give one of them")
    if not references and file is None:
        return None
    for i, reference in enumerate(references or ()):
        check_utf8(reference, f"reference {i + 1}")
    found = list(references) if references else read_lines(file or Path("-"), "--reference-file")
    if len(found) != count:
        raise ValueError(f"there are {len(found)} references for {count} texts; give one per text")
    return found


def read_prompts(texts: Sequence[str], chat: bool) -> list[Prompt]:
    """Return the texts as prompts, which are conversations with ``--chat``."""
    return [_conversation(i, text) for i, text in enumerate(texts)] if chat else list(texts)


def _conversation(number: int, text: str) -> Prompt:
    """Return the messages that a text holds as JSON, or the text as a user's message."""
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


def _lines(data: IO[bytes], name: str) -> list[str]:
    # Only "\n" separates texts, not every character at which str.splitlines splits.
    return [
        _decoded(line.removesuffix(b"\n"), name, number).removesuffix("\r")
        for number, line in enumerate(_bounded_lines(data, name), start=1)
    ]


def _bounded_lines(data: IO[bytes], name: str) -> Iterator[bytes]:
    """Yield the lines, and refuse too long ones before they are read into memory."""
    number = 0
    while line := data.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
            raise ValueError(
                f"line {number} of {name} has more than {LONGEST_LINE:,} bytes; give a text "
                "file with one text per line"
            )
        if number > MOST_LINES:
            raise ValueError(
                f"{name} has more than {MOST_LINES:,} lines; split it into several files"
            )
        yield line


def _decoded(line: bytes, name: str, number: int) -> str:
    try:
        # The file may begin with a byte order mark.
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8: line {number} has the byte 0x{error.object[error.start]:02x}; "
            "convert it to UTF-8, for example with iconv"
        ) from error


def refuse_texts(unusable: dict[int, str], advice: str = "Fix it, or skip it with --skip") -> None:
    """Raise a ``ValueError`` about the first text that cannot be used, if there is one.

    Args:
        unusable: what is wrong with each unusable text, by its number.
        advice: what the user can do, as a sentence without its full stop.
    """
    if unusable:
        number, reason = next(iter(unusable.items()))
        others = f" (and {len(unusable) - 1} more texts are unusable)" if len(unusable) > 1 else ""
        raise ValueError(f"text {number + 1} {reason}{others}; nothing was computed. {advice}")
