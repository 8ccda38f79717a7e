"""Triton kernels: the numbers and the laws of the reference, in fewer passes over the scores.

Each module holds kernels and the functions that launch them. Only ``backends.triton`` calls these.
"""

from __future__ import annotations

import importlib.util
import os

import torch

POWER_SUMS = 8
"""How many power sums the reading of the scores collects where a design wants any: on a GPU they
cost no time, and no distribution needs more (see ``kernels.poisson_programs``)."""

MOST_IN_HEAD = 4096
"""The most candidates that ``find_head`` finds in a source: it compares all pairs of them."""

MOST_COUNTED = 2**21
"""The most chunks of a source, and the most members of those that are looked into: three counts of
them share an integer in ``find_head``."""


def usable(device: torch.device) -> bool:
    """Return whether kernels run on this device: a GPU with Triton, or Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
