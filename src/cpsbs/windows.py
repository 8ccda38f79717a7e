"""Takes a long or endless iterable in windows, of which only one is held in memory at a time.

Texts of similar length are decoded together, for which they are sorted; sorting all of a long
input would mean reading all of it first. So a window of texts is read, sorted and decoded, and
then the next one. The first window is small, so that results come early, and each is twice as large
as the one before, up to ``WINDOW`` batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import torch

from cpsbs.prompts import Prompt
from cpsbs.search.beams import Beams

WINDOW = 64
"""The largest number of batches whose texts are held in memory and sorted by length together."""

EARLY = 16
"""By how much the first window is smaller than a batch.

On a GPU it is a batch, whose size is that of the whole search with continuous batching.
"""

FEW = 8
"""The least number of texts of the first window, unless a batch has fewer."""

T = TypeVar("T")


def windows(items: Iterable[T], first: int, most: int) -> Iterator[list[T]]:
    """Yield lists of ``first`` items, twice as many, and so on, up to ``most`` items.

    An item is read only when its window is asked for.
    """
    rest, count = iter(items), min(first, most)
    while window := list(islice(rest, count)):
        yield window
        count = min(2 * count, most)


def first_window(batch_size: int, device: torch.device) -> int:
    """Return the number of texts of the first window, which is at most a batch."""
    return max(min(FEW, batch_size), batch_size // EARLY) if device.type == "cpu" else batch_size


def beams_in_order(
    texts: Iterable[Prompt],
    draw: Callable[[list[list[Prompt]], list[list[int]]], Iterator[Beams]],
    unusable: Callable[[Sequence[Prompt]], dict[int, str]],
    batch_size: int,
    first_size: int,
    most: int,
) -> Iterator[Beams]:
    """Yield the beams of every text, in the order of the texts.

    Args:
        texts: the texts.
        draw: draws the beams of batches of texts; it is given the numbers of their streams, too.
        unusable: returns what is wrong with each text, by its index, that cannot be used.
        batch_size: the number of texts of a batch.
        first_size: the number of texts of the first window.
        most: the largest number of texts of a window.

    Raises:
        ValueError: if a text cannot be used, before anything of its window is drawn.
    """
    first = 0
    for held in windows(texts, first_size, most):
        for i, reason in unusable(held).items():
            raise ValueError(f"texts[{first + i}] {reason}")
        order = sorted(range(len(held)), key=lambda i: -len(held[i]))
        batches = [order[b : b + batch_size] for b in range(0, len(order), batch_size)]
        prompts = [[held[i] for i in batch] for batch in batches]
        streams = [[first + i for i in batch] for batch in batches]
        waiting: dict[int, Beams] = {}
        turn = 0
        for batch, beams in zip(batches, draw(prompts, streams), strict=True):
            waiting |= zip(batch, beams, strict=True)
            while turn in waiting:
                yield waiting.pop(turn)
                turn += 1
        first += len(held)
