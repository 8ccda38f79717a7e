"""The recursion: Y_0 = {BOS}; Y_t = K of (Y_{t−1} ∘ V), picked by a design; return Y_T.

Everything is written for B sources at once. Which of the model's rows belong to which hypotheses is
the business of ``rows``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cpsbs import kernels
from cpsbs.beams import Beams, Step
from cpsbs.designs import Candidates, Design, Selection, design_named
from cpsbs.extension import extended
from cpsbs.hypotheses import Hypotheses, Outcome, Trail
from cpsbs.models.base import SequenceModel
from cpsbs.polynomials.chunks import beam_chunk_length, read
from cpsbs.randomness import Generators, Streams, fresh_seed
from cpsbs.recording import RecordedStep
from cpsbs.rows import Rows, rows_of

NOT_NUMBERS = "the model's scores of a prefix are NaN, inf, or all -inf"


@torch.no_grad()
def search(
    model: SequenceModel,
    k: int,
    design: str | Design = "conditional-poisson",
    *,
    max_length: int,
    temperature: float = 1.0,
    nucleus: float | None = None,
    generator: Generators | Streams | int = None,
    joint: bool = False,
    entropy: bool = False,
    path: bool = False,
) -> Beams:
    """Draw K sequences for each of the model's sources.

    Args:
        model: see ``cpsbs.models``.
        k: K ≥ 1.
        design: by name or as an object; see ``cpsbs.designs``.
        max_length: T, the most tokens of a sequence.
        temperature: τ > 0 of the model, p_τ(y_t | ·) ∝ p(y_t | ·)^{1/τ}. The design's annealing is
            another thing.
        nucleus: keep, after each prefix, only the most probable tokens that make up this much of
            the mass (the paper uses 0.99); the rest is as if it had probability zero.
        generator: a seed or a generator, from which every source gets a stream of its own, by its
            number; or a generator for each source, or ``Streams``. Either way a source's draw does
            not depend on what else is in the batch (but for conditional Poisson with so large a K
            and so flat a distribution that a source of the batch makes more of all candidates be
            looked at one by one).
        joint: keep the joint inclusion probabilities along the path, for error bars.
        entropy: keep Σ_t H(p(· | y_<t)) along the path, for the Rao–Blackwellised entropy.
        path: keep every step.
    """
    chosen = design_named(design)
    check_settings(k, max_length, temperature, nucleus)
    if not hasattr(model, "start"):
        raise ValueError(
            f"model is a {type(model).__name__}, which has no start(); "
            "a model of transformers goes into TransformersModel(model, **inputs)"
        )
    seed = None
    if isinstance(generator, Streams):
        streams = generator
    elif isinstance(generator, Sequence):
        streams = Streams(generator, model.sources, model.device)
    else:
        # A seed for all, from which each source gets a stream of its own.
        seed = generator if isinstance(generator, int) else fresh_seed(generator)
        streams = Streams.split(seed, model.sources, model.device)
    settings = {
        "design": repr(chosen),
        "k": k,
        "temperature": temperature,
        "nucleus": nucleus,
        "max_length": max_length,
        "seed": seed,
        "model": getattr(model, "name", type(model).__name__),
    }
    on_cuda = torch.device(model.device).type == "cuda"
    try:
        with torch.cuda.device(model.device) if on_cuda else nullcontext():
            return _search(model, k, chosen, max_length, settings, streams, joint, entropy, path)
    except torch.OutOfMemoryError as error:
        fewer = max(1, model.sources // 2)
        raise torch.OutOfMemoryError(
            f"the GPU's memory is too small for {model.sources} sources with k = {k}; "
            f"try {fewer} at a time ({error})"
        ) from error


def _search(
    model: SequenceModel,
    k: int,
    design: Design,
    max_length: int,
    settings: Mapping[str, Any],
    streams: Streams,
    joint: bool,
    entropy: bool,
    path: bool,
) -> Beams:
    """The recursion itself."""
    source = torch.arange(model.sources, device=model.device)
    beam = Hypotheses.first(design, k, streams, source, joint, entropy)
    rows = rows_of(model, k, design.roots(k), max_length)
    take = _Step(
        design,
        k,
        settings["temperature"],
        settings["nucleus"],
        joint,
        rows,
        tuple(model.eos),
        model.pad,
    )
    trail = Trail(model.sources, k, model.pad, model.device)
    recorded: RecordedStep | None = None
    broken = torch.zeros((), dtype=torch.bool, device=model.device)
    steps: list[Step] = []
    done: list[Hypotheses] = []
    for number in range(max_length):
        last = number + 1 == max_length
        looks = last or rows.looks(number)
        if recorded is None and number > 0 and take.recordable and not path:
            recorded = rows.recorded(take, (take.key, entropy), beam, streams)
            if recorded is not None:
                recorded.now.broken.logical_or_(broken)
        if recorded is None:
            selection, after = take.with_selection(beam, rows.scores(beam), streams)
            broken = broken | after.broken
            if path:
                steps.append(_as_step(after.beam, selection, after.parent))
        else:
            after, streams = recorded.run(rows.latest), recorded.streams
            broken = after.broken
        beam, parent = after.beam, after.parent
        trail.append(beam.source, parent, beam.token)
        if looks:
            if bool(broken):
                raise ValueError(NOT_NUMBERS)
            going = beam.open.any(-1)
            left = going.nonzero()[:, 0]
            if rows.worth_dropping(len(left), len(going)):
                done.append(beam.of((~going).nonzero()[:, 0]))
                beam, parent, streams = beam.of(left), parent[left], streams.select(left)
                rows.keep(left)
                recorded = None
            if len(left) == 0:
                break
        if not last:
            rows.advance(parent, beam)
    done.append(beam)
    return _collected(done, trail, design, model.pad, settings, tuple(steps) if path else None)


def check_settings(k: int, max_length: int, temperature: float, nucleus: float | None) -> None:
    """Refuse what no search can have."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k is {k!r}; allowed are integers from 1 on")
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}; it must be at least 1")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; allowed are finite numbers above 0")
    if nucleus is not None and not 0 < nucleus <= 1:
        raise ValueError(f"nucleus is {nucleus}; allowed are numbers above 0, up to 1, and None")


