"""Beams: hypotheses and back-pointers while the search runs, and ``Beams``, what it returns."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpsbs.designs import Design
from cpsbs.randomness import Streams
from cpsbs.search import export
from cpsbs.search.path import Step
from cpsbs.search.settings import SearchSettings

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Hypotheses:
    """P hypotheses for each of the b sources that are still being searched."""

    source: Tensor
    """[b] the number of the source in its model."""
    token: Tensor
    """[b, P] the last token."""
    length: Tensor
    """[b, P] the number of tokens."""
    log_prob: Tensor
    """[b, P] log p of the prefix."""
    finished: Tensor
    """[b, P] whether the hypothesis has ended."""
    present: Tensor
    """[b, P] false for empty places."""
    state: Mapping[str, Tensor]
    """[b, P] what the design keeps with a hypothesis."""
    log_inclusion: Tensor | None
    """[b, P] Σ_t log π_t, summed over the steps so far."""
    joint: Tensor | None
    """[b, P, P] the same for the joint inclusion probabilities of pairs."""
    entropy: Tensor | None
    """[b, P] Σ_t H(p(· | y_<t)), summed over the steps so far."""

    @staticmethod
    def roots(settings: SearchSettings, streams: Streams, source: Tensor) -> Hypotheses:
        """Return Y_0: ``design.roots(k)`` copies of the empty sequence for each source."""
        design, k = settings.design, settings.k
        shape = (len(source), design.roots(k))
        zeros = torch.zeros(shape, dtype=torch.float64, device=source.device)
        nothing = torch.zeros(shape, dtype=torch.int64, device=source.device)
        no = torch.zeros(shape, dtype=torch.bool, device=source.device)
        return Hypotheses(
            source=source,
            token=nothing,
            length=nothing,
            log_prob=zeros,
            finished=no,
            present=~no,
            state=design.begin(k, streams, source),
            log_inclusion=zeros,
            joint=zeros[..., None] + zeros[:, None, :] if settings.joint else None,
            entropy=zeros if settings.entropy else None,
        )

    @property
    def open(self) -> Tensor:
        """[b, P] whether the hypothesis goes on."""
        return self.present & ~self.finished

    def traced(self, names: Sequence[str]) -> Tensor | None:
        """Return [b, P, n] the state with these names, for ``Trail``; None without names.

        It is a copy, in float32, because it is kept for every step.
        """
        return torch.stack([self.state[name] for name in names], -1).float() if names else None

    def of(self, sources: Tensor) -> Hypotheses:
        """Return the hypotheses of some of the sources, by their places in the batch."""
        return self.rebuilt([x[sources] for x in self.tensors()])

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in an order that ``rebuilt`` understands."""
        plain = [getattr(self, field.name) for field in fields(self) if field.name != "state"]
        return [x for x in plain if x is not None] + list(self.state.values())

    def rebuilt(self, tensors: list[Tensor]) -> Hypotheses:
        """Return hypotheses made of these tensors instead of ``tensors()``."""
        left = iter(tensors)
        plain = {
            field.name: None if getattr(self, field.name) is None else next(left)
            for field in fields(self)
            if field.name != "state"
        }
        return Hypotheses(**plain, state={name: next(left) for name in self.state})  # type: ignore[arg-type]


@dataclass(frozen=True)
class StepResult:
    """What one step of the recursion leaves behind."""

    beam: Hypotheses
    """The hypotheses that were selected."""
    parent: Tensor
    """[b, K] which of the previous hypotheses each one extends."""
    broken: Tensor
    """A scalar: whether some scores could not be normalised, or are too far apart."""

    def load(self, other: StepResult) -> None:
        """Copy another result into these tensors; ``broken`` stays true once it is set."""
        pairs = zip(self.beam.tensors(), other.beam.tensors(), strict=True)
        for own, new in [*pairs, (self.parent, other.parent)]:
            if own is not new:
                own.copy_(new)
        if self.broken is not other.broken:
            self.broken.logical_or_(other.broken)


StepFunction = Callable[[Hypotheses, Tensor, Streams, StepResult], StepResult]
"""Maps hypotheses [b, K], scores [b, K, V] (or [b·K, V]) and random streams to the result of a
step. The result may be written into the last argument, whose hypotheses may be the first one."""


