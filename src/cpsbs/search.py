"""The recursion: Y_0 = {BOS}; Y_t = K of (Y_{t−1} ∘ V), picked by a design; return Y_T.

Everything is written for B sources at once. Which of the model's rows belong to which hypotheses is
the business of ``rows``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from cpsbs import kernels
from cpsbs.beams import Beams
from cpsbs.designs import Candidates, Design, Selection, design_named
from cpsbs.hypotheses import Hypotheses
from cpsbs.models.base import SequenceModel
from cpsbs.polynomials.chunks import beam_chunk_length, read
from cpsbs.randomness import Generators, Streams, fresh_seed, split_seed
from cpsbs.rows import Rows
from cpsbs.runs import NOT_NUMBERS, Plan, Run, Task, Tasks, collected


def search(
    model: SequenceModel,
    k: int,
    design: str | Design = "conditional-poisson",
    *,
    max_length: int,
    temperature: float = 1.0,
    nucleus: float | None = None,
    generator: Generators | int = None,
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
            number; or a generator for each source. Either way a source's draw does not depend on
            what else is in the batch (but for conditional Poisson with so large a K and so flat a
            distribution that a source of the batch makes more of all candidates be looked at one by
            one).
        joint: keep the joint inclusion probabilities along the path, for error bars.
        entropy: keep Σ_t H(p(· | y_<t)) along the path, for the Rao–Blackwellised entropy.
        path: keep every step.
    """
    if generator is None or isinstance(generator, torch.Generator):
        generator = fresh_seed(generator)
    generators = generator if isinstance(generator, int) else [generator]
    found = search_each(
        [model],
        k,
        design,
        max_length=max_length,
        temperature=temperature,
        nucleus=nucleus,
        generator=generators,
        joint=joint,
        entropy=entropy,
        path=path,
    )
    return next(found)


def search_each(
    models: Iterable[SequenceModel],
    k: int,
    design: str | Design = "conditional-poisson",
    *,
    max_length: int,
    temperature: float = 1.0,
    nucleus: float | None = None,
    generator: int | Iterable[Sequence[torch.Generator]] | None = None,
    joint: bool = False,
    entropy: bool = False,
    path: bool = False,
) -> Iterator[Beams]:
    """``search`` for many models, one after the other; the beams come in their order.

    On a GPU the sources of the next models take the places of sources that have ended, as soon as
    there are as many as the next model has, so that a long list goes through without gaps. It
    should hold one transformers model with inputs that get shorter, the first ones as many as the
    memory has room for, the others fewer at a time.

    Args:
        models: made when there is room for them.
        k: K ≥ 1.
        design: by name or as an object.
        max_length: T.
        temperature: τ.
        nucleus: truncation, if any.
        generator: a seed, from which all sources, counted through, get a stream each; or the
            generators of the sources for each model.
        joint: keep joint inclusion probabilities.
        entropy: keep entropies.
        path: keep every step.
    """
    chosen = design_named(design)
    check_settings(k, max_length, temperature, nucleus)
    step = partial(_Step.of, chosen, k, temperature, nucleus, joint)
    plan = Plan(chosen, k, max_length, step, joint, entropy, path)
    seed = fresh_seed(None) if generator is None else generator
    settings = {
        "design": repr(chosen),
        "k": k,
        "temperature": temperature,
        "nucleus": nucleus,
        "max_length": max_length,
        "seed": seed if isinstance(seed, int) else None,
    }
    return _beams(Tasks(_tasks(models, seed, settings)), plan)


def _tasks(
    models: Iterable[SequenceModel],
    generator: int | Iterable[Sequence[torch.Generator]],
    settings: Mapping[str, Any],
) -> Iterator[Task]:
    """The models with their streams of random numbers."""
    given = None if isinstance(generator, int) else iter(generator)
    count = 0
    for model in models:
        if not hasattr(model, "start"):
            raise ValueError(
                f"model is a {type(model).__name__}, which has no start(); "
                "a model of transformers goes into TransformersModel(model, **inputs)"
            )
        if isinstance(generator, int):
            numbers = range(count, count + model.sources)
            own: Sequence[torch.Generator] = split_seed(generator, numbers, model.device)
            count += model.sources
        else:
            assert given is not None
            own = next(given)
        name = getattr(model, "name", type(model).__name__)
        streams = Streams(own, model.sources, model.device)
        yield Task(model, streams, {**settings, "model": name})


