"""Sizes of blocks, and memory that is kept between calls: scratch buffers and index tensors."""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor


def block_size(device: torch.device) -> int:
    """Return how many elements to work on at a time.

    A block of that size stays in the cache of a CPU, and keeps an accelerator busy.
    """
    return 2**19 if device.type == "cpu" else 2**23


class _Buffers(threading.local):
    """The scratch buffers of a thread."""

    def __init__(self) -> None:
        self.of_device: dict[torch.device, Tensor] = {}


_BUFFERS = _Buffers()


def scratch_buffer(size: int, device: torch.device) -> Tensor:
    """Return [size] uninitialised float64 numbers, which the next call in this thread may reuse.

    On a CPU the buffer is kept: the operating system maps newly allocated memory page by page when
    it is first written to, which takes as long as the arithmetic that is done in it.
    """
    buffer = _BUFFERS.of_device.get(device)
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(False):
            buffer = torch.empty(size, dtype=torch.float64, device=device)
        if device.type == "cpu":
            _BUFFERS.of_device[device] = buffer
    return buffer[:size]


def shared_arange(n: int, device: torch.device) -> Tensor:
    """Return [n] 0, 1, …, n − 1; callers share the tensor and must not write to it.

    On a GPU it is made anew, because a CUDA graph must own what it reads.
    """
    return _cached_arange(n) if device.type == "cpu" else torch.arange(n, device=device)


@functools.lru_cache(maxsize=256)
def _cached_arange(n: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(n, device="cpu")
