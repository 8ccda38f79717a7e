"""How we time: medians of calls that take turns, so that a ratio compares like with like."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch

BURST = 5


def medians(
    functions: Mapping[str, Callable[[], object]], seconds: float, burst: int = BURST
) -> dict[str, float]:
    """Median seconds of each function.

    They take turns, round after round, for about ``seconds`` in all and at least five rounds, so
    that whatever else the machine does meets all of them. In its turn each is called ``burst``
    times, and every call counts: most of them find the caches as in a loop of their own.
    """
    for function in functions.values():
        function()
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5 * burst:
        for name, function in functions.items():
            for _ in range(burst):
                start = time.perf_counter()
                function()
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def machine() -> dict[str, str | int]:
    """What the figures were measured on."""
    return {
        "processor": torch.backends.cpu.get_cpu_capability(),
        "system": platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
