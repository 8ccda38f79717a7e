"""A check for models: does one keep the contract that the search relies on?

For people who write their own; our tests run it on every model we ship.

A search drops rows, reorders them, repeats them and gives a source several of them. The check does
all of that to a model on a small random tree of prefixes. It then asks for the same prefixes again
in other layouts of rows: after the same prefix the scores must be the same, wherever its row is.
"""

from __future__ import annotations

import random
import reprlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from cpsbs.models.base import (
    FixedRowModel,
    SequenceModel,
    StoppingModel,
    check_stops,
    eos_tokens,
    score_faults,
)

TOLERANCE = 1e-3
"""Largest total variation distance of two distributions that count as equal. Other layouts of rows
change the last digits of a score: in float32 that is a distance of about 1e-5."""

ROUNDS = 4
"""How many random trees of prefixes are looked at, because one may happen to hide a fault."""

MEMBERS = {
    "sources": "the number of sources, an int from 1 on",
    "vocab_size": "the size V of the vocabulary, an int",
    "eos": "the token that ends a sequence, or a sequence of such tokens, which may be empty",
    "pad": "the token that fills up a sequence behind its end, an int",
    "device": "the torch.device of the scores",
    "start": "a method that returns the scores [sources, V] of the first token",
    "advance": "a method of parent [rows] and token [rows] that returns the scores [rows, V]",
}
"""What a model must have, and what each of these must be."""

FIXED = ("step", "memo", "keep_sources", "admits", "join", "rest", "release")
"""What a model must have in addition if it has ``fix_rows``."""

Row = tuple[int, tuple[int, ...]]
"""A source, and a prefix."""

Step = list[tuple[int, int]]
"""For each new row the previous row that it extends, and the token."""


def check_model(
    model: SequenceModel | Callable[[], SequenceModel],
    k: int = 3,
    max_length: int = 4,
    seed: int = 0,
) -> None:
    """Check that a model keeps the contract of ``SequenceModel``, and report all faults at once.

    Checked are: that all attributes are there and of the right kind, with ``eos`` and ``pad``
    inside the vocabulary; the shape, dtype and device of all scores, and that they are finite or
    -inf, and not all -inf; that a second ``start()`` begins anew, or raises a ValueError; that the
    tensors given to the model stay as they are; and that scores depend on nothing but the source
    and the prefix (up to rounding: check a model of half precision in float32). The usual fault
    here is a model that ignores ``parent``. If the model has ``stops`` or ``fix_rows``, these are
    checked too.

    Args:
        model: the model, if possible with two different sources or more; or a function without
            arguments that makes one. A model that is good for one search only, such as
            ``TransformersModel``, can be checked completely only if there is such a function.
        k: K, the number of rows that a source may have.
        max_length: the most tokens of a sequence, as in a search: the model is asked for the
            scores of so many tokens, one after the other.
        seed: decides which prefixes the model is asked about.

    Raises:
        ValueError: with a line for every fault.
    """
    if k < 1 or max_length < 1:
        raise ValueError(f"k is {k} and max_length is {max_length}; both must be at least 1")
    check = _Check(k, max_length, random.Random(seed))
    with torch.no_grad(), suppress(_Stop):
        check.run(model)
    if check.faults:
        lines = "\n".join(f"- {fault}" for fault in check.faults)
        raise ValueError(f"{check.name} breaks the contract of a model:\n{lines}") from check.cause


class _Stop(Exception):  # noqa: N818, it is no error of its own
    """Ends the check at a fault after which the model cannot be asked any further."""


