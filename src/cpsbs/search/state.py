"""What the search carries from step to step: hypotheses, and the trail that leads back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice

import torch
from torch import Tensor

from cpsbs.randomness import Streams
from cpsbs.search.settings import SearchSettings


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
    """A scalar: whether some scores could not be normalised."""

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
        self._steps = deque[tuple[Tensor, Tensor]](maxlen=steps)

    def append(self, slot: Tensor, parent: Tensor, token: Tensor) -> None:
        """Add a step: the hypotheses [b, K] in the slots [b] extend their parents by a token."""
        if len(slot) < len(self._itself):
            parent = self._itself.index_copy(0, slot, parent)
            token = self._padding.index_copy(0, slot, token)
        else:
            parent, token = parent.clone(), token.clone()
        self._steps.append((parent, token))

    def begin(self, slot: Tensor, parent: Tensor, token: Tensor) -> None:
        """Overwrite the latest step of the slots [n] with the first step of new sources."""
        for own, given in zip(self._steps[-1], (parent, token), strict=True):
            own.index_copy_(0, slot, given)

    def sequences(self, slot: Tensor, steps: Sequence[int]) -> Tensor:
        """Return the tokens [n, K, T] of the hypotheses in the slots [n].

        ``steps`` are the numbers of steps that the sources have taken: one for each slot, or a
        single one for all.

        Where a hypothesis was s steps ago is a composition of s maps from places to places. All of
        these compositions take log₂ T rounds: in each, the maps that go d steps back are composed
        with those that go d steps further.
        """
        most = max(steps)
        latest = list(islice(reversed(self._steps), most))
        parent, token = (torch.stack(each)[:, slot] for each in zip(*latest, strict=True))
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
