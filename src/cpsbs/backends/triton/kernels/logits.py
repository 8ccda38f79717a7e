"""The sum of logits and their bias, which is the last operation of models that have one."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cpsbs.backends.triton.kernels.launching import kernel

BLOCK = 4096


@kernel
def _add(out, logits, bias, tokens, BLOCK: tl.constexpr):
    """Program (row, block): add BLOCK entries of the bias to those of the row."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    x = tl.load(logits + row * tokens + token, mask=inside)
    b = tl.load(bias + token, mask=inside)
    tl.store(out + row * tokens + token, x.to(tl.float32) + b.to(tl.float32), mask=inside)


def add_bias(out: Tensor, logits: Tensor, bias: Tensor) -> None:
    """Write logits [rows, V] + bias [V] into ``out`` [rows, V]; all are contiguous."""
    rows, tokens = out.shape
    _add[(rows, triton.cdiv(tokens, BLOCK))](out, logits, bias, tokens, BLOCK=BLOCK, num_warps=8)