class _Check:
    """The faults of a model, and what is known of its distribution."""

    def __init__(self, k: int, max_length: int, choices: random.Random) -> None:
        self._k, self._max_length, self._choices = k, max_length, choices
        self.name = "the function that makes the model"
        self._faults: dict[str, str] = {}
        """Sentences, in the order in which they were found, each by what must be said only once."""
        self.cause: Exception | None = None
        """The first exception that the model raised."""
        self._known: dict[Row, Tensor] = {}
        """[V] the scores after each prefix, as they were seen first."""

    @property
    def faults(self) -> list[str]:
        """A sentence for every fault."""
        return list(self._faults.values())

    def run(self, given: Any) -> None:
        """Ask the model for all that a search may ask for."""
        make = given if _is_factory(given) else None
        model = self._called("calling it without arguments", make) if make else given
        self.name = type(model).__name__
        absent = dict(_member_faults(model))
        self._add(*absent.values())
        if not {"eos", "pad", "fix_rows"}.issuperset(absent):
            raise _Stop  # without the others there is no way to ask
        eos = () if "eos" in absent else eos_tokens(model)
        pad = () if "pad" in absent else (model.pad,)
        try:
            steps, seen = self._explore(model, eos)
        finally:
            # Some models know their vocabulary for certain only when they have started.
            self._add(*_token_faults(model.vocab_size, eos, pad))
        differs = self._differs(model.sources, steps, seen)
        again = self._startable_again(model, make)
        if again is not None:
            self._check_repeated(again(), steps, seen)
            differs = differs or self._differs_elsewhere(again, model.sources, steps, eos)
        if differs is not None:
            self._add(
                f"the scores of {_named(differs)} depend on the row that it is in: row i of "
                "advance() must extend the previous row parent[i] by token[i], and nothing else "
                "may matter"
            )
        if again is not None and isinstance(model, FixedRowModel):
            self._check_fixed_rows(again(), _levels(model.sources, steps))

    def _add(self, *faults: str, once: str | None = None) -> None:
        for fault in faults:
            self._faults.setdefault(once or fault, fault)

    def _called(self, name: str, function: Callable[..., Any], *given: Any) -> Any:
        """Call code of the model; an exception is a fault."""
        try:
            return function(*given)
        except Exception as error:
            self.cause = self.cause or error
            self._add(f"{name} raised {type(error).__name__}: {error}")
            raise _Stop from error

    def _startable_again(
        self, model: Any, make: Callable[[], Any] | None
    ) -> Callable[[], Any] | None:
        """Return a function that gives a model to start, if there is a way to have one."""
        try:
            model.start()
        except ValueError:  # it is good for one search only, and says so
            return make and (lambda: self._called("the function that makes the model", make))
        except Exception as error:
            self.cause = self.cause or error
            self._add(
                f"a second start() raised {type(error).__name__}: {error}; it must begin anew, or "
                "raise a ValueError if the model is good for one search only"
            )
            raise _Stop from error
        return lambda: model

    # Walks: start() and some steps.

    def _explore(self, model: Any, eos: tuple[int, ...]) -> tuple[list[Step], list[Tensor]]:
        """Return the steps of a random walk, and the scores before and after each."""
        rows, steps = _roots(model.sources), list[Step]()
        scores = [self._scores(model, "start", rows)]
        for t in range(1, self._max_length):
            step = self._extensions(rows, scores[-1], eos)
            if t == self._max_length - 1:  # the first source has ended, if there are others
                step = [x for x in step if rows[x[0]][0] != rows[step[0][0]][0]] or step
            step = self._going(model, step)
            if not step:
                break
            rows = _extended(rows, step)
            scores.append(self._scores(model, "advance", rows, *_tensors(step, model.device)))
            steps.append(step)
        return steps, scores

    def _extensions(self, rows: list[Row], scores: Tensor, eos: tuple[int, ...]) -> Step:
        """Return at most K random extensions of every source; with K > 2, one of them twice."""
        possible = scores.isfinite()
        possible[:, [token for token in eos if 0 <= token < scores.shape[-1]]] = False
        tokens = [row.nonzero()[:, 0].tolist() for row in possible]
        step: Step = []
        for _, group in groupby(range(len(rows)), key=lambda i: rows[i][0]):
            parents = [i for i in group if tokens[i]]
            if not parents:
                continue
            chosen = self._choices.sample(parents, min(len(parents), self._k))
            chosen += self._choices.choices(parents, k=self._k - len(chosen))
            own = [(i, self._choices.choice(tokens[i])) for i in chosen]
            if self._k > 2:
                own[-1] = own[0]
            self._choices.shuffle(own)
            step += own
        return step

    def _going(self, model: Any, step: Step) -> Step:
        """Return the extensions that the model does not stop."""
        if not step or not isinstance(model, StoppingModel):
            return step
        returned = self._called("model.stops()", model.stops, *_tensors(step, model.device))
        try:
            stopped = check_stops(returned, len(step))
        except ValueError as error:
            self._add(str(error), once="model.stops() returned")
            return step
        if stopped is None:
            return step
        return [x for x, ends in zip(step, stopped.tolist(), strict=True) if not ends]

    def _walk(self, model: Any, steps: list[Step]) -> list[Tensor]:
        """Return the scores before and after each of these steps."""
        rows = _roots(model.sources)
        scores = [self._scores(model, "start", rows)]
        for step in steps:
            rows = _extended(rows, step)
            scores.append(self._scores(model, "advance", rows, *_tensors(step, model.device)))
        return scores

    def _check_repeated(self, model: Any, steps: list[Step], seen: list[Tensor]) -> None:
        """Stop if the same steps give other scores than those that were seen."""
        try:
            repeated = self._walk(model, steps)
        except _Stop:
            self._add("it was so after a second start(), which must begin anew")
            raise
        if any(_far(x, y).any() for x, y in zip(seen, repeated, strict=True)):
            self._add(
                "the scores were different when the same rows were asked for again: start() must "
                "begin anew, and scores must not be random (if dropout is on, call eval())"
            )
            raise _Stop

    def _scores(self, model: Any, call: str, rows: Sequence[Row | None], *given: Tensor) -> Tensor:
        """Return [rows, V] what a method of the model returned, and add all faults of it.

        The scores of a row that is None mean nothing.
        """
        before = [x.clone() for x in given]
        name = f"model.{call}()"
        scores = self._called(name, getattr(model, call), *given)
        for x, y, argument in zip(given, before, ("parent", "token"), strict=False):
            if not torch.equal(x, y):
                self._add(f"{name} changed the tensor {argument} that it was given")
        self._add(*score_faults(scores, len(rows), model, name))
        readable = isinstance(scores, Tensor) and scores.shape == (len(rows), model.vocab_size)
        if not readable or scores.is_complex() or scores.device.type == "meta":
            raise _Stop  # with another wrong dtype one can go on
        values: Tensor = scores.to("cpu", torch.float64, copy=True)
        for row, value in zip(rows, values, strict=True):
            if row is not None:
                self._add(*_number_faults(value, f"{name} gave {_named(row)}"), once=f"{name} gave")
        return values

    # Layouts: the same prefixes in other rows.

    def _differs(self, sources: int, steps: list[Step], scores: list[Tensor]) -> Row | None:
        """Return a row whose scores are not those that its prefix had before, if there is one."""
        rows = _roots(sources)
        found = [self._news(rows, scores[0])]
        for step, after in zip(steps, scores[1:], strict=True):
            rows = _extended(rows, step)
            found.append(self._news(rows, after))
        return next(filter(None, found), None)

    def _differs_elsewhere(
        self, again: Callable[[], Any], sources: int, steps: list[Step], eos: tuple[int, ...]
    ) -> Row | None:
        """The same for other layouts of the rows after these steps, and for other walks."""
        for _ in range(ROUNDS):
            levels = _levels(sources, steps)
            for layout in (self._shuffled(levels), *_one_row_each(levels)):
                other = self._steps(sources, layout)
                differs = self._differs(sources, other, self._walk(again(), other))
                if differs is not None:
                    return differs
            steps, seen = self._explore(again(), eos)
            differs = self._differs(sources, steps, seen)
            if differs is not None:
                return differs
        return None

    def _news(self, rows: Sequence[Row | None], scores: Tensor) -> Row | None:
        """The same for the rows after one step; prefixes that are new become known."""
        here = [(row, value) for row, value in zip(rows, scores, strict=True) if row is not None]
        return next((r for r, x in here if _far(self._known.setdefault(r, x), x)), None)

    def _shuffled(self, levels: list[list[Row]]) -> list[list[Row]]:
        """Return the same rows in random order, some of them twice, source by source."""
        layouts = []
        for level in levels:
            layout: list[Row] = []
            for _, group in groupby(level, key=lambda row: row[0]):
                own = list(group)
                own += self._choices.choices(own, k=self._k - len(own))
                self._choices.shuffle(own)
                layout += own
            layouts.append(layout)
        return layouts

    def _steps(self, sources: int, layouts: list[list[Row]]) -> list[Step]:
        """Return steps that lead to these rows; each extends any of the rows that it can extend."""
        rows, steps = _roots(sources), []
        for layout in layouts:
            steps.append([self._step_to(row, rows) for row in layout])
            rows = layout
        return steps

    def _step_to(self, row: Row, rows: Sequence[Row | None]) -> tuple[int, int]:
        source, prefix = row
        same = [i for i, other in enumerate(rows) if other == (source, prefix[:-1])]
        return self._choices.choice(same), prefix[-1]

    def _check_fixed_rows(self, model: Any, levels: list[list[Row]]) -> None:
        """Check that ``step`` gives the scores that ``advance`` gave."""
        self._scores(model, "start", _roots(model.sources))
        if not levels or not self._called("model.fix_rows()", model.fix_rows, self._k, len(levels)):
            return
        try:
            differs = self._fixed_walk(model, self._shuffled(levels))
        finally:
            model.release()
        if differs is not None:
            self._add(f"model.step() and model.advance() score {_named(differs)} differently")

    def _fixed_walk(self, model: Any, layouts: list[list[Row]]) -> Row | None:
        """Return a row that got other scores than before, if there is one."""
        beams: dict[int, list[Row]] = {s: [(s, ())] * self._k for s in range(model.sources)}
        differs: Row | None = None
        for t, layout in enumerate(layouts):
            after = {s: [row for row in layout if row[0] == s] for s in beams}
            left = [i for i, rows in enumerate(after.values()) if rows]
            if t == len(layouts) - 1 and len(left) < len(after):
                kept = torch.tensor(left, device=model.device)
                self._called("model.keep_sources()", model.keep_sources, kept)
                after = {s: rows for s, rows in after.items() if rows}
            # A source that has ended goes on by padding, and nobody reads its scores.
            ended: Step = [(0, model.pad)] * self._k
            steps = [[self._step_to(row, beams[s]) for row in rows] for s, rows in after.items()]
            both = torch.tensor([step or ended for step in steps], device=model.device)
            unread: list[Row | None] = [None] * self._k
            rows = [row for own in after.values() for row in own or unread]
            given = both[..., 0].contiguous(), both[..., 1].contiguous()
            differs = differs or self._news(rows, self._scores(model, "step", rows, *given))
            beams = after
        return differs


