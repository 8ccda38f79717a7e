"""Where the arithmetic of a search runs: torch, compiled loops on a CPU, Triton kernels on a GPU.

``base`` is the seam. ``backend_for`` chooses, once for a search.
"""

from __future__ import annotations

import torch

from cpsbs.backends.base import TORCH, Backend, FixedSteps


def backend_for(device: torch.device | str) -> Backend:
    """Return the backend for a device: Triton's where its kernels run, or the one for CPUs."""
    from cpsbs.backends.triton.kernels import usable

    if not usable(torch.device(device)):
        if torch.device(device).type != "cpu":
            return TORCH
        from cpsbs.backends.cpu.backend import COMPILED

        return COMPILED
    from cpsbs.backends.triton.backend import TRITON

    return TRITON


def release() -> None:
    """Free the GPU memory that is kept for later searches.

    Searches keep their buffers, up to a fifth of the card, because recorded steps work on them and
    the next search of the same shape then starts at once. Buffers of a search that is running stay.
    """
    from cpsbs.backends.triton import kept

    kept.release()


__all__ = ["TORCH", "Backend", "FixedSteps", "backend_for", "release"]
