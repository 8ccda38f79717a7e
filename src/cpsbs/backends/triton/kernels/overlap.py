"""Kernels that are launched while the one before them is still running.

Between two kernels a GPU is idle for about a microsecond, and the layers of a decoding step have
hundreds of them. From compute capability 9.0 on, a kernel can be launched before the one before it
has ended: it starts as soon as all programs of that one have called ``after_previous``, or have
ended, and waits in its own call until all that was written before can be read. What it does above
that call may only depend on what was written before its predecessor began.

The kernels of a Llama's layers gain by it. Selections and Marian's steps did not when it was tried,
so that their kernels are launched as usual.
"""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

import torch
import triton
import triton.language as tl

LEAST_DRIVER = 12_030
"""The oldest CUDA version of a driver with which such launches can be recorded"""


def _is_possible() -> bool:
    """Return whether all cards can do it, their driver, and this version of Triton."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    from triton.backends.nvidia.compiler import CUDAOptions

    known: Any = CUDAOptions
    if "launch_pdl" not in {option.name for option in fields(known)}:
        return False
    cards = range(torch.cuda.device_count())
    driver: Any = getattr(torch._C, "_cuda_getDriverVersion", lambda: LEAST_DRIVER)
    new = driver() >= LEAST_DRIVER
    return new and all(torch.cuda.get_device_capability(card) >= (9, 0) for card in cards)


OVERLAP: tl.constexpr = tl.constexpr(_is_possible())
"""Whether kernels are launched early"""


def early() -> dict[str, bool]:
    """Return how a kernel is launched that calls ``after_previous``."""
    return {"launch_pdl": True} if OVERLAP.value else {}


# Written out, because Triton before 3.4 does not have its functions for these.
WAIT: tl.constexpr = tl.constexpr("griddepcontrol.wait; // $0")
LET_BEGIN: tl.constexpr = tl.constexpr("griddepcontrol.launch_dependents; // $0")


@triton.jit
def after_previous():
    """Wait for all that the kernels before this one have written, and let the next one begin."""
    if OVERLAP:
        tl.inline_asm_elementwise(WAIT, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        # Not earlier: the next kernel may then rely on what was written before this one.
        tl.inline_asm_elementwise(LET_BEGIN, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch(pointers):
    """Have the lines of 128 bytes at these places read into the card's cache."""
    if OVERLAP:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
