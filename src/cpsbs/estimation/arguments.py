"""Checks the arguments of ``estimate`` before any work is done."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from cpsbs.search.beams import Beams

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


def checked_beams(beams: Beams | Sequence[Beams]) -> list[Beams]:
    """Return the beams as a list, if they can be averaged: independent ones of one kind."""
    several = [beams] if isinstance(beams, Beams) else []
    if isinstance(beams, list | tuple):
        several = list(beams)
    if not several or not all(isinstance(b, Beams) for b in several):
        raise ValueError("beams must be Beams, or a list of Beams that is not empty")
    if len({(b.design, b.k, len(b)) for b in several}) > 1:
        raise ValueError("beams of different designs, sizes or numbers of sources cannot be mixed")
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
    # Beams of several rounds that differ in the seeds of some have one for each round.
    rounds: dict[tuple[int, Any], int] = {}
    for b in several:
        seed = b.settings.get("seed")
        for at, own in enumerate(seed if isinstance(seed, list | tuple) else [seed]):
            if own is not None:
                rounds[at, own] = rounds.get((at, own), 0) + 1
    if max(rounds.values(), default=1) > 1:
        raise ValueError(
            "two of the beams were drawn with the same seed, so they are not independent; search "
            "with different seeds"
        )
    return several
