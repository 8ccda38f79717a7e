"""How a token is written on the page: as text, or as bytes where it is only a part of a character.

Tokenizers write tokens in alphabets of their own: "▁Un" and "ĠUn" begin with a space, "Ã©" is "é"
in the byte alphabet of GPT-2, and "<0xC3>" is one byte of it. A *piece* is what the token adds to
the text: a string, or a list of bytes if these are no UTF-8 by themselves. The page joins such
bytes with those of the next tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

Piece = str | list[int]
"""A text, or the bytes of a token that ends or begins within a character."""

BYTE = re.compile("<0x([0-9A-F]{2})>")
"""Matches a token that stands for a single byte."""


def pieces_of(tokenizer: Any, tokens: Iterable[int]) -> dict[int, Piece]:
    """Return how each of these tokens is written."""
    numbers = sorted(set(tokens))
    special = set(tokenizer.all_special_ids)
    in_bytes = writes_bytes(tokenizer)
    names = tokenizer.convert_ids_to_tokens(numbers)
    return {
        number: _piece(str(name), number in special, in_bytes)
        for number, name in zip(numbers, names, strict=True)
    }


def writes_bytes(tokenizer: Any) -> bool:
    """Return whether the tokenizer writes tokens in the byte alphabet of GPT-2."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    parts = [decoder, *decoder.get("decoders", [])]
    return any(part.get("type") == "ByteLevel" for part in parts)


def _piece(name: str, special: bool, in_bytes: bool) -> Piece:
    if special:
        return name
    alphabet = byte_alphabet()
    if found := BYTE.fullmatch(name):
        content = bytes([int(found[1], 16)])
    elif in_bytes and all(character in alphabet for character in name):
        content = bytes(alphabet[character] for character in name)
    else:
        return name.replace("▁", " ")
    try:
        return content.decode()
    except UnicodeDecodeError:
        return list(content)


@cache
def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of GPT-2's alphabet stands for.

    Bytes that are printable in Latin-1 stand for themselves, and all others, in their order, for
    the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    shifted = {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted
