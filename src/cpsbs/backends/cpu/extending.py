"""The hypotheses that were selected, written by one compiled call (``extending.c``)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from cpsbs.backends.cpu.compiled import INTEGER, POINTER, Fields
from cpsbs.backends.cpu.tables import scores_of
from cpsbs.scores.candidates import Candidates, Selection


class _Extension(Fields):
    """Mirrors the structure ``extension`` of ``extending.c``, field by field."""

    _fields_ = (
        *((name, POINTER) for name in ("finished", "length", "log_inclusion")),
        *((name, POINTER) for name in ("index", "present", "own_inclusion", "total", "ends")),
        *((name, INTEGER) for name in ("k", "number", "pad")),
        *((name, POINTER) for name in ("token", "longer", "parent", "log_prob", "inclusion")),
        *((name, POINTER) for name in ("ended", "is_present", "broken")),
    )


def readable(candidates: Candidates, selection: Selection) -> bool:
    """Return whether what a design returned can be read from its address.

    The design may be the user's. Whatever torch would convert, broadcast or refuse is left to it.
    """
    index, shape = selection.index, selection.index.shape
    given = [(index, torch.int64), (selection.present, torch.bool)]
    if selection.log_inclusion is not None:
        given.append((selection.log_inclusion, torch.float64))
    if any(x.dtype != dtype or x.shape != shape for x, dtype in given) or not index.numel():
        return False
    _, parents, tokens = candidates.chunks.shape
    least, most = index.aminmax()
    return 0 <= int(least) <= int(most) < parents * tokens


def extend(
    compiled: Any,
    beam: Any,
    candidates: Candidates,
    selection: Selection,
    eos: Tensor,
    pad: int,
    into: Any,
) -> None:
    """Write the selected hypotheses into ``into``; see ``Backend.extend``."""
    after, known = into.beam, into.beam.log_inclusion is not None
    assert after is not beam  # which is read while the results are written
    extension = _Extension.of(
        finished=beam.finished,
        length=beam.length,
        log_inclusion=beam.log_inclusion if known else None,
        index=selection.index,
        present=selection.present,
        own_inclusion=selection.log_inclusion if known else None,
        total=candidates.log_total,
        ends=eos,
        k=selection.index.shape[1],
        number=eos.shape[0],
        pad=pad,
        token=after.token,
        longer=after.length,
        parent=into.parent,
        log_prob=after.log_prob,
        inclusion=after.log_inclusion,
        ended=after.finished,
        is_present=after.present,
        broken=into.broken,
    )
    scores = scores_of(candidates.chunks, candidates.offset)
    assert scores is not None
    compiled.extend(ctypes.addressof(scores), ctypes.addressof(extension))
