"""The KV cache of a search on a CPU: hypotheses of a source share the keys of their common prefix.

The keys and values of a source lie in slots, one for every token of its tree of hypotheses. A table
says for every row in which slots the tokens of its prefix lie. So nothing is moved when hypotheses
change their order: a row gets a copy of its parent's entry in the table. Keys that several
hypotheses share are kept once, as are those of the prompt. Every now and then the slots that no row
needs any more are dropped.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from cpsbs.backends.cpu.compiled import attends

LEAST_STEPS, LEAST_SLOTS = 16, 160
"""The memory has room for at least so many steps, and for so many slots of every source. When it is
full, slots that no row needs are dropped."""

FEWER_SOURCES = 0.5
"""The share of sources left at which those that have ended are dropped."""


class Table:
    """What each row attends to: some slots of its source.

    Args:
        slot: [m, T] the slots, in the order of the tokens; those of a row come first.
        entry: [n] the entry in ``slot`` of each row.
        length: [n] the number of slots of each row.
        source: [n] the source of each row, in ascending order.
    """

    def __init__(self, slot: Tensor, entry: Tensor, length: Tensor, source: Tensor) -> None:
        assert slot.stride(-1) == 1  # compiled attention takes only the stride of the rows
        self.slot, self.entry, self.length, self.source = slot, entry, length, source

    def bias(self, slots: int) -> Tensor:
        """Return [n, slots] what is added to attention scores: 0 for slots of the row, or -inf."""
        slot = self.slot.index_select(0, self.entry).long()
        column = torch.arange(slot.shape[1], device="cpu")
        slot = torch.where(column < self.length[:, None], slot, slots)
        bias = torch.full((len(slot), slots + 1), -math.inf, dtype=torch.float32, device="cpu")
        return bias.scatter_(1, slot, 0.0)[:, :slots]


def visible_slots(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return [S, T] the places of a mask's true elements [S, T] first, and their counts [S]."""
    order = (~mask).contiguous().to(torch.uint8).argsort(dim=-1, stable=True)
    return order.to(torch.int32).contiguous(), mask.sum(-1, dtype=torch.int32)


def memory_for_slots(size: int, dim: int) -> Tensor:
    """Return memory for keys or values of ``size`` numbers, with ``dim`` numbers in a slot.

    Compiled attention reads no slot that is empty. Masked products multiply what is in there by
    zero: it must be finite.
    """
    return (
        torch.empty(size, dtype=torch.float32, device="cpu")
        if attends(dim)
        else torch.zeros(size, dtype=torch.float32, device="cpu")
    )


