"""Where the arithmetic of a search runs: the reference in torch, or Triton kernels on a GPU.

``base`` is the seam. ``backend_for`` chooses, once for a search.
"""

from __future__ import annotations

import torch

from cpsbs.backends.base import TORCH, Backend, FixedSteps


def backend_for(device: torch.device | str) -> Backend:
    """Return the backend for a device: Triton's where its kernels run, else the reference."""
    from cpsbs.backends.triton.kernels import usable

    if not usable(torch.device(device)):
        return TORCH
    from cpsbs.backends.triton.backend import TRITON

    return TRITON


__all__ = ["TORCH", "Backend", "FixedSteps", "backend_for"]
