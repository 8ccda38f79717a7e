"""The last sum of a model whose logits have a bias."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _add(out, logits, bias, tokens, BLOCK: tl.constexpr):
    """A block of one row."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    x = tl.load(logits + row * tokens + token, mask=inside)
    b = tl.load(bias + token, mask=inside)
    tl.store(out + row * tokens + token, x.to(tl.float32) + b.to(tl.float32), mask=inside)


def add_bias(out: Tensor, logits: Tensor, bias: Tensor) -> None:
    """Into ``out`` [rows, V]: logits [rows, V] and a bias [V], all contiguous."""
    rows, tokens = out.shape
    _add[(rows, triton.cdiv(tokens, BLOCK))](out, logits, bias, tokens, BLOCK=BLOCK, num_warps=8)
