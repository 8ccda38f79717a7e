"""A batch of sources on their way through the recursion.

Sources end at different times. Where rows are fixed, the places of those that have ended are taken
by the sources of the next model, if there is one, so that on a GPU every step has all the work that
there is room for. What a source gets does not depend on that: its random numbers are its own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cpsbs.backends import Backend
from cpsbs.designs import Design
from cpsbs.models.base import SequenceModel, check_scores, eos_tokens
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Selection
from cpsbs.search.beams import Beams
from cpsbs.search.beams import Step as PathStep
from cpsbs.search.rows import Rows, rows_of
from cpsbs.search.state import Hypotheses, RecordedStep, Trail
from cpsbs.search.step import NOT_NUMBERS, Step


@dataclass(eq=False)
class Task:
    """A model whose sources are to be searched, and what has come of them."""

    model: SequenceModel
    streams: Streams
    backend: Backend
    settings: Mapping[str, Any]
    found: list[tuple[Hypotheses, Tensor]] = field(default_factory=list)
    """Hypotheses [n, K] of sources that are through, and their tokens [n, K, T]."""
    path: list[PathStep] = field(default_factory=list)

    @cached_property
    def scores(self) -> Tensor:
        """[sources, V] of the first token."""
        scores = self.model.start()
        return check_scores(scores, self.model.sources, self.model, "start")

    @property
    def done(self) -> bool:
        """Whether all sources are through."""
        return sum(len(part.source) for part, _ in self.found) == self.model.sources


class Tasks:
    """Tasks in their order: those that wait, and those that have begun."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._coming = iter(tasks)
        self._waiting: Task | None = None
        self._begun = deque[Task]()
        self._error: Exception | None = None

    def next(self) -> Task | None:
        """The one that waits longest; where others have begun, with its first scores.

        If it cannot be had, that is an error when those that have begun are done.
        """
        if self._waiting is None and self._error is None:
            try:
                self._waiting = next(self._coming, None)
                if self._begun and self._waiting is not None:
                    _ = self._waiting.scores
            except Exception as error:
                self._waiting, self._error = None, error
        if self._error is not None and not self._begun:
            raise self._error
        return self._waiting

    def begin(self) -> Task:
        """The same, which has begun."""
        task = self.next()
        assert task is not None
        self._waiting = None
        self._begun.append(task)
        return task

    def done(self) -> Iterator[Task]:
        """Those that have begun and are done, up to the first one that is not."""
        while self._begun and self._begun[0].done:
            yield self._begun.popleft()


@dataclass(frozen=True)
class Plan:
    """What all tasks have in common."""

    design: Design
    k: int
    max_length: int
    temperature: float
    nucleus: float | None
    joint: bool
    entropy: bool
    path: bool

    def step(self, rows: Rows, model: SequenceModel, backend: Backend) -> Step:
        """For the rows of a model."""
        return Step(
            self.design,
            self.k,
            self.temperature,
            self.nucleus,
            self.joint,
            rows,
            eos_tokens(model),
            model.pad,
            backend,
        )

    def first(self, task: Task, streams: Streams) -> Hypotheses:
        """The empty sequences of a task."""
        source = torch.arange(task.model.sources, device=task.model.device)
        return Hypotheses.first(self.design, self.k, streams, source, self.joint, self.entropy)


