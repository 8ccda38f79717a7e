"""From what a design has picked to the hypotheses of the next step."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor

from cpsbs.scores.candidates import Candidates, Selection
from cpsbs.search.state import Hypotheses, Outcome


def extended(
    beam: Hypotheses,
    candidates: Candidates,
    selection: Selection,
    eos: tuple[int, ...],
    pad: int,
    into: Outcome | None = None,
) -> Outcome:
    """The hypotheses picked of the extensions of ``beam``.

    A backend writes into ``into``, if it is given; its hypotheses may be ``beam`` itself.
    """
    joint, entropy = None, None
    if selection.joint_log_inclusion is not None and beam.joint is not None:
        parent = candidates.parent_of(selection.index)
        rows = parent[..., None].expand(-1, -1, beam.joint.shape[-1])
        columns = parent[:, None, :].expand(-1, parent.shape[-1], -1)
        joint = beam.joint.gather(1, rows).gather(2, columns) + selection.joint_log_inclusion
    if beam.entropy is not None:
        parent = candidates.parent_of(selection.index)
        entropy = (beam.entropy + candidates.entropy()).gather(-1, parent)
    ends = lasting(eos, beam.token.device)
    if candidates.chunks.backend.extends(candidates):
        after = _buffers(beam, candidates, selection) if into is None else into
        candidates.chunks.backend.extend(beam, candidates, selection, ends, pad, after)
    else:
        after = _by_torch(beam, candidates, selection, ends, pad)
    own = replace(after.beam, state=selection.state, joint=joint, entropy=entropy)
    return replace(after, beam=own)


def _by_torch(
    beam: Hypotheses,
    candidates: Candidates,
    selection: Selection,
    eos: Tensor,
    pad: int,
) -> Outcome:
    """The reference."""
    parent = candidates.parent_of(selection.index)
    was_finished = beam.finished.gather(-1, parent)
    token = selection.index % candidates.shape[-1]
    token = torch.where(was_finished | ~selection.present, pad, token)
    ended = (token[..., None] == eos).any(-1)
    log_inclusion = None
    if selection.log_inclusion is not None and beam.log_inclusion is not None:
        log_inclusion = beam.log_inclusion.gather(-1, parent) + selection.log_inclusion
    log_prob = candidates.log_prob_of(selection.index)
    after = Hypotheses(
        source=beam.source,
        token=token,
        length=(beam.length.gather(-1, parent) + ~was_finished) * selection.present,
        log_prob=torch.where(selection.present, log_prob, -math.inf),
        finished=(was_finished | ended) & selection.present,
        present=selection.present,
        state={},
        log_inclusion=log_inclusion,
        joint=None,
        entropy=None,
    )
    return Outcome(after, parent, ~candidates.log_total.isfinite().all())


def _buffers(beam: Hypotheses, candidates: Candidates, selection: Selection) -> Outcome:
    """Return memory for the hypotheses that were picked."""
    known = selection.log_inclusion is not None and beam.log_inclusion is not None
    index, value = selection.index, candidates.log_prob
    flag, whole, real = (
        [torch.empty(index.shape, dtype=kind, device=index.device) for _ in range(3)]
        for kind in (torch.bool, torch.int64, value.dtype)
    )
    after = Hypotheses(
        source=beam.source,
        token=whole[0],
        length=whole[1],
        log_prob=real[0],
        finished=flag[0],
        present=flag[1],
        state={},
        log_inclusion=real[1] if known else None,
        joint=None,
        entropy=None,
    )
    return Outcome(after, whole[2], torch.zeros((), dtype=torch.bool, device=index.device))


@functools.cache
def lasting(tokens: tuple[int, ...], device: torch.device) -> Tensor:
    """As a tensor that is never freed, because recorded steps go on reading it."""
    return torch.tensor(tokens, dtype=torch.int64, device=device)
