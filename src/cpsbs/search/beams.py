"""The result of a search: one immutable value."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from cpsbs.designs import Design


@dataclass(frozen=True)
class Step:
    """What was picked at one step, for the sources that were still open."""

    source: Tensor
    """[b] their numbers."""
    parent: Tensor
    """[b, K] the place in the beam before of each pick's parent."""
    token: Tensor
    """[b, K]"""
    present: Tensor
    """[b, K] false for places that stayed empty."""
    log_prob: Tensor
    """[b, K]"""
    log_inclusion: Tensor | None
    """[b, K] of this step alone, given the beam before."""


@dataclass(frozen=True, eq=False, repr=False)
class Beams:
    """K sequences for each of B sources, the most probable first.

    A sequence that has not ended at the maximal length counts as an outcome: probabilities are
    those of the processed, temperature-scaled model cut off there.
    """

    sequences: Tensor
    """[B, K, T] tokens without the prompt, padded behind the end."""
    lengths: Tensor
    """[B, K] tokens, the one that ends the sequence included."""
    finished: Tensor
    """[B, K] whether such a token came."""
    present: Tensor
    """[B, K] false for places that stay empty because there are fewer than K sequences."""
    log_prob: Tensor
    """[B, K] log p(y); -inf where there is none."""
    log_inclusion: Tensor | None
    """[B, K] log of the inclusion probability: along the path that the search took, Σ_t log π_t(y)
    for conditional Poisson; given the threshold, for stochastic beam search; None for designs that
    have none."""
    log_weight: Tensor | None
    """[B, K] with weights e^log_weight, Σ_y w(y) f(y) is an unbiased estimate of E f; None for
    designs that are not random. -inf where there is no sequence."""
    design: str
    """The name of the design."""
    pad: int
    joint_log_inclusion: Tensor | None = None
    """[B, K, K] along the path, if it was asked for; where two paths are still one, that one's."""
    entropy: Tensor | None = None
    """[B, K] Σ_t H(p(· | y_<t)) along the path, if it was asked for."""
    path: tuple[Step, ...] | None = None
    """Every step, if it was asked for."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How it was made: design, k, temperature, nucleus, max_length, seed, model."""
    made_by: Design | None = None
    """The design itself, which knows the error of an estimate; None for beams from elsewhere."""

    def __len__(self) -> int:
        return len(self.sequences)

    def __repr__(self) -> str:
        made = self.settings.get("design", self.design)
        return f"Beams({made}, sources={len(self)}, k={self.k}, length={self.sequences.shape[-1]})"

    def __iter__(self) -> Iterator[Beams]:
        return (self[b] for b in range(len(self)))

    def __getitem__(self, source: int | slice) -> Beams:
        """The beams of one source, or of some; always with a dimension for sources. No path."""
        if isinstance(source, int):
            source = range(len(self))[source]
            source = slice(source, source + 1)
        some: dict[str, Any] = {}
        for part in fields(self):
            value = getattr(self, part.name)
            some[part.name] = value[source] if isinstance(value, Tensor) else value
        return replace(self, **{**some, "path": None})

    @property
    def k(self) -> int:
        """K."""
        return self.sequences.shape[1]

    def tokens(self, source: int) -> list[list[int]]:
        """The sequences of a source, without padding and without empty places."""
        rows = zip(
            self.sequences[source].tolist(),
            self.lengths[source].tolist(),
            self.present[source].tolist(),
            strict=True,
        )
        return [row[:length] for row, length, present in rows if present]

    def decode(self, to_text: Callable[[Sequence[Sequence[int]]], list[str]]) -> list[list[str]]:
        """The texts of every source; ``to_text`` is, say, a tokenizer's ``batch_decode``.

        Sequences have the token that ends them; to drop it, use
        ``partial(tokenizer.batch_decode, skip_special_tokens=True)``.
        """
        every = [self.tokens(b) for b in range(len(self))]
        # A tokenizer may decode no sequences to one empty text.
        return [to_text(tokens) if tokens else [] for tokens in every]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers; empty places are left out."""
        sources = []
        for b in range(len(self)):
            here = self.present[b]
            entry: dict[str, Any] = {"sequences": self.tokens(b)}
            for name in ("finished", "log_prob", "log_inclusion", "log_weight"):
                value: Tensor | None = getattr(self, name)
                entry[name] = None if value is None else value[b][here].tolist()
            if self.joint_log_inclusion is not None:
                entry["joint_log_inclusion"] = self.joint_log_inclusion[b][here][:, here].tolist()
            sources.append(entry)
        settings = dict(self.settings)
        return {"design": self.design, "k": self.k, "settings": settings, "sources": sources}

    def to_json(self) -> str:
        """The same as JSON; infinities, which JSON does not know, become null."""
        return json.dumps(finite_json(self.to_dict()), allow_nan=False)


def finite_json(value: Any) -> Any:
    """Return the value with None for every number that JSON does not know."""
    if isinstance(value, dict):
        return {name: finite_json(v) for name, v in value.items()}
    if isinstance(value, list):
        return [finite_json(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
