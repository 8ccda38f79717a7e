"""Scores of hypotheses that have ended: one candidate, themselves, in the place of token 0."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _close(scores, present, finished, tokens, BLOCK: tl.constexpr):
    """A block of one row; nothing is read or written if it goes on."""
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(present + row) == 0) | (tl.load(finished + row) != 0):
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.where(token == 0, 0.0, -float("inf"))
        tl.store(scores + row * tokens + token, value, mask=token < tokens)


def close_rows(scores: Tensor, present: Tensor, finished: Tensor) -> None:
    """In place: rows of scores [rows, V] whose hypotheses [b, P] are not present, or finished."""
    rows, tokens = scores.shape
    _close[(rows, triton.cdiv(tokens, BLOCK))](scores, present, finished, tokens, BLOCK=BLOCK)
