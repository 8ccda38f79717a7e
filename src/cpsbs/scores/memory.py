"""Memory that is kept between calls: to scribble on, and with the numbers from 0 on."""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor


def block_size(device: torch.device) -> int:
    """Return how many elements to work on at a time.

    They stay within the cache of a CPU, and are a full load for an accelerator.
    """
    return 2**19 if device.type == "cpu" else 2**23


class _Buffers(threading.local):
    """Memory that a thread works in, by device."""

    def __init__(self) -> None:
        self.of: dict[torch.device, Tensor] = {}


_BUFFERS = _Buffers()


def working_memory(size: int, device: torch.device) -> Tensor:
    """[size] float64 to scribble on until the next call in this thread.

    On a CPU it is kept: memory that is asked for anew is mapped page by page when it is first
    written to, which takes as long as the arithmetic that is done in it.
    """
    buffer = _BUFFERS.of.get(device)
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(False):
            buffer = torch.empty(size, dtype=torch.float64, device=device)
        if device.type == "cpu":
            _BUFFERS.of[device] = buffer
    return buffer[:size]


def numbers(n: int, device: torch.device) -> Tensor:
    """[n] 0, 1, …, n − 1; not to be written to."""
    # Elsewhere they may be part of a recording, which must own what it reads.
    return _counted(n) if device.type == "cpu" else torch.arange(n, device=device)


@functools.lru_cache(maxsize=256)
def _counted(n: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(n, device="cpu")
