"""The trail: parents and tokens of the latest steps, from which sequences are read backwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor


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
        """Return the tokens [n, K, T] of the hypotheses in the slots [n], after so many steps each.

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