@dataclass(frozen=True)
class Found:
    """What a search found for sources that have ended: hypotheses, tokens and trace."""

    beam: Hypotheses
    """[n, K] their hypotheses."""
    tokens: Tensor
    """[n, K, T] the tokens of these."""
    trace: Tensor | None
    """[n, K, T, m] what the design keeps for every step."""


class Trail:
    """Back-pointers of a batch of sources, each in a slot of its own.

    A source that has left the search keeps its slot; its back-pointers then lead straight back, and
    its tokens are padding.

    Args:
        slots: the number of sources at first.
        k: K.
        pad: the padding token.
        device: the device of the back-pointers.
        steps: how many steps to remember, the largest number that a source may take.
    """

    def __init__(self, slots: int, k: int, pad: int, device: torch.device, steps: int) -> None:
        self._pad = pad
        self._itself = torch.arange(k, device=device).expand(slots, k)
        self._padding = torch.full((slots, k), pad, dtype=torch.int64, device=device)
        self._steps = deque[tuple[Tensor, Tensor, Tensor | None]](maxlen=steps)

    def append(
        self, slot: Tensor, parent: Tensor, token: Tensor, trace: Tensor | None = None
    ) -> None:
        """Add a step: the hypotheses [b, K] in the slots [b] extend their parents by a token.

        ``trace`` [b, K, m] is what the design keeps of the step; it is not copied if all slots
        take part.
        """
        if len(slot) < len(self._itself):
            parent = self._itself.index_copy(0, slot, parent)
            token = self._padding.index_copy(0, slot, token)
            if trace is not None:
                nothing = trace.new_zeros((*self._itself.shape, trace.shape[-1]))
                trace = nothing.index_copy_(0, slot, trace)
        else:
            parent, token = parent.clone(), token.clone()
        self._steps.append((parent, token, trace))

    def append_all(
        self, slot: Tensor, parents: Tensor, tokens: Tensor, trace: Tensor | None
    ) -> None:
        """Add m steps [m, b, K], which must not be changed any more; see ``append``."""
        if len(slot) < len(self._itself):
            parents, tokens = (
                empty.repeat(len(given), 1, 1).index_copy_(1, slot, given)
                for empty, given in ((self._itself, parents), (self._padding, tokens))
            )
            if trace is not None:
                nothing = trace.new_zeros((*parents.shape, trace.shape[-1]))
                trace = nothing.index_copy_(1, slot, trace)
        traces = [None] * len(parents) if trace is None else trace.unbind()
        self._steps.extend(zip(parents.unbind(), tokens.unbind(), traces, strict=True))

    def begin(
        self, slot: Tensor, parent: Tensor, token: Tensor, trace: Tensor | None = None
    ) -> None:
        """Overwrite the latest step of the slots [n] with the first step of new sources."""
        for own, given in zip(self._steps[-1], (parent, token, trace), strict=True):
            if own is not None and given is not None:
                own.index_copy_(0, slot, given)

    def found(self, beam: Hypotheses, slot: Tensor, steps: Sequence[int]) -> Found:
        """Return the hypotheses [n, K] in the slots [n] with all that led to them."""
        back = self._back(slot, max(steps))
        trace = None
        if self._steps[-1][2] is not None:
            trace = self._followed(back, slot, steps, 2, 0)
        return Found(beam, self._followed(back, slot, steps, 1, self._pad), trace)

    def sequences(self, slot: Tensor, steps: Sequence[int]) -> Tensor:
        """Return the tokens [n, K, T] of the hypotheses in the slots [n].

        ``steps`` are the numbers of steps that the sources have taken: one for each slot, or a
        single one for all.
        """
        return self._followed(self._back(slot, max(steps)), slot, steps, 1, self._pad)

    def _back(self, slot: Tensor, most: int) -> Tensor:
        """Return [T, n, K] where the hypotheses in the slots [n] were 0, 1, …, T − 1 steps ago.

        Where a hypothesis was s steps ago is a composition of s maps from places to places. All of
        these compositions take log₂ T rounds: in each, the maps that go d steps back are composed
        with those that go d steps further.
        """
        parent = torch.stack([step[0] for step in islice(reversed(self._steps), most)])[:, slot]
        back, distance = torch.cat([self._itself[slot][None], parent[:-1]]), 1
        while distance < most:
            further = back[distance:].gather(-1, back[:-distance])
            back, distance = torch.cat([back[:distance], further]), 2 * distance
        return back

    def _followed(
        self, back: Tensor, slot: Tensor, steps: Sequence[int], part: int, empty: float
    ) -> Tensor:
        """Return [n, K, T, …] one part of the steps along the way back, from the first step on."""
        most, latest = len(back), islice(reversed(self._steps), len(back))
        every = torch.stack([x for step in latest if (x := step[part]) is not None])[:, slot]
        more = (None,) * (every.ndim - 3)
        backwards = every.gather(2, back[(..., *more)].expand_as(every)).movedim(0, 2)
        if min(steps) == most:
            return backwards.flip(2)
        count = torch.tensor(steps, device=slot.device)[:, None, None]
        at = (count - 1 - torch.arange(most, device=slot.device))[(..., *more)]
        found = backwards.gather(2, at.clamp(min=0).expand_as(backwards))
        return torch.where(at < 0, empty, found)


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
    """What was offered and what was selected at every step, with ``path=True``."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How the beams were made: design, k, temperature, nucleus, max_length, seed, model."""
    made_by: Design | None = None
    """The design itself, which estimates errors; None for beams that no search has made."""
    trace: Tensor | None = None
    """[B, K, T, n] the numbers that the design keeps for every step (``Design.trace``), from which
    it estimates errors; None for designs that keep none, and for several rounds."""
    latest: Tensor | None = None
    """[B] K of the latest round of each source, if ``more`` or ``until`` has added rounds. All
    sequences of earlier rounds count as picked with certainty: only the latest round is random,
    given the others."""

    def __len__(self) -> int:
        return len(self.sequences)

    def __repr__(self) -> str:
        made = self.settings.get("design", self.design)
        return f"Beams({made}, sources={len(self)}, k={self.k}, length={self.sequences.shape[-1]})"

    def __iter__(self) -> Iterator[Beams]:
        return (self[b] for b in range(len(self)))

    def __getitem__(self, source: int | slice | list[int]) -> Beams:
        """Return the beams of one source, a slice or a list, always with a dimension for sources.

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

    def to(self, device: torch.device | str) -> Beams:
        """Return the beams on another device. The path is not carried over."""
        every = {part.name: getattr(self, part.name) for part in fields(self)}
        moved: dict[str, Any] = {
            name: x.to(device) for name, x in every.items() if isinstance(x, Tensor)
        }
        return replace(self, **moved, path=None)

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
        return export.as_dict(self)

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
        return export.as_rows(self, texts)

    def to_pandas(self, texts: Sequence[Sequence[str]] | None = None) -> pandas.DataFrame:
        """Return a ``pandas.DataFrame`` with one row for each sequence, as in ``to_rows``.

        ``beams.to_pandas(model.texts(beams))`` has the texts as well. Needs the extra ``pandas``.
        """
        return export.as_pandas(self, texts)

    def to_json(self) -> str:
        """Return ``to_dict`` as JSON; infinities, which JSON cannot express, become null."""
        return export.as_json(self)


def collected(
    found: Sequence[Found],
    design: Design,
    pad: int,
    path: tuple[Step, ...] | None,
    label: Mapping[str, Any],
) -> Beams:
    """Return all sources in their order, the hypotheses of each by decreasing probability.

    Args:
        found: what was found for some sources each; all sources together.
        design: the design that drew them; it computes the weights.
        pad: the padding token.
        path: what was selected at every step, if it was kept.
        label: the value of ``Beams.settings``.
    """
    parts = [part.beam for part in found]
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
    tokens = [torch.nn.functional.pad(part.tokens, (0, longest), value=pad) for part in found]
    sequences = torch.cat([x[..., :longest] for x in tokens])[order]
    sequences = torch.where(present[..., None], sequences, pad)
    traces = [x for part in found if (x := part.trace) is not None]
    trace = None
    if len(traces) == len(found):
        traces = [torch.nn.functional.pad(x, (0, 0, 0, longest)) for x in traces]
        trace = ranked(torch.cat([x[:, :, :longest] for x in traces])[order])
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
        trace=trace,
    )