def _is_factory(given: Any) -> bool:
    """Return whether this is a function that makes a model, rather than a model."""
    is_class = isinstance(given, type)
    return is_class or (callable(given) and set(MEMBERS).isdisjoint(dir(given)))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_right(name: str, value: Any) -> bool:
    """Return whether a member of a model is of the right kind."""
    if name in ("start", "advance"):
        return callable(value)
    if name == "device":
        return isinstance(value, torch.device)
    if name == "eos" and isinstance(value, Sequence) and not isinstance(value, str):
        return all(map(_is_int, value))
    return _is_int(value) and (name != "sources" or value > 0)


def _member_faults(model: Any) -> Iterator[tuple[str, str]]:
    """Yield the name of each member that is missing or of the wrong kind, and a sentence."""
    for name, what in MEMBERS.items():
        try:
            value = getattr(model, name)
        except AttributeError:
            yield name, f"model.{name} is missing; it must be {what}"
        else:
            if not _is_right(name, value):
                yield name, f"model.{name} is {reprlib.repr(value)}; it must be {what}"
    if hasattr(model, "fix_rows") and not isinstance(model, FixedRowModel):
        absent = ", ".join(f"{name}()" for name in FIXED if not hasattr(model, name))
        if absent:
            yield (
                "fix_rows",
                f"model.fix_rows() is there, but it needs {absent} too; see FixedRowModel",
            )


