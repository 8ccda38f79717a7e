"""Decides how many searches run at the same time, each on one core of a CPU."""

from __future__ import annotations

import torch

from cpsbs.models.base import ConcurrentModel, SequenceModel

MOST_THREADS = 16
"""The most searches at a time: each needs memory of its own."""


def threads_for(model: SequenceModel) -> int:
    """Return how many searches of models like this one may run at the same time."""
    on_cpu = torch.device(model.device).type == "cpu"
    if not on_cpu or not isinstance(model, ConcurrentModel) or not model.concurrent:
        return 1
    return min(MOST_THREADS, torch.get_num_threads())
