"""Texts from arguments, a file or standard input, checked before any work is done."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from cpsbs.text import TextModel


def read_texts(texts: Sequence[str] | None, file: Path | None) -> list[str]:
    """The arguments, or the lines of a file, or those of standard input."""
    if texts and file:
        raise ValueError("there are texts and --file; give one of them")
    if texts:
        return list(texts)
    if file is None or str(file) == "-":
        if sys.stdin.isatty() and file is None:
            raise ValueError("there is nothing to read: give texts, --file, or pipe lines in")
        return _lines(sys.stdin.buffer.read(), "standard input")
    if not file.is_file():
        raise ValueError(f"--file is {file}, which is not a file")
    return _lines(file.read_bytes(), str(file))


def read_references(
    references: Sequence[str] | None, file: Path | None, count: int
) -> list[str] | None:
    """One reference for each of the texts, if there are any."""
    if not references and file is None:
        return None
    found = read_texts(references, file)
    if len(found) != count:
        raise ValueError(f"there are {len(found)} references for {count} texts; give one for each")
    return found


def _lines(data: bytes, name: str) -> list[str]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{name} is not UTF-8: line {line} has the byte 0x{data[error.start]:02x}; "
            "convert it, say with iconv"
        ) from error
    # Only the ends of lines divide texts, not everything that str.splitlines takes for one.
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if lines and not lines[-1]:
        lines.pop()
    return lines


def unusable(model: TextModel, texts: Sequence[str], max_length: int) -> dict[int, str]:
    """By number, what is wrong with the texts that the model cannot take."""
    if not texts:
        raise ValueError("there are no texts: the input is empty")
    room = model.room(max_length)
    if room is not None and room < 1:
        raise ValueError(
            f"--max-length is {max_length}; {model.name} takes {model.longest} tokens in all"
        )
    wrong = {}
    for i, (text, count) in enumerate(zip(texts, model.token_counts(texts), strict=True)):
        if not text.strip():
            wrong[i] = "is empty"
        elif room is not None and count > room:
            wrong[i] = f"has {count} tokens, and {model.name} takes {room}"
    return wrong


def refuse(wrong: dict[int, str]) -> None:
    """Name the first of them, and the way out."""
    if wrong:
        number, reason = next(iter(wrong.items()))
        others = f" ({len(wrong) - 1} more like it)" if len(wrong) > 1 else ""
        raise ValueError(
            f"text {number + 1} {reason}{others}; nothing was done. Change it, or leave such lines "
            "out with --skip"
        )
