"""The floor of the designs on a GPU, in Triton: the same numbers and the same laws, in fewer reads.

Chosen by themselves where they can be; what runs everywhere else is the reference.
"""

from __future__ import annotations

import importlib.util
import os

import torch

POWER_SUMS = 8
"""How many the first reading of the scores collects where they are wanted: on a GPU they cost no
time, and more would be needed by no distribution (see ``kernels.poisson``)."""

MOST_IN_HEAD = 4096
"""How many of the largest candidates a kernel finds; it compares all pairs of them."""

MOST_CHUNKS = 2**21
"""Of a source: a kernel keeps three counts of them in one number."""


def usable(device: torch.device) -> bool:
    """Whether kernels run on this device: a CUDA card with Triton, or Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
