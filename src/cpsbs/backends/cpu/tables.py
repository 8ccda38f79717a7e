"""What compiled functions are given: the scores of a search, as ``scores.h`` describes them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from cpsbs.backends.cpu.compiled import INTEGER, MOST_TERMS, POINTER, Fields
from cpsbs.scores.reading import Chunks


class Scores(Fields):
    """Mirrors the structure ``scores`` of ``scores.h``, field by field."""

    _fields_ = (
        *((name, POINTER) for name in ("rows", "row", "maxima", "sums", "offset")),
        *((name, INTEGER) for name in ("n", "sources", "parents", "tokens")),
        *((name, INTEGER) for name in ("chunks", "length", "terms")),
        ("temperature", ctypes.c_double),
    )


def scores_of(chunks: Chunks, offset: Tensor | None) -> Fields | None:
    """Return scores as compiled functions read them, or None if they cannot.

    Args:
        chunks: the scores.
        offset: [R, P] float64; None if the function does not need it.
    """
    known: Fields | None = chunks.memo.get("scores")
    if known is not None:
        known.replace(offset=offset)
        return known
    fits = chunks.rows.dtype == torch.float32 and chunks.sums.shape[0] <= MOST_TERMS
    wide = chunks.maxima.numel() < 2**31 and chunks.rows.is_contiguous()
    if not fits or not wide or chunks.maxima.numel() == 0:
        return None
    sources, parents, tokens = chunks.shape
    chunks.memo["scores"] = fields = Scores.of(
        rows=chunks.rows,
        row=chunks.row,
        maxima=chunks.maxima,
        sums=chunks.sums,
        offset=offset,
        n=chunks.rows.shape[0],
        sources=sources,
        parents=parents,
        tokens=tokens,
        chunks=chunks.maxima.shape[-1],
        length=chunks.length,
        terms=chunks.sums.shape[0],
        temperature=chunks.temperature,
    )
    return fields
