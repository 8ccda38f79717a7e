"""What is kept for later searches: how much memory it may take, and what is freed first.

A recorded step works on the buffers it was recorded on, so that a later search of the same shape
needs the same buffers. They are kept when a search is over, up to a share of the device's memory
for all models together (``KEPT_SHARE``), and those that were used least recently are freed first.
Buffers of a running search are not counted, because they are needed anyway.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import weakref
from typing import Any, Generic, Protocol, TypeVar

import torch

KEPT_SHARE = 0.2
"""The largest share of a device's memory that is kept, unless ``KEPT_VARIABLE`` says otherwise."""

KEPT_VARIABLE = "CPSBS_KEPT_MEMORY"
"""The environment variable with another share, from 0 (keep nothing) to 1."""

MOST_KEPT = 64
"""The most sets of buffers that are kept, because their graphs take memory of the driver."""

CAPTURE = threading.Lock()
"""Held while a CUDA graph is captured: no other graph may be freed meanwhile."""


class Keepable(Protocol):
    """A set of buffers, with what was recorded on them."""

    busy: bool
    """Whether a search is using it."""

    @property
    def shape(self) -> Any:
        """What a later search must have in common to use it; it has a ``device``."""
        ...

    @property
    def bytes(self) -> int:
        """The memory that it takes on its device."""
        ...


T = TypeVar("T", bound=Keepable)


class Shelf(Generic[T]):
    """What is kept for one model, in the order of its last use."""

    def __init__(self) -> None:
        self.items: dict[T, int] = {}
        """When each was used last, on a clock that all shelves share."""
        with _LOCK:
            _SHELVES.add(self)

    def take(self, shape: object) -> T | None:
        """Return an idle item of this shape, which is busy from now on, or None."""
        with _LOCK:
            for item in self.items:
                if item.shape == shape and not item.busy:
                    item.busy, self.items[item] = True, next(_CLOCK)
                    return item
        return None

    def put(self, item: T) -> None:
        """Keep an item, which is busy now."""
        with _LOCK:
            item.busy, self.items[item] = True, next(_CLOCK)

    def clear(self) -> None:
        """Keep none of the items that are here now."""
        with _LOCK:
            self.items.clear()


_LOCK = threading.RLock()
_CLOCK = itertools.count()
_SHELVES: weakref.WeakSet[Shelf[Any]] = weakref.WeakSet()


def most_kept(device: torch.device) -> float:
    """Return how many bytes may be kept on a device."""
    given = os.environ.get(KEPT_VARIABLE)
    share = KEPT_SHARE
    if given is not None:
        try:
            share = float(given)
        except ValueError:
            share = math.nan
        if not 0 <= share <= 1:
            raise ValueError(
                f"{KEPT_VARIABLE} is {given!r}; it must be a share of the GPU's memory, from 0 to 1"
            )
    if device.type != "cuda":
        return math.inf if share else 0.0
    return share * torch.cuda.get_device_properties(device).total_memory


def kept_bytes(device: torch.device) -> int:
    """Return how many bytes are kept on a device for later searches."""
    with _LOCK:
        return sum(item.bytes for _, _, item in _idle() if item.shape.device == device)


def trim(device: torch.device) -> None:
    """Free what was used least recently, until no more is kept on a device than may be.

    Nothing is freed while another thread captures a graph; the next call makes up for it.
    """
    if not CAPTURE.acquire(blocking=False):
        return
    try:
        with _LOCK:
            most, count, freed = most_kept(device), MOST_KEPT, False
            for _, shelf, item in sorted(_idle(), key=lambda entry: -entry[0]):
                if item.shape.device == device:
                    most, count = most - item.bytes, count - 1
                    if most < 0 or count < 0:
                        del shelf.items[item]
                        freed = True
            item = None
        if freed:
            _return_memory()
    finally:
        CAPTURE.release()


def release() -> int:
    """Free everything that no search is using; return how many bytes that were."""
    with CAPTURE:
        freed = 0
        with _LOCK:
            for _, shelf, item in _idle():
                freed += item.bytes
                del shelf.items[item]
            item = None
        _return_memory()
    return freed


def _idle() -> list[tuple[int, Shelf[Any], Any]]:
    """Return everything that no search is using: when it was used last, where it is, and itself."""
    return [
        (used, shelf, item)
        for shelf in _SHELVES
        for item, used in shelf.items.items()
        if not item.busy
    ]


def _return_memory() -> None:
    """Return unused memory to the device: that of a freed graph serves no other allocation."""
    torch.cuda.empty_cache()  # which does nothing where CUDA is not in use
