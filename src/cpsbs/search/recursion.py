"""The recursion: Y_0 = {BOS}; Y_t = K of (Y_{t−1} ∘ V), selected by a design; return Y_T.

This file holds all of it, from top to bottom: ``run`` is the loop, ``Transition`` one step of it,
``extended`` turns what a design has selected into hypotheses, and ``OpenRows`` keeps track of which
row of the model belongs to which hypothesis. Everything is written for a batch of sources at once.

A source leaves the batch as soon as all of its hypotheses have ended, and the model is asked only
about hypotheses that go on, because every row takes time. ``scheduler`` runs the same transition
where launching a step takes longer than computing it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cpsbs.backends import Backend
from cpsbs.models.base import (
    SequenceModel,
    StoppingModel,
    check_scores,
    check_stops,
    eos_tokens,
)
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Candidates, Selection
from cpsbs.scores.reading import beam_chunk_length, read
from cpsbs.search.beams import Hypotheses, StepResult, Trail
from cpsbs.search.path import path_step
from cpsbs.search.requests import Request
from cpsbs.search.settings import SearchSettings
from cpsbs.search.several import SeveralSteps
from cpsbs.threads import check_wanted

NOT_NUMBERS = (
    "the model's scores of the next token are NaN, inf, or all -inf after some prefix; each must "
    "be a number or -inf, not all may be -inf, and on a GPU those that are not must be within 1e8"
)


def run(request: Request, settings: SearchSettings) -> None:
    """Search the sources of a model, and leave what was found with its request."""
    model, streams = request.model, request.streams.copy()
    slot = torch.arange(model.sources, device=model.device)
    kept = settings.design.trace
    trail = Trail(model.sources, settings.k, model.pad, model.device, settings.max_length)
    transition = Transition.of(model, settings, request.backend)
    beam = Hypotheses.roots(settings, streams, slot)
    rows = OpenRows(model, request.take_first_scores(), settings.design.roots(settings.k))
    several: SeveralSteps | None = None
    length = 0
    while True:
        check_wanted()
        length, result = length + 1, None
        if several is not None and (taken := several.take(beam, rows.of_open, streams, length)):
            trail.append_all(slot, taken.parents, taken.tokens, taken.trace)
            length, beam = length + len(taken.parents), taken.beam
            rows.replace(taken.scores, taken.row)
            if taken.parent is not None:
                result = StepResult(beam, taken.parent, torch.zeros_like(beam.present[0, 0]))
        if result is None:
            offered, selection, result = transition.selecting(beam, *rows.scores(beam), streams)
        beam, parent = rows.stopped(result), result.parent
        trail.append(slot, parent, beam.token, beam.traced(kept))
        if settings.path:  # then every step was taken here
            request.path.append(path_step(settings, offered, selection, beam, parent))
        goes_on = still_open(beam, result.broken)
        if length == settings.max_length:
            goes_on = [False] * len(goes_on)
        if not all(goes_on):
            left, ended = _split(goes_on, slot.device)
            request.found.append(trail.found(beam.of(ended), slot[ended], [length]))
            if not any(goes_on):
                return
            beam, parent, slot = beam.of(left), parent[left], slot[left]
            streams = streams.select(left)
            rows.keep(left)
        rows.advance(parent, beam)
        if length == 1:
            several = transition.several(model)


def still_open(beam: Hypotheses, broken: Tensor) -> list[bool]:
    """Return for each source whether a hypothesis is open, with one host–device synchronisation.

    Raises:
        ValueError: if some scores could not be normalised, or are too far apart.
    """
    is_broken, *open_sources = torch.cat([broken[None], beam.open.any(-1)]).tolist()
    if is_broken:
        raise ValueError(NOT_NUMBERS)
    return open_sources


def _split(flags: list[bool], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the places of the true flags and of the false ones."""
    true = [i for i, flag in enumerate(flags) if flag]
    false = [i for i, flag in enumerate(flags) if not flag]
    return torch.tensor(true, device=device), torch.tensor(false, device=device)


