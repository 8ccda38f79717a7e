"""A step of stratified sampling in seven launches; the reference is ``designs.stratified``.

1. ``begin`` makes the random orders of the chunks and of the tokens in a chunk, and subtracts the
   log inclusion probabilities of the parents from their offsets;
2. ``find_head`` finds the K candidates of largest weight;
3. ``without_head`` adds up the chunks that hold some of them again, without them;
4. ``masses`` adds up the masses of the chunks of each parent, in the random order;
5. ``draw`` finds the targets, gives every parent its places, and draws.

Uniform random numbers are those that the reference draws, and are used for the same purposes, so
that the same candidates are picked, but for points that fall on a border within rounding.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from cpsbs.backends.triton.kernels import stratified_programs as programs
from cpsbs.backends.triton.kernels.finding import find_head
from cpsbs.backends.triton.kernels.numbers import host_number
from cpsbs.backends.triton.kernels.poisson_programs import without_head
from cpsbs.backends.triton.kernels.stratified_programs import COLUMNS, RANKED, WAYS
from cpsbs.randomness import Counters
from cpsbs.scores.candidates import Candidates, Selection


def draw(
    candidates: Candidates, k: int, counters: Counters, full_share: float, forbidden: float
) -> Selection:
    """Draw K candidates of each source; the counts of the random streams advance by one.

    ``full_share`` and ``forbidden`` are numbers of the reference.
    """
    chunks, past = candidates.chunks, candidates.log_inclusion
    assert past is not None
    sources, parents, tokens = chunks.shape
    per_parent, length = chunks.maxima.shape[-1], chunks.length
    device = candidates.offset.device
    seeds, counts = counters.seeds, counters.counts

    def empty(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.empty((sources, *shape), dtype=dtype, device=device)

    shifted, order = empty(parents), empty(per_parent + length, dtype=torch.int32)
    wide = triton.next_power_of_2(parents)
    blocks = triton.cdiv(per_parent, RANKED.value)
    programs.begin[(sources, blocks + triton.cdiv(length, RANKED.value))](
        candidates.offset, candidates.log_prob.contiguous(), past.contiguous(), seeds, counts,
        shifted, order,
        parents, per_parent, blocks,
        LENGTH=length, PARENTS=wide,
    )  # fmt: skip
    head = find_head(chunks, shifted, k, "log-probability")
    slots = head.chosen.shape[-1]
    inverse_temperature = host_number(1 / chunks.temperature, device)
    scores, again = chunks.scores.contiguous(), empty(slots)
    group = max(1, 1024 // length)
    without_head[(sources, triton.cdiv(slots, group))](
        scores, head.chosen, head.bits, head.values, shifted, again, inverse_temperature,
        k, slots, parents, tokens, per_parent,
        LENGTH=length, GROUP=group, TERMS=1,
    )  # fmt: skip
    reach = empty(parents, per_parent)
    programs.masses[(sources, parents)](
        chunks.maxima.contiguous(), chunks.sums[0].contiguous(), head.values, shifted,
        head.slot_of, again, order, reach, inverse_temperature,
        k, slots, parents, per_parent,
        LENGTH=length,
    )  # fmt: skip
    index, present = empty(k, dtype=torch.int64), empty(k, dtype=torch.bool)
    inclusion, start, inside, share = (empty(k) for _ in range(4))
    stride = 1
    while stride * WAYS.value < per_parent:
        stride *= WAYS.value
    programs.draw[(sources,)](
        scores, head.values, head.index, shifted, head.slot_of, head.bits, reach, order,
        seeds, counts, inverse_temperature,
        empty(k), empty(parents, COLUMNS.value), empty(k, dtype=torch.int64), empty(k, 3),
        index, present, inclusion, start, inside, share,
        k, slots, parents, tokens, per_parent,
        LENGTH=length, PLACES=max(2, triton.next_power_of_2(k)), PARENTS=max(2, wide),
        STRIDE=stride, GROUP=16, FULL_SHARE=full_share, FORBIDDEN=forbidden, num_warps=8,
    )  # fmt: skip
    state = {"start": start, "inside": inside, "share": share}
    return Selection(index, present, inclusion, state=state)
