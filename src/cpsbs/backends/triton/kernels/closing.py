"""Lets hypotheses that have ended offer one candidate, themselves, in the place of token 0."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _close(scores, present, finished, tokens, BLOCK: tl.constexpr):
    """Program (row, block): overwrite BLOCK scores of the row if its hypothesis has ended.

    The scores of other rows are neither read nor written.
    """
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(present + row) == 0) | (tl.load(finished + row) != 0):
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.where(token == 0, 0.0, -float("inf"))
        tl.store(scores + row * tokens + token, value, mask=token < tokens)


def close_rows(scores: Tensor, present: Tensor, finished: Tensor) -> None:
    """Overwrite rows of scores [b·P, V] whose hypotheses [b, P] are absent or finished."""
    rows, tokens = scores.shape
    _close[(rows, triton.cdiv(tokens, BLOCK))](scores, present, finished, tokens, BLOCK=BLOCK)
