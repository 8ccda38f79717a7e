"""Texts from arguments, a file or standard input, checked before any work is done."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def read_texts(texts: Sequence[str] | None, file: Path | None) -> list[str]:
    """The arguments, or the lines of a file, or those of standard input."""
    if texts and file:
        raise ValueError("there are texts and --file; give one of them")
    if not texts and file is None and sys.stdin.isatty():
        raise ValueError("there is nothing to read: give texts, --file, or pipe lines in")
    found = list(texts) if texts else read_lines(file or Path("-"), "--file")
    for i, text in enumerate(found):
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
            raise ValueError(f"text {i + 1} is not UTF-8; is the terminal's encoding another one?")
    if not found:
        raise ValueError("there are no texts: the input is empty")
    return found


def read_lines(file: Path, option: str) -> list[str]:
    """The lines of a file, or of standard input, which is called ``-``."""
    if str(file) == "-":
        return _lines(sys.stdin.buffer.read(), "standard input")
    if not file.exists() or file.is_dir():
        raise ValueError(f"{option} is {file}, which is not a file")
    return _lines(file.read_bytes(), str(file))


def read_references(
    references: Sequence[str] | None, file: Path | None, count: int
) -> list[str] | None:
    """One reference for each of the texts, if there are any."""
    if references and file:
        raise ValueError("there are --reference and --reference-file; give one of them")
    if not references and file is None:
        return None
    found = list(references) if references else read_lines(file or Path("-"), "--reference-file")
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


def refuse(wrong: dict[int, str], way_out: str = ", or leave such lines out with --skip") -> None:
    """Name the first of the texts that cannot be used, and the way out."""
    if wrong:
        number, reason = next(iter(wrong.items()))
        others = f" ({len(wrong) - 1} more like it)" if len(wrong) > 1 else ""
        raise ValueError(f"text {number + 1} {reason}{others}; nothing was done. Mend it{way_out}")