@dataclass(frozen=True)
class _Step:
    """One step of the recursion, from scores to hypotheses."""

    design: Design
    k: int
    temperature: float
    nucleus: float | None
    joint: bool
    rows: Rows
    eos: tuple[int, ...]
    pad: int

    @property
    def recordable(self) -> bool:
        """Whether it never looks at what it computes."""
        return self.design.recordable(self.k) and not self.joint and self.nucleus is None

    @property
    def key(self) -> tuple[object, ...]:
        """What a recording of it depends on."""
        return repr(self.design), self.k, self.temperature, self.eos, self.pad

    def __call__(
        self, beam: Hypotheses, scores: Tensor, streams: Streams, into: Outcome | None = None
    ) -> Outcome:
        """What comes of the hypotheses, maybe written into ``into``."""
        return self.with_selection(beam, scores, streams, into)[1]

    def with_selection(
        self, beam: Hypotheses, scores: Tensor, streams: Streams, into: Outcome | None = None
    ) -> tuple[Selection, Outcome]:
        """The same, and what the design returned."""
        candidates = self._candidates(beam, scores)
        # On a CPU it is told at once; elsewhere that would be to wait.
        if scores.device.type == "cpu" and not bool(candidates.log_total.isfinite().all()):
            raise ValueError(NOT_NUMBERS)
        selection = self.design.select(candidates, self.k, streams, self.joint)
        after = extended(beam, candidates, selection, self.eos, self.pad, into)
        stopped = self.rows.stops(after.parent, after.beam)
        if stopped is not None:
            finished = after.beam.finished.masked_scatter(after.beam.open, stopped)
            after = replace(after, beam=replace(after.beam, finished=finished))
        return selection, after

    def _candidates(self, beam: Hypotheses, scores: Tensor) -> Candidates:
        """What the open hypotheses can be extended to, and the others as they are."""
        temperature = self.temperature
        if self.nucleus is not None:
            scores, temperature = processed(scores, temperature, self.nucleus), 1.0
        _, parents, tokens = scores.shape
        length = beam_chunk_length(parents, tokens, self.k, scores.device)
        terms = self.design.power_sums
        if terms > 1 and kernels.usable(scores.device):
            terms = kernels.POWER_SUMS
        chunks = read(scores, temperature, length, terms)
        return Candidates(beam.log_prob, chunks, beam.finished, beam.state, beam.log_inclusion)


def processed(scores: Tensor, temperature: float, nucleus: float | None) -> Tensor:
    """A model's scores [..., V], in float32 or float64, scaled and truncated.

    With ``nucleus``, -inf for all but the most probable tokens that make up this mass.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) / temperature
    if nucleus is None or nucleus == 1:
        return scores
    ordered, order = scores.softmax(-1).sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    keep = torch.empty_like(before, dtype=torch.bool).scatter_(-1, order, before < nucleus)
    return scores.masked_fill(~keep, -math.inf)


def _as_step(beam: Hypotheses, selection: Selection, parent: Tensor) -> Step:
    present, inclusion = selection.present, selection.log_inclusion
    return Step(beam.source, parent, beam.token, present, beam.log_prob, inclusion)


def _collected(
    done: list[Hypotheses],
    trail: Trail,
    design: Design,
    pad: int,
    settings: Mapping[str, Any],
    path: tuple[Step, ...] | None,
) -> Beams:
    """All sources in their order, the hypotheses of each by probability."""
    order = torch.cat([part.source for part in done]).argsort()

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in done])[order]

    log_prob, present, length = joined("log_prob"), joined("present"), joined("length")
    known = done[0].log_inclusion is not None
    state = {name: torch.cat([p.state[name] for p in done])[order] for name in done[0].state}
    log_inclusion, log_weight = design.log_weight(
        log_prob, joined("log_inclusion") if known else None, state
    )
    rank = log_prob.argsort(dim=-1, descending=True, stable=True)

    def ranked(x: Tensor) -> Tensor:
        return x.gather(1, rank[(...,) + (None,) * (x.ndim - 2)].expand(-1, -1, *x.shape[2:]))

    def where_present(x: Tensor | None) -> Tensor | None:
        return None if x is None else ranked(torch.where(present, x, -math.inf))

    pairs = None
    if all(part.joint is not None for part in done):
        pairs = ranked(joined("joint"))
        pairs = pairs.gather(2, rank[:, None, :].expand_as(pairs))
    return Beams(
        sequences=ranked(trail.sequences())[..., : max(1, int(length.max()))],
        lengths=ranked(length),
        finished=ranked(joined("finished")),
        present=ranked(present),
        log_prob=ranked(log_prob),
        log_inclusion=where_present(log_inclusion),
        log_weight=where_present(log_weight),
        design=design.name,
        pad=pad,
        joint_log_inclusion=pairs,
        entropy=None if done[0].entropy is None else ranked(joined("entropy")),
        path=path,
        settings=settings,
    )
