"""What the search carries from step to step: hypotheses, and the trail that leads back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from cpsbs.designs import Design
from cpsbs.randomness import Streams


@dataclass(frozen=True)
class Hypotheses:
    """P hypotheses of each of the b sources that are still open."""

    source: Tensor
    """[b]"""
    token: Tensor
    """[b, P] the last one"""
    length: Tensor
    """[b, P]"""
    log_prob: Tensor
    """[b, P]"""
    finished: Tensor
    """[b, P]"""
    present: Tensor
    """[b, P]"""
    state: Mapping[str, Tensor]
    """[b, P] what the design keeps"""
    log_inclusion: Tensor | None
    """[b, P] along the path"""
    joint: Tensor | None
    """[b, P, P] along the path"""
    entropy: Tensor | None
    """[b, P] along the path"""

    @staticmethod
    def first(
        design: Design, k: int, streams: Streams, source: Tensor, joint: bool, entropy: bool
    ) -> Hypotheses:
        """The empty sequence, as often as the design wants it."""
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
            joint=zeros[..., None] + zeros[:, None, :] if joint else None,
            entropy=zeros if entropy else None,
        )

    @property
    def open(self) -> Tensor:
        """[b, P] hypotheses that go on."""
        return self.present & ~self.finished

    def of(self, rows: Tensor) -> Hypotheses:
        """Those of some of the sources."""
        return self.rebuilt([x[rows] for x in self.tensors()])

    def tensors(self) -> list[Tensor]:
        """All of them, in an order of their own."""
        plain = [getattr(self, field.name) for field in fields(self) if field.name != "state"]
        return [x for x in plain if x is not None] + list(self.state.values())

    def rebuilt(self, tensors: list[Tensor]) -> Hypotheses:
        """The same with these in the place of ``tensors()``."""
        left = iter(tensors)
        plain = {
            field.name: None if getattr(self, field.name) is None else next(left)
            for field in fields(self)
            if field.name != "state"
        }
        return Hypotheses(**plain, state={name: next(left) for name in self.state})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Outcome:
    """What a step leaves."""

    beam: Hypotheses
    parent: Tensor
    """[b, K] which of the hypotheses before are extended."""
    broken: Tensor
    """Whether some scores were no numbers."""

    def load(self, other: Outcome) -> None:
        """Become another one, where it is not this one already; what was broken stays broken."""
        pairs = zip(self.beam.tensors(), other.beam.tensors(), strict=True)
        for own, new in [*pairs, (self.parent, other.parent)]:
            if own is not new:
                own.copy_(new)
        if self.broken is not other.broken:
            self.broken.logical_or_(other.broken)


Step = Callable[[Hypotheses, Tensor, Streams, Outcome], Outcome]
"""From hypotheses [b, K], scores [b, K, V] (or [b·K, V]) and random streams: what comes of them. It
may be written into the last argument, whose hypotheses may be the first."""


class RecordedStep(Protocol):
    """A step of the search that a backend has recorded, on buffers of fixed shapes."""

    now: Outcome
    """Where it writes."""
    streams: Streams
    """The random numbers that it reads."""

    def load(self, beam: Hypotheses, streams: Streams) -> None:
        """Go on from here."""
        ...

    def run(self, scores: Tensor) -> Outcome:
        """Take one step."""
        ...


class Trail:
    """The parents and tokens of the last steps, from which sequences are read backwards.

    ``slots`` is how many sources there are at first, and ``steps`` the most that one may take. A
    source that is no longer in the search goes on as it is, by padding.
    """

    def __init__(self, slots: int, k: int, pad: int, device: torch.device, steps: int) -> None:
        self._pad = pad
        self._itself = torch.arange(k, device=device).expand(slots, k)
        self._padding = torch.full((slots, k), pad, dtype=torch.int64, device=device)
        self._steps = deque[tuple[Tensor, Tensor]](maxlen=steps)

    def append(self, slot: Tensor, parent: Tensor, token: Tensor) -> None:
        """One step: hypotheses [b, K] in the slots [b] extend their parents by a token each."""
        if len(slot) < len(self._itself):
            parent = self._itself.index_copy(0, slot, parent)
            token = self._padding.index_copy(0, slot, token)
        else:
            parent, token = parent.clone(), token.clone()
        self._steps.append((parent, token))

    def begin(self, slot: Tensor, parent: Tensor, token: Tensor) -> None:
        """In these slots [n] the last step was the first one of other sources."""
        for own, given in zip(self._steps[-1], (parent, token), strict=True):
            own.index_copy_(0, slot, given)

    def sequences(self, slot: Tensor, steps: Sequence[int]) -> Tensor:
        """[n, K, T] tokens of the hypotheses in these slots [n], each after so many steps.

        Where a hypothesis was s steps ago is a composition of s maps, from places to places. All of
        them take log₂ T rounds, in each of which a map that goes d steps back is composed with the
        one that goes on d steps further.
        """
        most = max(steps)
        last = list(islice(reversed(self._steps), most))
        parent, token = (torch.stack(each)[:, slot] for each in zip(*last, strict=True))
        back, distance = torch.cat([self._itself[slot][None], parent[:-1]]), 1
        while distance < most:
            further = back[distance:].gather(-1, back[:-distance])
            back, distance = torch.cat([back[:distance], further]), 2 * distance
        backwards = token.gather(-1, back).permute(1, 2, 0)
        if min(steps) == most:
            return backwards.flip(-1)
        count = torch.tensor(steps, device=slot.device)[:, None, None]
        at = count - 1 - torch.arange(most, device=slot.device)
        found = backwards.gather(-1, at.clamp(min=0).expand_as(backwards))
        return torch.where(at < 0, self._pad, found)
