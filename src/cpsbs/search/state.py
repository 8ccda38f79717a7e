"""What the search carries from step to step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from cpsbs.randomness import Streams
from cpsbs.search.settings import SearchSettings


@dataclass(frozen=True)
class Hypotheses:
    """P hypotheses for each of the b sources that are still being searched."""

    source: Tensor
    """[b] the number of the source in its model"""
    token: Tensor
    """[b, P] the last token"""
    length: Tensor
    """[b, P] the number of tokens"""
    log_prob: Tensor
    """[b, P] log p of the prefix"""
    finished: Tensor
    """[b, P] whether the hypothesis has ended"""
    present: Tensor
    """[b, P] false for empty places"""
    state: Mapping[str, Tensor]
    """[b, P] what the design keeps with a hypothesis"""
    log_inclusion: Tensor | None
    """[b, P] log of the inclusion probability along the path"""
    joint: Tensor | None
    """[b, P, P] log of the joint inclusion probability along the path"""
    entropy: Tensor | None
    """[b, P] the entropies of the steps along the path, added up"""

    @staticmethod
    def roots(settings: SearchSettings, streams: Streams, source: Tensor) -> Hypotheses:
        """Return Y_0: the empty sequence, as many times for each source as the design wants it."""
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
        """Copy another result into these tensors; ``broken`` stays true once it is."""
        pairs = zip(self.beam.tensors(), other.beam.tensors(), strict=True)
        for own, new in [*pairs, (self.parent, other.parent)]:
            if own is not new:
                own.copy_(new)
        if self.broken is not other.broken:
            self.broken.logical_or_(other.broken)


StepFunction = Callable[[Hypotheses, Tensor, Streams, StepResult], StepResult]
"""Maps hypotheses [b, K], scores [b, K, V] (or [b·K, V]) and random streams to the result of a
step. The result may be written into the last argument, whose hypotheses may be the first one."""
