"""Calls the key on the sequences of a source, and checks what it returns."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from cpsbs.decisions.keys import Key
from cpsbs.estimation.arguments import Decode, decoded
from cpsbs.search.beams import Beams


def check_key(key: Any) -> None:
    """Raise a ValueError if the key is not a function, or states its choices wrongly."""
    if isinstance(key, str):
        raise ValueError(
            f"key is the text {key!r}; it must be a function from a text to its answer, such as "
            "those of cpsbs.keys"
        )
    if isinstance(key, type):
        raise ValueError(f"key is the class {key.__name__}; pass an object, {key.__name__}(...)")
    if not callable(key):
        raise ValueError(f"key is {key!r}; it must be a function from a text to its answer")
    choices = getattr(key, "choices", None)
    if choices is not None and not isinstance(choices, list | tuple | set | frozenset):
        raise ValueError(f"key.choices is {choices!r}; it must be a list of all answers")


Sequences = dict[tuple[int, ...], Any]
"""The distinct sequences of a source, the most probable first, and what the key is given."""


def texts_of(several: Sequence[Beams], source: int, decode: Decode | None) -> Sequences:
    """Return the distinct sequences of a source, with their texts, or tokens without ``decode``."""
    log_prob: dict[tuple[int, ...], float] = {}
    for beams in several:
        own = beams.log_prob[source][beams.present[source]].tolist()
        log_prob.update(zip(map(tuple, beams.tokens(source)), own, strict=True))
    if not log_prob:
        raise ValueError(f"source {source} has no sequences; answers need at least one")
    sequences = sorted(log_prob, key=lambda y: -log_prob[y])
    tokens = [list(y) for y in sequences]
    if decode is None:
        return dict(zip(sequences, tokens, strict=True))
    return dict(zip(sequences, decoded(tokens, source, decode), strict=True))


def answers_of(
    source: int, given: Sequences, key: Key, as_texts: bool
) -> dict[tuple[int, ...], Hashable]:
    """Return the answer of every distinct sequence of a source, checked."""
    hint = "" if as_texts else " (it was given tokens; for texts, pass decode)"
    results: list[Any] = []
    if getattr(key, "batched", False):
        try:
            results = list(key(list(given.values())))
        except Exception as error:
            raise ValueError(
                f"key failed on the sequences of source {source}: "
                f"{type(error).__name__}: {error}{hint}"
            ) from error
        if len(results) != len(given):
            raise ValueError(
                f"key is batched and returned {len(results)} answers for {len(given)} texts; it "
                "must return one for each"
            )
    else:
        for y, one in given.items():
            try:
                results.append(key(one))
            except Exception as error:
                shown = f", {one!r}" if as_texts else ""
                raise ValueError(
                    f"key failed on the sequence {list(y)} of source {source}{shown}: "
                    f"{type(error).__name__}: {error}{hint}"
                ) from error
    found = dict(zip(given, results, strict=True))
    for y, answer in found.items():
        _check_answer(answer, y, source, getattr(key, "choices", None))
    return found


def _check_answer(answer: Any, y: tuple[int, ...], source: int, choices: Any) -> None:
    """Raise a ValueError if answers could not be compared, or is none of the key's choices."""
    try:
        hash(answer)
        usable = not isinstance(answer, Tensor) and bool(answer == answer)
    except (TypeError, ValueError):
        usable = False
    if not usable:
        raise ValueError(
            f"key returned {answer!r} for the sequence {list(y)} of source {source}; an answer "
            "must be hashable and equal to itself, such as a string or a number"
        )
    if choices is not None and answer is not None and answer not in choices:
        raise ValueError(
            f"key returned {answer!r} for the sequence {list(y)} of source {source}, which is not "
            f"among its choices, {', '.join(map(repr, choices))}"
        )