def _token_faults(vocab_size: int, eos: Sequence[int], pad: Sequence[int]) -> Iterator[str]:
    """Yield a sentence for each of the special tokens that is not in the vocabulary."""
    for name, token in [*(("eos", x) for x in eos), *(("pad", x) for x in pad)]:
        if not 0 <= token < vocab_size:
            yield f"model.{name} has the token {token}; tokens are 0 to V - 1 = {vocab_size - 1}"


def _number_faults(scores: Tensor, gave: str) -> Iterator[str]:
    """Yield a sentence if the scores [V] of a row are not those of a distribution."""
    if bool(scores.isnan().any() | scores.isposinf().any()):
        yield f"{gave} scores that are NaN or inf; they must be finite, or -inf"
    elif bool(scores.isneginf().all()):
        yield f"{gave} the score -inf for every token; at least one must be possible"


def _far(x: Tensor, y: Tensor) -> Tensor:
    """Return [...] whether scores [..., V] stand for different distributions."""
    return (x.softmax(-1) - y.softmax(-1)).abs().sum(-1) / 2 > TOLERANCE


def _named(row: Row) -> str:
    source, prefix = row
    return f"the prefix {list(prefix)} of source {source}"


def _roots(sources: int) -> list[Row]:
    """Return the rows after ``start``."""
    return [(source, ()) for source in range(sources)]


def _extended(rows: Sequence[Row], step: Step) -> list[Row]:
    """Return the rows after a step."""
    return [(rows[parent][0], (*rows[parent][1], token)) for parent, token in step]


def _tensors(step: Step, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the parents [rows] and the tokens [rows] of a step."""
    parent, token = zip(*step, strict=True)
    return torch.tensor(parent, device=device), torch.tensor(token, device=device)


def _levels(sources: int, steps: list[Step]) -> list[list[Row]]:
    """Return the different rows after each step."""
    rows, levels = _roots(sources), list[list[Row]]()
    for step in steps:
        rows = _extended(rows, step)
        levels.append(sorted(set(rows)))
    return levels


def _one_row_each(levels: list[list[Row]]) -> Iterator[list[list[Row]]]:
    """Yield a layout for each source: a single row that goes on as far as any of the source."""
    deepest = {row[0]: row for level in levels for row in level}
    for source, prefix in deepest.values():
        yield [[(source, prefix[:t])] for t in range(1, len(prefix) + 1)]
