"""The attributes and methods that a model must have, for ``check_model``."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cpsbs.models.base import FixedRowModel

MEMBERS = {
    "sources": "the number of sources, an int of at least 1",
    "vocab_size": "the size V of the vocabulary, an int",
    "eos": "the token that ends a sequence, or a sequence of such tokens, which may be empty",
    "pad": "the token that fills up a sequence after its end, an int",
    "device": "the torch.device of the scores",
    "start": "a method that returns the scores [sources, V] of the first token",
    "advance": "a method of parent [rows] and token [rows] that returns the scores [rows, V]",
}
"""The members that every model must have, and what each must be."""

FIXED_ROW_METHODS = ("step", "memo", "keep_sources", "admits", "join", "retire", "release")
"""The methods that a model must have in addition if it has ``fix_rows``."""


def is_factory(given: Any) -> bool:
    """Return whether this is a class or function that makes a model, rather than a model."""
    is_class = isinstance(given, type)
    return is_class or (callable(given) and set(MEMBERS).isdisjoint(dir(given)))


def _is_int(value: object) -> bool:
    """Return whether this is an integer; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_right(name: str, value: Any) -> bool:
    """Return whether a member of a model is of the right kind."""
    if name in ("start", "advance"):
        return callable(value)
    if name == "device":
        return isinstance(value, torch.device)
    if name == "eos" and isinstance(value, Sequence) and not isinstance(value, str):
        return all(map(_is_int, value))
    return _is_int(value) and (name != "sources" or value > 0)


def member_faults(model: Any) -> Iterator[tuple[str, str]]:
    """Yield each member that is missing or of the wrong kind: its name, and a sentence."""
    for name, what in MEMBERS.items():
        try:
            value = getattr(model, name)
        except AttributeError:
            yield name, f"model.{name} is missing; it must be {what}"
        else:
            if not _is_right(name, value):
                yield name, f"model.{name} is {reprlib.repr(value)}; it must be {what}"
    if hasattr(model, "fix_rows") and not isinstance(model, FixedRowModel):
        absent = ", ".join(f"{name}()" for name in FIXED_ROW_METHODS if not hasattr(model, name))
        if absent:
            yield (
                "fix_rows",
                f"model.fix_rows() is there, but {absent} is missing; see FixedRowModel",
            )


def token_faults(vocab_size: int, eos: Sequence[int], pad: Sequence[int]) -> Iterator[str]:
    """Yield a sentence for each special token that is not in the vocabulary."""
    for name, token in [*(("eos", x) for x in eos), *(("pad", x) for x in pad)]:
        if not 0 <= token < vocab_size:
            yield f"model.{name} has the token {token}; it must be in 0 to V - 1 = {vocab_size - 1}"