@torch.no_grad()
def _beams(tasks: Tasks, plan: Plan) -> Iterator[Beams]:
    """Of every task, in their order."""
    first = tasks.next()
    if first is None:
        return
    on_cuda = torch.device(first.model.device).type == "cuda"
    progress = _progress(tasks, plan)
    goes_on = True
    while goes_on:
        try:
            with torch.cuda.device(first.model.device) if on_cuda else nullcontext():
                goes_on = next(progress, False)
                found = [collected(task, plan) for task in tasks.done()]
        except torch.OutOfMemoryError as error:
            sources = first.model.sources
            raise torch.OutOfMemoryError(
                f"the GPU's memory is too small for {sources} sources with k = {plan.k}; "
                f"try {max(1, sources // 2)} at a time ({error})"
            ) from error
        yield from found


def _progress(tasks: Tasks, plan: Plan) -> Iterator[bool]:
    """True whenever some sources are through."""
    while tasks.next() is not None:
        for _ in Run(plan, tasks.begin()).go(tasks):
            yield True


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

    @classmethod
    def of(
        cls,
        design: Design,
        k: int,
        temperature: float,
        nucleus: float | None,
        joint: bool,
        rows: Rows,
        model: SequenceModel,
    ) -> _Step:
        """For the rows of a model."""
        return cls(design, k, temperature, nucleus, joint, rows, tuple(model.eos), model.pad)

    @property
    def recordable(self) -> bool:
        """Whether it never looks at what it computes."""
        return self.design.recordable(self.k) and not self.joint and self.nucleus is None

    @property
    def key(self) -> tuple[object, ...]:
        """What a recording of it depends on."""
        return repr(self.design), self.k, self.temperature, self.eos, self.pad

    def __call__(
        self, beam: Hypotheses, scores: Tensor, streams: Streams
    ) -> tuple[Hypotheses, Tensor, Tensor]:
        """The hypotheses picked, [b, K] their parents, and whether some score is no number."""
        return self.with_selection(beam, scores, streams)[1:]

    def with_selection(
        self, beam: Hypotheses, scores: Tensor, streams: Streams
    ) -> tuple[Selection, Hypotheses, Tensor, Tensor]:
        """The same, and what the design returned."""
        candidates = self._candidates(beam, scores)
        wrong = ~candidates.log_total.isfinite().all()
        if wrong.device.type == "cpu" and bool(wrong):
            raise ValueError(NOT_NUMBERS)
        selection = self.design.select(candidates, self.k, streams, self.joint)
        parent = candidates.parent_of(selection.index)
        return selection, self._extended(beam, candidates, selection, parent), parent, wrong

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
        log_prob = torch.where(beam.present, beam.log_prob, -math.inf)
        return Candidates(log_prob, chunks, beam.finished, beam.state, beam.log_inclusion)

    def _extended(
        self, beam: Hypotheses, candidates: Candidates, selection: Selection, parent: Tensor
    ) -> Hypotheses:
        """The hypotheses picked."""
        token = selection.index % candidates.shape[-1]
        was_finished = beam.finished.gather(-1, parent)
        token = torch.where(was_finished | ~selection.present, self.pad, token)
        ended = (token[..., None] == _lasting(self.eos, token.device)).any(-1)
        goes_on = selection.present & ~was_finished & ~ended
        stopped = self.rows.stops(parent, token, goes_on)
        if stopped is not None:
            ended = ended.masked_scatter(goes_on, stopped)
        log_inclusion = None
        if selection.log_inclusion is not None and beam.log_inclusion is not None:
            log_inclusion = beam.log_inclusion.gather(-1, parent) + selection.log_inclusion
        joint = None
        if selection.joint_log_inclusion is not None and beam.joint is not None:
            rows = parent[..., None].expand(-1, -1, beam.joint.shape[-1])
            columns = parent[:, None, :].expand(-1, parent.shape[-1], -1)
            joint = beam.joint.gather(1, rows).gather(2, columns) + selection.joint_log_inclusion
        entropy = None
        if beam.entropy is not None:
            entropy = (beam.entropy + candidates.entropy()).gather(-1, parent)
        log_prob = candidates.log_prob_of(selection.index)
        return Hypotheses(
            source=beam.source,
            token=token,
            length=(beam.length.gather(-1, parent) + ~was_finished) * selection.present,
            log_prob=torch.where(selection.present, log_prob, -math.inf),
            finished=(was_finished | ended) & selection.present,
            present=selection.present,
            state=selection.state,
            log_inclusion=log_inclusion,
            joint=joint,
            entropy=entropy,
        )


@cache
def _lasting(tokens: tuple[int, ...], device: torch.device) -> Tensor:
    """As a tensor that is never freed, because recorded steps go on reading it."""
    return torch.tensor(tokens, dtype=torch.int64, device=device)


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