class Slots:
    """Keys and values of S sources, and the slots of each row.

    Args:
        prompt: the keys and values [S, heads, T, dim] of the prompt, for each layer.
        visible: [S, T] which tokens of the prompt may be attended to.
    """

    def __init__(self, prompt: list[tuple[Tensor, Tensor]], visible: Tensor) -> None:
        self.sources, self.heads, self._used, self.dim = prompt[0][0].shape
        self.capacity = self._used
        self.memory = [x.reshape(-1) for pair in prompt for x in pair]
        """[S, heads, capacity, dim] the slots of each layer, keys and values in turn, flat."""
        self._ours = False
        """Whether the memory may be overwritten; at first it is the model's."""
        self._spare = torch.empty(0, dtype=torch.float32, device="cpu")
        self.steps_left = 0
        """The number of steps until slots that no row needs are dropped."""
        slot, length = visible_slots(visible)
        source = torch.arange(self.sources, dtype=torch.int32, device="cpu")
        self.table = Table(slot, source, length, source)
        self.new = source
        """[n] the slot of the latest token of each row."""

    def advance(self, parent: Tensor) -> Tensor | None:
        """Let rows [n] take the place of the rows that they extend, and make a slot for each.

        Returns:
            The numbers [S'] of the sources that are left, if some have been dropped.
        """
        before = self.table
        source, length = before.source[parent], before.length[parent]
        if bool((source[1:] < source[:-1]).any()):
            raise ValueError("parent has rows out of the order of their sources; sort them")
        counts = torch.bincount(source, minlength=self.sources)
        most, left, kept = int(counts.max()), int(counts.count_nonzero()), None
        due = self.steps_left == 0
        fewer = left < self.sources and (due or left <= FEWER_SOURCES * self.sources)
        slot = before.slot.index_select(0, parent)
        if fewer:
            kept = counts.nonzero()[:, 0]
            number = torch.empty_like(counts, dtype=torch.int32)
            number[kept] = torch.arange(left, dtype=torch.int32, device="cpu")
            source, counts = number[source.long()], counts[kept]
        if due or fewer or self._used + most > self.capacity:
            slot = self._compact(slot, length, source, kept, most)
        self.steps_left -= 1
        n, first = len(source), counts.cumsum(0) - counts
        within = torch.arange(n, device="cpu") - first[source.long()]
        self.new = (within + self._used).to(torch.int32)
        self._used += most
        longest = int(length.max()) + 1
        slot = pad(slot, (0, longest - slot.shape[1])) if longest > slot.shape[1] else slot
        slot.scatter_(1, length[:, None].long(), self.new[:, None])
        self.table = Table(
            slot, torch.arange(n, dtype=torch.int32, device="cpu"), length + 1, source
        )
        return kept

    @property
    def used(self) -> int:
        """The number of slots in use."""
        return self._used

    def take(self, table: Table, used: int, steps: int) -> None:
        """Take over the slots of the rows as compiled functions have left them after steps."""
        self.table, self._used, self.steps_left = table, used, self.steps_left - steps

    def _compact(
        self, slot: Tensor, length: Tensor, source: Tensor, kept: Tensor | None, k: int
    ) -> Tensor:
        """Drop slots that no row needs, and sources but those ``kept``.

        Args:
            slot: [n, T] the slots of the rows.
            length: [n] their numbers of slots.
            source: [n] the sources of the rows, after those that have ended are dropped.
            kept: [S'] the sources that are left; None for all.
            k: the most slots that a step takes.

        Returns:
            [n, T] the slots of the rows as they are now.
        """
        sources = self.sources if kept is None else len(kept)
        inside = torch.arange(slot.shape[1], device="cpu") < length[:, None]
        # Slots of no row are marked in one more column, which is cut off.
        places = torch.where(inside, slot, self._used).long()
        places += source[:, None].long() * (self._used + 1)
        needed = torch.zeros(sources * (self._used + 1), dtype=torch.bool, device="cpu")
        needed[places.flatten()] = True
        needed = needed.view(sources, -1)[:, : self._used]
        order, numbers = visible_slots(needed)
        most = int(numbers.max())
        self.steps_left = max(LEAST_STEPS, LEAST_SLOTS // k)
        self._move(order[:, :most].long(), kept, most + self.steps_left * k)
        rank = pad(needed.cumsum(-1, dtype=torch.int32) - 1, (0, 1))
        return rank.flatten()[places]

    def _move(self, order: Tensor, kept: Tensor | None, capacity: int) -> None:
        """Move the slots [S', m] of the sources ``kept`` into memory with room for more."""
        place = torch.arange(self.sources, device="cpu") if kept is None else kept
        first = (
            place[:, None] * self.heads + torch.arange(self.heads, device="cpu")
        ) * self.capacity
        index = (first[..., None] + order[:, None]).flatten()
        sources, used = order.shape
        before = self.sources * self.heads * self.capacity * self.dim
        size = sources * self.heads * capacity * self.dim
        moved = self._scratch(len(index) * self.dim).view(-1, self.dim)
        for number, old in enumerate(self.memory):
            torch.index_select(old[:before].view(-1, self.dim), 0, index, out=moved)
            if not self._ours or old.numel() < size:
                self.memory[number] = memory_for_slots(2 * size if self._ours else size, self.dim)
            into = self.memory[number][:size].view(-1, capacity, self.dim)
            into[:, :used] = moved.view(len(into), used, self.dim)
        self._ours = True
        self.sources, self._used, self.capacity = sources, used, capacity

    def _scratch(self, size: int) -> Tensor:
        """Return memory for ``size`` elements, which the next call may reuse."""
        if self._spare.numel() < size:
            self._spare = torch.empty(size, dtype=torch.float32, device="cpu")
        return self._spare[:size]
