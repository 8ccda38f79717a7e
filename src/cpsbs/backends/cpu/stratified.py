"""Stratified samples of a beam's candidates by compiled loops (``stratified.c``).

The reference makes some hundred torch calls for a selection. The random numbers are drawn by torch,
and each is used as the reference uses it, so that the samples are the same.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from cpsbs.backends.cpu.compiled import INTEGER, POINTER, Fields, address
from cpsbs.backends.cpu.tables import scores_of
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Candidates, Selection
from cpsbs.scores.memory import shared_arange

CPU = torch.device("cpu")


class _Stratified(Fields):
    """Mirrors the structure ``stratified`` of ``stratified.c``, field by field."""

    _fields_ = (
        *(("k", INTEGER), ("full_share", ctypes.c_double)),
        *((name, POINTER) for name in ("log_prob", "inclusion", "offset", "item")),
        *((name, POINTER) for name in ("weight", "mass", "number")),
    )


class _Drawn(Fields):
    """Mirrors the structure ``drawn`` of ``stratified.c``, field by field."""

    _fields_ = tuple(
        (name, POINTER) for name in ("index", "log_inclusion", "start", "inside", "share")
    )


def draw(
    compiled: Any, candidates: Candidates, k: int, streams: Streams, full_share: float
) -> Selection | None:
    """Draw a sample for each source; None where some source is not an ordinary one.

    Then no random number has been drawn. Ordinary are sources with more than K candidates whose
    log-probabilities are not too far apart for float32.
    """
    chunks = candidates.chunks
    scores = scores_of(chunks, candidates.offset)
    if scores is None or candidates.log_inclusion is None:
        return None
    sources, parents, _ = chunks.shape
    number = chunks.maxima.shape[-1]
    offset, weight, found = (
        torch.empty((sources, n), dtype=torch.float64, device="cpu") for n in (parents, k, 3)
    )
    targets = _Stratified.of(
        k=k,
        full_share=full_share,
        log_prob=candidates.log_prob,
        inclusion=candidates.log_inclusion,
        offset=offset,
        item=torch.empty((sources, k), dtype=torch.int64, device="cpu"),
        weight=weight,
        mass=torch.empty((sources, parents * number), dtype=torch.float32, device="cpu"),
        number=found,
    )
    given = [ctypes.addressof(x) for x in (scores, targets)]
    if not compiled.stratified_targets(*given):
        return None
    pieces = 3 + 2 * parents + number + chunks.length
    uniform = streams.uniform(shared_arange(sources, CPU), (pieces,))
    index, present, real = (
        torch.empty((sources, k), dtype=torch.int64, device="cpu"),
        torch.ones((sources, k), dtype=torch.bool, device="cpu"),
        torch.empty((4, sources, k), dtype=torch.float64, device="cpu"),
    )
    log_inclusion, start, inside, share = real
    state: dict[str, Tensor] = {"start": start, "inside": inside, "share": share}
    drawn = _Drawn.of(index=index, log_inclusion=log_inclusion, **state)
    compiled.draw_stratified(*given, address(uniform), ctypes.addressof(drawn))
    return Selection(index, present, log_inclusion, state=state)