class Run:
    """Sources that are searched together: those of one task, and of others that take their places.

    A place is known by its number among the rows there are, and its ``slot``, its number among
    those at first.
    """

    def __init__(self, plan: Plan, task: Task) -> None:
        model, self._plan = task.model, plan
        roots = plan.design.roots(plan.k)
        self._rows = rows_of(model, task.scores, plan.k, roots, plan.max_length, task.backend)
        self._step = plan.step(self._rows, model, task.backend)
        self._trail = Trail(model.sources, plan.k, model.pad, model.device, plan.max_length)
        self._slot = torch.arange(model.sources, device=model.device)
        self._owner: list[Task | None] = [task] * model.sources
        self._steps = 0
        self._since = [0] * model.sources
        """After how many steps the source in each place has begun."""
        # Its own, as those of other sources will be put into it.
        self._streams = task.streams.copy()
        self._beam = plan.first(task, self._streams)
        del task.scores  # the rows have them
        self._broken = torch.zeros((), dtype=torch.bool, device=model.device)
        self._recorded: RecordedStep | None = None

    def go(self, tasks: Tasks) -> Iterator[None]:
        """Until nothing is left; yields when some sources are through."""
        try:
            yield from self._loop(tasks)
        finally:
            self._rows.release()

    def _loop(self, tasks: Tasks) -> Iterator[None]:
        busy = list(range(len(self._owner)))
        oldest = 0
        while True:
            parent = self._pick()
            self._steps += 1
            full = self._steps - oldest == self._plan.max_length
            if full or self._rows.looks(self._steps):
                # Prepared by the host while the device is busy.
                refills = self._rows.takes_others and not self._plan.path
                coming = tasks.next() if refills else None
                going = self._look()
                ended = [i for i in busy if not going[i] or self._age(i) == self._plan.max_length]
                left = sorted(set(busy) - set(ended))
                free = sorted(set(range(len(going))) - set(left))
                joins = coming is not None and self._fits(coming, free)
                drops = not joins and self._rows.worth_dropping(len(left), len(going))
                if joins or drops or full or not left:
                    self._collect(ended)
                    yield
                if not left and not joins:
                    return
                if drops:
                    self._drop_all_but(left)
                    parent = parent[left]
                while coming is not None and self._fits(coming, free):
                    count = coming.model.sources
                    parent = self._join(tasks.begin(), free[:count], parent)
                    free, coming = free[count:], tasks.next()
                busy = [i for i, owner in enumerate(self._owner) if owner is not None]
                oldest = min(self._since[i] for i in busy)
            self._rows.advance(parent, self._beam)

    def _age(self, place: int) -> int:
        """How many tokens the source in a place has."""
        return self._steps - self._since[place]

    def _pick(self) -> Tensor:
        """One step: the hypotheses that follow, and [b, K] their parents."""
        plan, step = self._plan, self._step
        if self._recorded is None and self._steps and step.recordable and not plan.path:
            key = (step.key, plan.entropy)
            self._recorded = self._rows.recorded(step, key, self._beam, self._streams)
            if self._recorded is not None:
                self._recorded.now.broken.logical_or_(self._broken)
        if self._recorded is not None:
            after = self._recorded.run(self._rows.latest)
            self._streams, self._broken = self._recorded.streams, after.broken
        else:
            scores, row = self._rows.scores(self._beam)
            selection, after = step.with_selection(self._beam, scores, self._streams, row=row)
            self._broken = self._broken | after.broken
            if plan.path and self._owner[0] is not None:
                self._owner[0].path.append(_path_step(after.beam, selection, after.parent))
        self._beam = after.beam
        self._trail.append(self._slot, after.parent, after.beam.token)
        return after.parent

    def _look(self) -> list[bool]:
        """Which places have hypotheses that go on."""
        broken, *going = torch.cat([self._broken[None], self._beam.open.any(-1)]).tolist()
        if broken:
            raise ValueError(NOT_NUMBERS)
        return going

    def _collect(self, ended: list[int]) -> None:
        """Give the sources in these places back to their tasks."""
        for task in {id(self._owner[i]): self._owner[i] for i in ended}.values():
            assert task is not None
            mine = [i for i in ended if self._owner[i] is task]
            place = self._tensor(mine)
            tokens = self._trail.sequences(self._slot[place], [self._age(i) for i in mine])
            task.found.append((self._beam.of(place), tokens))
        for i in ended:
            self._owner[i] = None
        # Also those that have reached the last length: nobody is to wait for them.
        closed = self._beam.finished.index_fill(0, self._tensor(ended), True)
        self._replace(replace(self._beam, finished=closed))
        self._rows.rest(ended)

    def _drop_all_but(self, left: list[int]) -> None:
        """Go on with fewer rows."""
        kept = self._tensor(left)
        self._beam, self._streams = self._beam.of(kept), self._streams.select(kept)
        self._slot = self._slot[kept]
        self._owner = [self._owner[i] for i in left]
        self._since = [self._since[i] for i in left]
        self._rows.keep(kept)
        self._recorded = None

    def _fits(self, task: Task, free: list[int]) -> bool:
        return task.model.sources <= len(free) and self._rows.admits(task.model)

    def _join(self, task: Task, places: list[int], parent: Tensor) -> Tensor:
        """The sources of a task, with their first tokens, in these places; [b, K] parents then."""
        plan, at = self._plan, self._tensor(places)
        roots = plan.design.roots(plan.k)
        scores = task.scores[:, None].expand(-1, roots, -1)
        streams = task.streams.copy()
        after = self._step(plan.first(task, streams), scores, streams)
        pairs = zip(self._beam.tensors(), after.beam.tensors(), strict=True)
        self._streams.put(places, streams)
        self._replace(self._beam.rebuilt([mine.index_copy(0, at, its) for mine, its in pairs]))
        self._broken.logical_or_(after.broken)
        self._trail.begin(self._slot[at], after.parent, after.beam.token)
        self._rows.join(places, task.model)
        del task.scores
        for i in places:
            self._owner[i], self._since[i] = task, self._steps - 1
        # The rows of a source that begins are all alike.
        return parent.index_fill(0, at, 0)

    def _replace(self, beam: Hypotheses) -> None:
        """Go on with these hypotheses."""
        if self._recorded is None:
            self._beam = beam
        else:
            broken = self._broken.clone()
            self._recorded.load(beam, self._streams)
            self._broken.logical_or_(broken)

    def _tensor(self, places: list[int]) -> Tensor:
        return torch.tensor(places, dtype=torch.int64, device=self._slot.device)


