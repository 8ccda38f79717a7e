"""Calls the function whose expectation is estimated, and checks what it returns."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cpsbs.search.beams import Beams

Decode = Callable[[Sequence[Sequence[int]]], list[str]]
"""A function from lists of tokens to texts, such as a tokenizer's ``batch_decode``."""

Known = dict[tuple[int, ...], Tensor]
"""The values of f that are known for the sequences of a source."""

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


def function_values(f: Any, beams: Beams, known: list[Known], decode: Decode | None) -> Tensor:
    """Return [B, K, d] f of every sequence, zero in empty places.

    ``known`` holds the values from earlier beams of each source. New ones are added, so that f is
    called once for each distinct sequence.
    """
    rows: list[list[Tensor]] = []
    for b, table in enumerate(known):
        tokens = [tuple(y) for y in beams.tokens(b)]
        g = f[b] if isinstance(f, list | tuple) else f
        if hasattr(g, "of_beams"):
            found = g.of_beams(beams, b, decode).to(torch.float64)
            table.update(zip(tokens, found, strict=True))
        else:
            new = [y for y in dict.fromkeys(tokens) if y not in table]
            table.update(zip(new, _called(g, new, b, decode), strict=True))
        rows.append([_checked(table[y], y, b) for y in tokens])
    sizes = {v.numel() for row in rows for v in row}
    if len(sizes) > 1:
        raise ValueError(
            f"f returned vectors of different lengths, {sorted(sizes)}; all must have the same"
        )
    out = beams.log_prob.new_zeros((*beams.log_prob.shape, *(sizes or {1})))
    for b, row in enumerate(rows):
        if row:
            out[b, beams.present[b]] = torch.stack([v.reshape(-1) for v in row]).to(out)
    return out


def _called(
    f: Any, sequences: list[tuple[int, ...]], source: int, decode: Decode | None
) -> list[Tensor]:
    """Return f of each of the sequences of a source, as float64 tensors."""
    tokens = [list(y) for y in sequences]
    if not tokens:  # a tokenizer may decode an empty list to one empty text
        return []
    arguments: Sequence[Any] = tokens if decode is None else decode(tokens)
    if len(arguments) != len(tokens):
        raise ValueError(
            f"decode returned {len(arguments)} texts for {len(tokens)} sequences of source "
            f"{source}; it must return one for each"
        )
    batched = getattr(f, "batched", False)
    results: list[Any] = []
    for i, argument in enumerate([list(arguments)] if batched else arguments):
        try:
            results.append(f(argument))
        except Exception as error:
            which = "sequences" if batched else f"sequence {tokens[i]}"
            hint = "" if decode else " (it was given tokens; for texts, pass decode)"
            raise ValueError(
                f"f failed on the {which} of source {source}: {type(error).__name__}: {error}{hint}"
            ) from error
    if batched:
        results = list(results[0])
        if len(results) != len(arguments):
            raise ValueError(
                f"f is batched and returned {len(results)} values for {len(arguments)} sequences; "
                "it must return one for each"
            )
    try:
        return [torch.as_tensor(r, dtype=torch.float64, device="cpu") for r in results]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"f must return numbers or vectors of numbers; it returned {results[0]!r}"
        ) from error


def _checked(value: Tensor, sequence: tuple[int, ...], source: int) -> Tensor:
    """Return the value if it is a finite number or vector."""
    if value.ndim > 1:
        raise ValueError(
            f"f returned the shape {list(value.shape)}; it must return a number or a vector"
        )
    if not bool(value.isfinite().all()):
        raise ValueError(
            f"f is {value.tolist()} on the sequence {list(sequence)} of source {source}; "
            "it must be finite"
        )
    return value