@dataclass(frozen=True)
class Transition:
    """One step of the recursion, from the scores of the next token to the selected hypotheses."""

    settings: SearchSettings
    eos: tuple[int, ...]
    pad: int
    backend: Backend

    @staticmethod
    def of(model: SequenceModel, settings: SearchSettings, backend: Backend) -> Transition:
        """Return the transition for a model that has started."""
        return Transition(settings, eos_tokens(model), model.pad, backend)

    @property
    def recordable(self) -> bool:
        """Whether a step never reads a result back to the host, so that it can be recorded."""
        settings = self.settings
        # Designs that tell their error by themselves do not compute joint inclusion probabilities.
        joint = settings.joint and settings.design.needs_joint
        reads_back = joint or settings.path or settings.nucleus is not None
        return settings.design.recordable(settings.k) and not reads_back

    @property
    def key(self) -> tuple[object, ...]:
        """What a recording of the step depends on, apart from shapes."""
        settings = self.settings
        numbers = (settings.k, settings.temperature, settings.joint, settings.entropy)
        return settings.design, numbers, self.eos, self.pad

    def __call__(
        self, beam: Hypotheses, scores: Tensor, streams: Streams, into: StepResult | None = None
    ) -> StepResult:
        """Return the result of a step, which a backend may write into ``into``."""
        return self.selecting(beam, scores, None, streams, into)[-1]

    def selecting(
        self,
        beam: Hypotheses,
        scores: Tensor,
        row: Tensor | None,
        streams: Streams,
        into: StepResult | None = None,
    ) -> tuple[Candidates, Selection, StepResult]:
        """Return what the design was offered, what it selected, and the result of the step.

        Args:
            beam: the hypotheses [b, P] to extend.
            scores: [b, P, V] of the next token; or [n, V] together with ``row``.
            row: [b, P] which of the n rows belongs to each hypothesis; n for one that has ended.
            streams: the random numbers of the sources.
            into: memory for the result, whose hypotheses may be ``beam`` itself.
        """
        candidates = self._candidates(beam, scores, row)
        # On a CPU this check is free; elsewhere it would stall the device, and the caller reads
        # ``StepResult.broken`` when it synchronises.
        if scores.device.type == "cpu" and not bool(candidates.log_total.isfinite().all()):
            raise ValueError(NOT_NUMBERS)
        settings = self.settings
        selection = settings.design.select(candidates, settings.k, streams, settings.joint)
        if selection.index.shape != (len(beam.source), settings.k):
            raise ValueError(
                f"the design {settings.design!r} picked indices of the shape "
                f"{list(selection.index.shape)}; it must be [sources, k], with present=False in "
                "places that stay empty. cpsbs.check_design(design, k) tells more"
            )
        result = extended(beam, candidates, selection, self.eos, self.pad, into)
        return candidates, selection, result

    def several(self, model: SequenceModel) -> SeveralSteps | None:
        """Return an object that takes several steps at once after the first one, or None."""
        length, _ = self._cut(self.settings.k, model.vocab_size)
        ends = _end_tokens(self.eos, torch.device(model.device))
        return SeveralSteps.of(model, self.settings, self.backend, length, ends)

    def _cut(self, parents: int, tokens: int) -> tuple[int, int]:
        """Return the length of the chunks into which tokens are cut, and how many power sums."""
        terms = self.backend.power_sums(self.settings.design.power_sums)
        least = beam_chunk_length(parents, tokens, self.settings.k, terms, self.backend)
        return least, terms

    def _candidates(self, beam: Hypotheses, scores: Tensor, row: Tensor | None) -> Candidates:
        """Return Y_{t−1} ∘ V: the extensions of open hypotheses, and the others as they are."""
        settings, temperature = self.settings, self.settings.temperature
        if settings.nucleus is not None:
            scores, temperature = processed(scores, temperature, settings.nucleus), 1.0
        length, terms = self._cut(beam.token.shape[-1], scores.shape[-1])
        chunks = read(scores, temperature, length, terms, row, self.backend)
        return Candidates(beam.log_prob, chunks, beam.finished, beam.state, beam.log_inclusion)


def processed(scores: Tensor, temperature: float, nucleus: float | None) -> Tensor:
    """Return a model's scores [..., V] divided by the temperature, in float32 or float64.

    With ``nucleus``, all but the most probable tokens that make up this mass are set to -inf.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) / temperature
    if nucleus is None or nucleus == 1:
        return scores
    ordered, order = scores.softmax(-1).sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    inside = before < nucleus
    inside[..., 0] = True  # the most probable token, even where the mass rounds to zero
    keep = torch.empty_like(inside).scatter_(-1, order, inside)
    return scores.masked_fill(~keep, -math.inf)


def extended(
    beam: Hypotheses,
    candidates: Candidates,
    selection: Selection,
    eos: tuple[int, ...],
    pad: int,
    into: StepResult | None = None,
) -> StepResult:
    """Return the hypotheses that were selected among the extensions of ``beam``.

    A backend may write them into ``into``, whose hypotheses may be ``beam`` itself.
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
    ends = _end_tokens(eos, beam.token.device)
    if candidates.chunks.backend.extends(candidates, selection):
        result = _buffers(beam, candidates, selection) if into is None else into
        candidates.chunks.backend.extend(beam, candidates, selection, ends, pad, result)
    else:
        result = _extended(beam, candidates, selection, ends, pad)
    return replace(
        result, beam=replace(result.beam, state=selection.state, joint=joint, entropy=entropy)
    )