def _path_step(beam: Hypotheses, selection: Selection, parent: Tensor) -> PathStep:
    present, inclusion = selection.present, selection.log_inclusion
    return PathStep(beam.source, parent, beam.token, present, beam.log_prob, inclusion)


def collected(task: Task, plan: Plan) -> Beams:
    """All sources of a task in their order, the hypotheses of each by probability."""
    parts = [part for part, _ in task.found]
    order = torch.cat([part.source for part in parts]).argsort()

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])[order]

    log_prob, present, length = joined("log_prob"), joined("present"), joined("length")
    known = parts[0].log_inclusion is not None
    state = {name: torch.cat([p.state[name] for p in parts])[order] for name in parts[0].state}
    log_inclusion, log_weight = plan.design.log_weight(
        log_prob, joined("log_inclusion") if known else None, state
    )
    rank = log_prob.argsort(dim=-1, descending=True, stable=True)

    def ranked(x: Tensor) -> Tensor:
        return x.gather(1, rank[(...,) + (None,) * (x.ndim - 2)].expand(-1, -1, *x.shape[2:]))

    def where_present(x: Tensor | None) -> Tensor | None:
        return None if x is None else ranked(torch.where(present, x, -math.inf))

    pairs = None
    if all(part.joint is not None for part in parts):
        pairs = ranked(joined("joint"))
        pairs = pairs.gather(2, rank[:, None, :].expand_as(pairs))
    pad, longest = task.model.pad, max(1, int(length.max()))
    tokens = [torch.nn.functional.pad(x, (0, longest), value=pad) for _, x in task.found]
    sequences = torch.cat([x[..., :longest] for x in tokens])[order]
    sequences = torch.where(present[..., None], sequences, pad)
    return Beams(
        sequences=ranked(sequences),
        lengths=ranked(length),
        finished=ranked(joined("finished")),
        present=ranked(present),
        log_prob=ranked(log_prob),
        log_inclusion=where_present(log_inclusion),
        log_weight=where_present(log_weight),
        design=plan.design.name,
        pad=pad,
        joint_log_inclusion=pairs,
        entropy=None if parts[0].entropy is None else ranked(joined("entropy")),
        path=tuple(task.path) if plan.path else None,
        settings=task.settings,
        made_by=plan.design,
    )
