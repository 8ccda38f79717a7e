"""How we measure: medians of calls that take turns, so that a ratio compares like with like; and
peaks of memory.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

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


def in_fresh_process(module: str, call: str) -> float:
    """The number that a call to a function of the module returns in a process of its own."""
    code = f"from {module} import *; print({call})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(out.stdout)


def peak_bytes(function: Callable[[], object]) -> int:
    """How far a call raises the peak of the resident memory of this process (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _status("VmRSS")
    function()
    return (_status("VmHWM") - before) * 1024


def _status(name: str) -> int:
    """Kibibytes of this process, from Linux's books."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {name}")