def _extended(
    beam: Hypotheses, candidates: Candidates, selection: Selection, eos: Tensor, pad: int
) -> StepResult:
    """Return the selected hypotheses, computed in torch."""
    parent = candidates.parent_of(selection.index)
    was_finished = beam.finished.gather(-1, parent)
    token = selection.index % candidates.shape[-1]
    token = torch.where(was_finished | ~selection.present, pad, token)
    ended = (token[..., None] == eos).any(-1)
    log_inclusion = None
    if selection.log_inclusion is not None and beam.log_inclusion is not None:
        log_inclusion = beam.log_inclusion.gather(-1, parent) + selection.log_inclusion
    log_prob = candidates.log_prob_of(selection.index)
    broken = ~candidates.log_total.isfinite().all()
    if log_inclusion is not None:
        broken |= (log_inclusion.isnan() & selection.present).any()
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
    return StepResult(after, parent, broken)


def _buffers(beam: Hypotheses, candidates: Candidates, selection: Selection) -> StepResult:
    """Return uninitialised memory for the hypotheses that were selected."""
    known = selection.log_inclusion is not None and beam.log_inclusion is not None
    index, value = selection.index, candidates.log_prob
    flag, integer, real = (
        [torch.empty(index.shape, dtype=dtype, device=index.device) for _ in range(3)]
        for dtype in (torch.bool, torch.int64, value.dtype)
    )
    after = Hypotheses(
        source=beam.source,
        token=integer[0],
        length=integer[1],
        log_prob=real[0],
        finished=flag[0],
        present=flag[1],
        state={},
        log_inclusion=real[1] if known else None,
        joint=None,
        entropy=None,
    )
    return StepResult(after, integer[2], torch.zeros((), dtype=torch.bool, device=index.device))


@functools.cache
def _end_tokens(tokens: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the tokens as a tensor that is never freed, because recorded steps keep reading it."""
    return torch.tensor(tokens, dtype=torch.int64, device=device)


class OpenRows:
    """The rows of a model, one for each hypothesis that goes on; they change at every step.

    Args:
        model: a model that has started.
        scores: [sources, V] of the first token.
        roots: how many copies of the empty sequence each source starts from.
    """

    def __init__(self, model: SequenceModel, scores: Tensor, roots: int) -> None:
        self._model, self._scores = model, scores
        self._stopping = model if isinstance(model, StoppingModel) else None
        # [b, P] the row of each hypothesis; all roots of a source share one.
        self._row = torch.arange(model.sources, device=scores.device)[:, None].expand(-1, roots)

    def scores(self, beam: Hypotheses) -> tuple[Tensor, Tensor | None]:
        """Return ``scores`` and ``row`` for ``Transition.selecting``."""
        scores, is_open = self._scores, beam.open
        if is_open.numel() == len(scores) and bool(is_open.all()):
            return scores.view(*is_open.shape, -1), None
        return scores, self._row.masked_fill(~is_open, len(scores))

    @property
    def of_open(self) -> Tensor:
        """[n, V] the scores of the next token, for the hypotheses that are open."""
        return self._scores

    def replace(self, scores: Tensor, row: Tensor) -> None:
        """Take over the scores [n, V] and rows [b, P] that a backend's steps have left."""
        self._scores, self._row = scores, row

    def stopped(self, result: StepResult) -> Hypotheses:
        """Return the hypotheses, with those finished that the model itself stops."""
        if self._stopping is None:
            return result.beam
        is_open = result.beam.open
        parents = self._row.gather(-1, result.parent)[is_open]
        stops = check_stops(self._stopping.stops(parents, result.beam.token[is_open]), len(parents))
        if stops is None:
            return result.beam
        return replace(result.beam, finished=result.beam.finished.masked_scatter(is_open, stops))

    def keep(self, sources: Tensor) -> None:
        """Keep the rows of these sources [b']; the model drops the others at the next step."""
        self._row = self._row[sources]

    def advance(self, parent: Tensor, beam: Hypotheses) -> None:
        """Let the hypotheses [b, K] that go on extend their parents [b, K] by their last token."""
        is_open = beam.open
        parents = self._row.gather(-1, parent)[is_open]
        scores = self._model.advance(parents, beam.token[is_open])
        self._scores = check_scores(scores, len(parents), self._model, "advance")
        self._row = (is_open.flatten().cumsum(0) - 1).view(is_open.shape)
