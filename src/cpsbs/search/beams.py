"""``Beams``, the result of a search: one immutable value."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpsbs.designs import Design
from cpsbs.extras import required
from cpsbs.search.state import Hypotheses

if TYPE_CHECKING:
    import pandas

COLUMNS = ["source", "rank", "text", "tokens", "p", "pi", "weight", "length", "finished"]
"""The keys of ``Beams.to_rows`` and the columns of ``Beams.to_pandas``."""


@dataclass(frozen=True)
class Step:
    """What was selected at one step, for the sources that were still being searched."""

    source: Tensor
    """[b] the numbers of the sources."""
    parent: Tensor
    """[b, K] the place of the parent in the previous beam."""
    token: Tensor
    """[b, K] the token by which the parent was extended."""
    present: Tensor
    """[b, K] false for places that stayed empty."""
    log_prob: Tensor
    """[b, K] log p of the extended hypothesis."""
    log_inclusion: Tensor | None
    """[b, K] log of the inclusion probability at this step alone, given the previous beam."""


@dataclass(frozen=True, eq=False, repr=False)
class Beams:
    """K sequences for each of B sources, the most probable first.

    Probabilities are those of the model after logits processors, temperature and nucleus
    truncation, cut off at the maximal length: a sequence that has not ended by then is an outcome
    like any other.
    """

    sequences: Tensor
    """[B, K, T] the tokens without the prompt, padded after the end."""
    lengths: Tensor
    """[B, K] the number of tokens, the end token included."""
    finished: Tensor
    """[B, K] whether the sequence has ended, rather than reached the maximal length."""
    present: Tensor
    """[B, K] false for places that stayed empty, as where there are fewer than K sequences."""
    log_prob: Tensor
    """[B, K] log p(y); -inf in empty places."""
    log_inclusion: Tensor | None
    """[B, K] log of the inclusion probability: Σ_t log π_t(y) along the path that the search took,
    or given the threshold for stochastic beam search. -inf in empty places; None for designs that
    do not know it."""
    log_weight: Tensor | None
    """[B, K] log w(y): Σ_y w(y) f(y) is an unbiased estimate of E f. -inf in empty places; None for
    designs that have no weights, such as beam search."""
    design: str
    """The name of the design."""
    pad: int
    """The token that fills up sequences after their end."""
    joint_log_inclusion: Tensor | None = None
    """[B, K, K] log of the joint inclusion probabilities along the path, with ``joint=True``. As
    long as two sequences share their path, its inclusion probability counts once."""
    entropy: Tensor | None = None
    """[B, K] Σ_t H(p(· | y_<t)) along the path, with ``entropy=True``."""
    path: tuple[Step, ...] | None = None
    """What was selected at every step, with ``path=True``."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How the beams were made: design, k, temperature, nucleus, max_length, seed, model."""
    made_by: Design | None = None
    """The design itself, which estimates errors; None for beams that no search has made."""
    latest: int | None = None
    """K of the latest round, if ``more`` or ``until`` has added rounds. All sequences of earlier
    rounds count as picked with certainty: only the latest round is random, given the others."""

    def __len__(self) -> int:
        return len(self.sequences)

    def __repr__(self) -> str:
        made = self.settings.get("design", self.design)
        return f"Beams({made}, sources={len(self)}, k={self.k}, length={self.sequences.shape[-1]})"

    def __iter__(self) -> Iterator[Beams]:
        return (self[b] for b in range(len(self)))

    def __getitem__(self, source: int | slice) -> Beams:
        """Return the beams of one source or of a slice, always with a dimension for sources.

        The path is not carried over.
        """
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
        """K, the number of places for each source."""
        return self.sequences.shape[1]

    def tokens(self, source: int) -> list[list[int]]:
        """Return the sequences of a source, without padding and without empty places."""
        rows = zip(
            self.sequences[source].tolist(),
            self.lengths[source].tolist(),
            self.present[source].tolist(),
            strict=True,
        )
        return [row[:length] for row, length, present in rows if present]

    def decode(self, to_text: Callable[[Sequence[Sequence[int]]], list[str]]) -> list[list[str]]:
        """Return the texts of every source.

        Args:
            to_text: maps lists of tokens to texts, such as a tokenizer's ``batch_decode``.
                Sequences include their end token; to leave it out of the text, pass
                ``partial(tokenizer.batch_decode, skip_special_tokens=True)``.
        """
        every = [self.tokens(b) for b in range(len(self))]
        # A tokenizer may decode an empty list to one empty text.
        return [to_text(tokens) if tokens else [] for tokens in every]

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers; empty places are left out."""
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

    def to_rows(self, texts: Sequence[Sequence[str]] | None = None) -> list[dict[str, Any]]:
        """Return one dictionary for each sequence; empty places are left out.

        Its keys are ``source`` (the number of the source), ``rank`` (0 is the most probable),
        ``text``, ``tokens``, ``p`` (the probability under the model), ``pi`` (the inclusion
        probability), ``weight`` (in estimates), ``length`` and ``finished``. What the design does
        not know is None.

        Args:
            texts: the texts of the sequences of every source, as ``TextModel.texts`` and ``decode``
                return them; without them, ``text`` is None.
        """
        if texts is not None and len(texts) != len(self):
            raise ValueError(
                f"texts has {len(texts)} entries; it must have one list for each of the "
                f"{len(self)} sources, as TextModel.texts(beams) returns them"
            )
        given: Sequence[Sequence[str] | None] = [None] * len(self) if texts is None else texts
        sources = self.to_dict()["sources"]
        pairs = enumerate(zip(sources, given, strict=True))
        return [row for b, (entry, own) in pairs for row in sequence_rows(b, entry, own)]

    def to_pandas(self, texts: Sequence[Sequence[str]] | None = None) -> pandas.DataFrame:
        """Return a ``pandas.DataFrame`` with one row for each sequence, as in ``to_rows``.

        ``beams.to_pandas(model.texts(beams))`` has the texts as well. Needs the extra ``pandas``.
        """
        frame = required("pandas", "pandas").DataFrame
        rows = self.to_rows(texts)
        found: pandas.DataFrame = frame(rows, columns=COLUMNS)
        return found

    def to_json(self) -> str:
        """Return ``to_dict`` as JSON; infinities, which JSON cannot express, become null."""
        return json.dumps(finite_json(self.to_dict()), allow_nan=False)


def collected(
    found: Sequence[tuple[Hypotheses, Tensor]],
    design: Design,
    pad: int,
    path: tuple[Step, ...] | None,
    label: Mapping[str, Any],
) -> Beams:
    """Return all sources in their order, the hypotheses of each by decreasing probability.

    Args:
        found: hypotheses [n, K] of some sources, and their tokens [n, K, T]; all sources together.
        design: the design that drew them; it computes the weights.
        pad: the padding token.
        path: what was selected at every step, if it was kept.
        label: the value of ``Beams.settings``.
    """
    parts = [part for part, _ in found]
    order = torch.cat([part.source for part in parts]).argsort()

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])[order]

    log_prob, present, length = joined("log_prob"), joined("present"), joined("length")
    known = parts[0].log_inclusion is not None
    state = {name: torch.cat([p.state[name] for p in parts])[order] for name in parts[0].state}
    log_inclusion, log_weight = design.log_weight(
        log_prob, joined("log_inclusion") if known else None, state
    )
    rank = log_prob.argsort(dim=-1, descending=True, stable=True)

    def ranked(x: Tensor) -> Tensor:
        return x.gather(1, rank[(...,) + (None,) * (x.ndim - 2)].expand(-1, -1, *x.shape[2:]))

    def where_present(x: Tensor | None) -> Tensor | None:
        return None if x is None else ranked(torch.where(present, x, -math.inf))

    pairs = None
    if all(part.joint is not None for part in parts):
        pairs = ranked(joined("joint"))
        pairs = pairs.gather(2, rank[:, None, :].expand_as(pairs))
    longest = max(1, int(length.max()))
    tokens = [torch.nn.functional.pad(x, (0, longest), value=pad) for _, x in found]
    sequences = torch.cat([x[..., :longest] for x in tokens])[order]
    sequences = torch.where(present[..., None], sequences, pad)
    return Beams(
        sequences=ranked(sequences),
        lengths=ranked(length),
        finished=ranked(joined("finished")),
        present=ranked(present),
        log_prob=ranked(log_prob),
        log_inclusion=where_present(log_inclusion),
        log_weight=where_present(log_weight),
        design=design.name,
        pad=pad,
        joint_log_inclusion=pairs,
        entropy=None if parts[0].entropy is None else ranked(joined("entropy")),
        path=path,
        settings=label,
        made_by=design,
    )


def sequence_rows(
    source: int, entry: Mapping[str, Any], texts: Sequence[str] | None
) -> list[dict[str, Any]]:
    """Return one dictionary for each sequence of a source; see ``Beams.to_rows``.

    Args:
        source: the number of the source.
        entry: its entry under "sources" in ``Beams.to_dict``.
        texts: the texts of its sequences, if they are known.
    """
    sequences = entry["sequences"]
    shown: Sequence[str | None] = [None] * len(sequences) if texts is None else texts
    if len(shown) != len(sequences):
        raise ValueError(
            f"texts[{source}] has {len(shown)} entries; it must have one for each of the "
            f"{len(sequences)} sequences of source {source}"
        )
    rows = []
    for rank, tokens in enumerate(sequences):
        p, pi, weight = (
            None if entry[name] is None else math.exp(entry[name][rank])
            for name in ("log_prob", "log_inclusion", "log_weight")
        )
        values = (source, rank, shown[rank], tokens, p, pi, weight, len(tokens))
        rows.append(dict(zip(COLUMNS, (*values, entry["finished"][rank]), strict=True)))
    return rows


def finite_json(value: Any) -> Any:
    """Return the value with None for every number that JSON cannot express."""
    if isinstance(value, dict):
        return {name: finite_json(v) for name, v in value.items()}
    if isinstance(value, list):
        return [finite_json(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
