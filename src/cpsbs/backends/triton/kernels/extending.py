"""Extends hypotheses by the selected candidates in one launch, also in place.

A hypothesis that has ended offers one candidate from then on, itself, in the place of token 0:
``close_rows`` writes that into the scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from cpsbs.backends.triton.kernels.launching import kernel
from cpsbs.backends.triton.kernels.numbers import host_number, scaled
from cpsbs.scores.candidates import Candidates, Selection

if TYPE_CHECKING:
    from cpsbs.search.beams import Hypotheses, StepResult

BLOCK = 4096
"""The scores that a program of ``_close`` overwrites."""

NUMBERS = ["k", "parents", "tokens", "ends", "pad"]
"""Arguments that differ from search to search; compiling for certain values takes seconds."""


@kernel(do_not_specialize=NUMBERS)
def _extend(
    index, selected, selected_log_inclusion,
    scores, offset, log_total, inverse_temperature, eos,
    length, finished, log_inclusion,
    parent, new_token, new_length, new_log_prob, new_finished, new_present, new_log_inclusion,
    broken,
    k, parents, tokens, ends, pad,
    INCLUSION: tl.constexpr, PARENTS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Extend the hypotheses of one source: from P = ``parents`` of them to k.

    The outputs may be the inputs, so everything is read before anything is written.
    """
    source = tl.program_id(0).to(tl.int64)
    place = source * k + tl.arange(0, PLACES)
    here = tl.arange(0, PLACES) < k
    item = tl.load(index + place, mask=here, other=0)
    present = tl.load(selected + place, mask=here, other=0) != 0
    origin, token = item // tokens, item % tokens
    old = source * parents + origin
    was_finished = tl.load(finished + old, mask=here, other=0) != 0
    steps = tl.load(length + old, mask=here, other=0)
    score = tl.load(scores + source * parents * tokens + item, mask=here, other=0.0)
    log_p = scaled(score, tl.load(inverse_temperature))
    log_p += tl.load(offset + old, mask=here, other=0.0)
    if INCLUSION:
        inclusion = tl.load(log_inclusion + old, mask=here, other=0.0)
        inclusion += tl.load(selected_log_inclusion + place, mask=here, other=0.0)
        unknown = present & (inclusion != inclusion)
    row = tl.arange(0, PARENTS)
    total = tl.load(log_total + source * parents + row, mask=row < parents, other=0.0)
    wrong = tl.sum((~(tl.abs(total) < float("inf"))).to(tl.int32), axis=0)
    if INCLUSION:
        wrong += tl.sum(unknown.to(tl.int32), axis=0)
    token = tl.where(was_finished | ~present, pad, token)
    ended = token != token
    for number in range(ends):
        ended |= token == tl.load(eos + number)
    tl.debug_barrier()
    tl.store(parent + place, origin, mask=here)
    tl.store(new_token + place, token, mask=here)
    steps = tl.where(present, steps + tl.where(was_finished, 0, 1), 0)
    tl.store(new_length + place, steps, mask=here)
    tl.store(new_log_prob + place, tl.where(present, log_p, -float("inf")), mask=here)
    tl.store(new_finished + place, (was_finished | ended) & present, mask=here)
    tl.store(new_present + place, present, mask=here)
    if INCLUSION:
        tl.store(new_log_inclusion + place, inclusion, mask=here)
    tl.store(broken, wrong > 0, mask=wrong > 0)


def extend(
    beam: Hypotheses, candidates: Candidates, selection: Selection, eos: Tensor, pad: int,
    into: StepResult,
) -> None:  # fmt: skip
    """Write the extended hypotheses into ``into``, all but state, joint and entropy.

    ``into.broken`` becomes true where scores cannot be normalised, or are too far apart for an
    inclusion probability, and stays as it is otherwise.
    """
    chunks, new = candidates.chunks, into.beam
    sources, parents, tokens = chunks.shape
    k = selection.index.shape[-1]
    # Without inclusion probabilities the kernel neither reads nor writes this stand-in.
    nothing = candidates.offset
    before, now, after = beam.log_inclusion, selection.log_inclusion, new.log_inclusion
    known = before is not None and now is not None and after is not None
    _extend[(sources,)](
        selection.index.contiguous(), selection.present.contiguous(),
        nothing if now is None else now.contiguous(),
        chunks.scores.contiguous(), candidates.offset, candidates.log_total,
        host_number(1 / chunks.temperature, chunks.scores.device), eos,
        beam.length, beam.finished, nothing if before is None else before,
        into.parent, new.token, new.length, new.log_prob, new.finished, new.present,
        nothing if after is None else after,
        into.broken,
        k, parents, tokens, len(eos), pad,
        INCLUSION=known, PARENTS=triton.next_power_of_2(parents),
        PLACES=triton.next_power_of_2(k), num_warps=1,
    )  # fmt: skip


@kernel
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
