"""Checks the arguments of ``estimate`` before any work is done."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from cpsbs.search.beams import Beams
from cpsbs.search.more import round_seeds

Decode = Callable[[Sequence[Sequence[int]]], list[str]]
"""A function from lists of tokens to texts, such as a tokenizer's ``batch_decode``."""

READY_MADE = {
    "bleu": "Bleu(references)",
    "entropy": "Entropy()",
    "kl": "KullbackLeibler(other)",
    "kullbackleibler": "KullbackLeibler(other)",
    "length": "Length()",
    "probability": "Probability(holds)",
}
"""Objects of ``cpsbs.functions`` to suggest to a caller who gave a name instead of a function."""


def check_function(f: Any, sources: int) -> None:
    """Raise a ValueError if f is neither a function, nor a list of one for each source."""
    if isinstance(f, list | tuple) and len(f) != sources:
        raise ValueError(
            f"f is a list of {len(f)} functions for {sources} sources; it must have one for each"
        )
    for g in f if isinstance(f, list | tuple) else [f]:
        _check_callable(g)


def _check_callable(f: Any) -> None:
    if isinstance(f, str):
        likely = difflib.get_close_matches(f.lower(), READY_MADE, 1)
        named = [READY_MADE[name] for name in likely] or sorted(set(READY_MADE.values()))
        raise ValueError(
            f"f is the text {f!r}; it must be a function of a sequence, or an object of "
            f"cpsbs.functions such as {', '.join(named)}"
        )
    if isinstance(f, type):
        raise ValueError(f"f is the class {f.__name__}; pass an object of it, {f.__name__}(...)")
    if not callable(f) and not hasattr(f, "of_beams"):
        raise ValueError(
            f"f is {f!r}; it must be a function of a sequence, or an object of cpsbs.functions"
        )


def decoded(tokens: list[list[int]], source: int, decode: Decode) -> list[str]:
    """Return the texts of the sequences of a source, one for each."""
    if not callable(decode) or hasattr(decode, "batch_decode"):
        raise ValueError(
            f"decode is a {type(decode).__name__}; it must be a function from lists of tokens to "
            "texts, such as a tokenizer's batch_decode"
        )
    if not tokens:  # a tokenizer may decode an empty list to one empty text
        return []
    texts = decode(tokens)
    if len(texts) != len(tokens):
        raise ValueError(
            f"decode returned {len(texts)} texts for {len(tokens)} sequences of source {source}; "
            "it must return one for each"
        )
    return texts


def checked_beams(beams: Beams | Sequence[Beams]) -> list[Beams]:
    """Return the beams as a list, if they can be averaged: independent ones of one kind."""
    several = [beams] if isinstance(beams, Beams) else []
    if isinstance(beams, list | tuple):
        several = list(beams)
    if not several or not all(isinstance(b, Beams) for b in several):
        kind = type(beams).__name__
        raise ValueError(f"beams is a {kind}; it must be Beams, or a list of Beams, not empty")
    if len(several[0]) == 0:
        raise ValueError("beams has no sources; it must have at least one")
    for name, own in (
        ("designs", [b.design for b in several]),
        ("K", [b.k for b in several]),
        ("numbers of sources", [len(b) for b in several]),
    ):
        if len(set(own)) > 1:
            raise ValueError(f"beams of different {name} cannot be mixed: {own}")
    designs: list[Any] = [b.made_by for b in several]
    if None in designs:  # beams from elsewhere have at most the printed design
        designs = [b.settings.get("design") for b in several]
    if any(design != designs[0] for design in designs):
        raise ValueError(
            f"beams made with different settings of design cannot be mixed: {designs}. A design "
            "that is not a frozen dataclass equals only itself: pass one object to all searches"
        )
    for name in ("temperature", "nucleus", "max_length", "model"):
        made = [b.settings.get(name) for b in several]
        if any(value != made[0] for value in made):
            raise ValueError(
                f"beams made with different settings of {name} cannot be mixed: {made}"
            )
    # Rounds of the same number and seed share their random numbers.
    rounds = [
        (at, seed)
        for b in several
        for at, seed in enumerate(round_seeds(b.settings))
        if seed is not None
    ]
    if len(set(rounds)) < len(rounds):
        raise ValueError(
            "two of the beams were drawn with the same seed, so they are not independent; search "
            "with different seeds"
        )
    return several
