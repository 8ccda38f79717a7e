"""``check_model``: whether a model keeps the contract that the search relies on.

It is for authors of models; our tests run it on every model we ship.

A search drops rows, reorders them, repeats them and gives a source several of them. The check does
all of that to a model on a small random tree of prefixes. It then asks for the same prefixes again
in other layouts of rows: after the same prefix the scores must be the same, whichever row it is in.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from cpsbs.backends import backend_for
from cpsbs.models.base import (
    FixedRowModel,
    SequenceModel,
    StoppingModel,
    check_stops,
    eos_tokens,
    score_faults,
)
from cpsbs.models.layouts import (
    Extensions,
    Row,
    as_tensors,
    different_rows,
    extended,
    extension_to,
    first_rows,
    shuffled,
    single_rows,
    steps_through,
)
from cpsbs.models.members import is_factory, member_faults, token_faults

TOLERANCE = 1e-3
"""The largest total variation distance of two distributions that count as equal. Another layout of
rows changes the last digits of a score: in float32 that is a distance of about 1e-5."""

ROUNDS = 4
"""How many random trees of prefixes are tried, because one may happen to hide a fault."""


def check_model(
    model: SequenceModel | Callable[[], SequenceModel],
    k: int = 3,
    max_length: int = 4,
    seed: int = 0,
) -> None:
    """Check that a model keeps the contract of ``SequenceModel``, and report all faults at once.

    The model must

    - have all members of ``SequenceModel``, of the right kind, with ``eos`` and ``pad`` inside the
      vocabulary;
    - return scores of the right shape, dtype and device, each finite or -inf, and not all -inf;
    - begin anew at a second ``start()``, or raise a ValueError;
    - leave the tensors that it is given as they are;
    - return scores that depend on nothing but the source and the prefix, up to rounding (check a
      model of half precision in float32). The usual fault here is a model that ignores ``parent``;
    - if it has ``stops``, return from it what ``StoppingModel`` says;
    - if it has ``fix_rows``, have all methods of ``FixedRowModel``, and return the same scores with
      a fixed number of rows, also for sources that joined from another model.

    Args:
        model: the model, if possible with two different sources or more; or a function without
            arguments that makes one. A model that can be searched only once, such as
            ``TransformersModel``, is checked completely only through such a function; so is
            ``join`` of a model with fixed rows.
        k: K, the number of rows that a source may have.
        max_length: the largest number of tokens in a sequence, as in a search: the model is asked
            for the scores of that many tokens, one after the other.
        seed: the seed of the random choice of prefixes.

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


class _Stop(Exception):  # noqa: N818, it is not an error
    """The end of the check, at a fault after which the model cannot be asked any further."""


class _Check:
    """One check of a model: the faults found so far, and the known scores of its prefixes."""

    def __init__(self, k: int, max_length: int, choices: random.Random) -> None:
        self._k, self._max_length, self._choices = k, max_length, choices
        self.name = "the function that makes the model"
        self._faults: dict[str, str] = {}
        """Sentences in the order in which they were found, by a key that allows each only once."""
        self.cause: Exception | None = None
        """The first exception that the model raised."""
        self._known: dict[Row, Tensor] = {}
        """The scores [V] after each prefix, as they were when it was first seen."""

    @property
    def faults(self) -> list[str]:
        """Sentences that name the faults, one each."""
        return list(self._faults.values())

    def run(self, given: Any) -> None:
        """Ask the model for everything that a search may ask for."""
        make = given if is_factory(given) else None
        model = self._called("calling it without arguments", make) if make else given
        self.name = type(model).__name__
        absent = dict(member_faults(model))
        self._add(*absent.values())
        if not {"eos", "pad", "fix_rows"}.issuperset(absent):
            raise _Stop  # without these members the model cannot be asked for scores
        eos = () if "eos" in absent else eos_tokens(model)
        pad = () if "pad" in absent else (model.pad,)
        try:
            steps, seen = self._explore(model, eos)
        finally:
            # Some models know the size of their vocabulary only after start().
            self._add(*token_faults(model.vocab_size, eos, pad))
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
            self._check_fixed_rows(again, make, different_rows(model.sources, steps))

    def _add(self, *faults: str, once: str | None = None) -> None:
        """Note faults; of all with the same ``once``, only the first."""
        for fault in faults:
            self._faults.setdefault(once or fault, fault)

    def _called(self, name: str, function: Callable[..., Any], *given: Any) -> Any:
        """Return the result of code of the model; an exception is a fault and ends the check."""
        try:
            return function(*given)
        except Exception as error:
            self.cause = self.cause or error
            self._add(f"{name} raised {type(error).__name__}: {error}")
            raise _Stop from error

    def _startable_again(
        self, model: Any, make: Callable[[], Any] | None
    ) -> Callable[[], Any] | None:
        """Return a function that gives a model to start again, or None if there is none."""
        try:
            model.start()
        except ValueError:  # the model can be searched only once, and says so
            return make and (lambda: self._called("the function that makes the model", make))
        except Exception as error:
            self.cause = self.cause or error
            self._add(
                f"a second start() raised {type(error).__name__}: {error}; it must begin anew, or "
                "raise a ValueError if the model can be searched only once"
            )
            raise _Stop from error
        return lambda: model

    # Walks: start(), and some steps.

    def _explore(self, model: Any, eos: tuple[int, ...]) -> tuple[list[Extensions], list[Tensor]]:
        """Return the steps of a random walk, and the scores before the first and after each."""
        rows, steps = first_rows(model.sources), list[Extensions]()
        scores = [self._scores(model, "start", rows)]
        for t in range(1, self._max_length):
            step = self._extensions(rows, scores[-1], eos)
            if t == self._max_length - 1:  # let the first source end before the others
                step = [x for x in step if rows[x[0]][0] != rows[step[0][0]][0]] or step
            step = self._not_stopped(model, step)
            if not step:
                break
            rows = extended(rows, step)
            scores.append(self._scores(model, "advance", rows, *as_tensors(step, model.device)))
            steps.append(step)
        return steps, scores

    def _extensions(self, rows: list[Row], scores: Tensor, eos: tuple[int, ...]) -> Extensions:
        """Return at most K random extensions of every source; with K > 2, one of them twice."""
        possible = scores.isfinite()
        possible[:, [token for token in eos if 0 <= token < scores.shape[-1]]] = False
        tokens = [row.nonzero()[:, 0].tolist() for row in possible]
        step: Extensions = []
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

    def _not_stopped(self, model: Any, step: Extensions) -> Extensions:
        """Return the extensions that the model does not stop."""
        if not step or not isinstance(model, StoppingModel):
            return step
        returned = self._called("model.stops()", model.stops, *as_tensors(step, model.device))
        try:
            stopped = check_stops(returned, len(step))
        except ValueError as error:
            self._add(str(error), once="model.stops() returned")
            return step
        if stopped is None:
            return step
        return [x for x, ends in zip(step, stopped.tolist(), strict=True) if not ends]

    def _walk(self, model: Any, steps: list[Extensions]) -> list[Tensor]:
        """Return the scores before the first and after each of these steps."""
        rows = first_rows(model.sources)
        scores = [self._scores(model, "start", rows)]
        for step in steps:
            rows = extended(rows, step)
            scores.append(self._scores(model, "advance", rows, *as_tensors(step, model.device)))
        return scores

    def _check_repeated(self, model: Any, steps: list[Extensions], seen: list[Tensor]) -> None:
        """End the check if the same steps do not give the scores that were seen."""
        try:
            repeated = self._walk(model, steps)
        except _Stop:
            self._add("that happened after a second start(), which must begin anew")
            raise
        if any(_far(x, y).any() for x, y in zip(seen, repeated, strict=True)):
            self._add(
                "the scores were different when the same rows were asked for again: start() must "
                "begin anew, and scores must not be random (if dropout is on, call eval())"
            )
            raise _Stop

    def _scores(self, model: Any, call: str, rows: Sequence[Row | None], *given: Tensor) -> Tensor:
        """Return the scores [rows, V] that a method of the model returns, and note their faults.

        The scores of a row that is None are not read.
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
            raise _Stop  # other wrong dtypes can be read
        values: Tensor = scores.to("cpu", torch.float64, copy=True)
        for row, value in zip(rows, values, strict=True):
            if row is not None:
                self._add(*_number_faults(value, f"{name} gave {_named(row)}"), once=f"{name} gave")
        return values

    # Layouts: the same prefixes in other rows.

    def _differs(self, sources: int, steps: list[Extensions], scores: list[Tensor]) -> Row | None:
        """Return a row whose scores are not those that its prefix had before, if there is one."""
        rows = first_rows(sources)
        found = [self._differing(rows, scores[0])]
        for step, after in zip(steps, scores[1:], strict=True):
            rows = extended(rows, step)
            found.append(self._differing(rows, after))
        return next(filter(None, found), None)

    def _differs_elsewhere(
        self, again: Callable[[], Any], sources: int, steps: list[Extensions], eos: tuple[int, ...]
    ) -> Row | None:
        """Return a row that differs in other layouts of these steps, or on other walks, if any."""
        for _ in range(ROUNDS):
            layouts = different_rows(sources, steps)
            for layout in (shuffled(layouts, self._k, self._choices), *single_rows(layouts)):
                other = steps_through(layout, sources, self._choices)
                differs = self._differs(sources, other, self._walk(again(), other))
                if differs is not None:
                    return differs
            steps, seen = self._explore(again(), eos)
            differs = self._differs(sources, steps, seen)
            if differs is not None:
                return differs
        return None

    def _differing(self, rows: Sequence[Row | None], scores: Tensor) -> Row | None:
        """Return a row that differs after one step, if any; the scores of new prefixes are kept."""
        here = [(row, value) for row, value in zip(rows, scores, strict=True) if row is not None]
        return next((r for r, x in here if _far(self._known.setdefault(r, x), x)), None)

    def _check_fixed_rows(
        self, again: Callable[[], Any], make: Callable[[], Any] | None, layouts: list[list[Row]]
    ) -> None:
        """Check that ``step`` gives the scores that ``advance`` gave, with joined sources too."""
        for make_other in (None, make) if make else (None,):
            model = again()
            self._scores(model, "start", first_rows(model.sources))
            given = self._k, len(layouts), backend_for(model.device)
            if not layouts or not self._called("model.fix_rows()", model.fix_rows, *given):
                return
            try:
                if make_other is not None and not self._joined(model, make_other):
                    return
                differs = self._fixed_walk(model, shuffled(layouts, self._k, self._choices))
            finally:
                model.release()
            if differs is not None:
                after = "after model.join(), " if make_other else ""
                self._add(
                    f"{after}model.step() and model.advance() score {_named(differs)} differently"
                )
                return

    def _joined(self, model: Any, make: Callable[[], Any]) -> bool:
        """Let the sources of another model take all places, and return whether they may."""
        other = self._called("the function that makes the model", make)
        self._scores(other, "start", first_rows(other.sources))
        places = list(range(model.sources))
        self._called("model.retire()", model.retire, places)
        if not self._called("model.admits()", model.admits, other):
            return False
        self._called("model.join()", model.join, places, other)
        return True

    def _fixed_walk(self, model: Any, layouts: list[list[Row]]) -> Row | None:
        """Return a row to which ``step`` gives other scores than it had before, if there is one."""
        beams: dict[int, list[Row]] = {s: [(s, ())] * self._k for s in range(model.sources)}
        differs: Row | None = None
        for t, layout in enumerate(layouts):
            after = {s: [row for row in layout if row[0] == s] for s in beams}
            left = [i for i, rows in enumerate(after.values()) if rows]
            if t == len(layouts) - 1 and len(left) < len(after):
                kept = torch.tensor(left, device=model.device)
                self._called("model.keep_sources()", model.keep_sources, kept)
                after = {s: rows for s, rows in after.items() if rows}
            # A source that has ended goes on with padding, and its scores are not read.
            ended: Extensions = [(0, model.pad)] * self._k
            steps = [
                [extension_to(row, beams[s], self._choices) for row in rows]
                for s, rows in after.items()
            ]
            both = torch.tensor([step or ended for step in steps], device=model.device)
            unread: list[Row | None] = [None] * self._k
            rows = [row for own in after.values() for row in own or unread]
            given = both[..., 0].contiguous(), both[..., 1].contiguous()
            differs = differs or self._differing(rows, self._scores(model, "step", rows, *given))
            beams = after
        return differs


def _number_faults(scores: Tensor, gave: str) -> Iterator[str]:
    """Yield a sentence if the scores [V] of a row define no distribution."""
    if bool(scores.isnan().any() | scores.isposinf().any()):
        yield f"{gave} scores that are NaN or inf; they must be finite, or -inf"
    elif bool(scores.isneginf().all()):
        yield f"{gave} the score -inf for every token; at least one must be possible"


def _far(x: Tensor, y: Tensor) -> Tensor:
    """Return [...] whether the scores [..., V] define different distributions."""
    return (x.softmax(-1) - y.softmax(-1)).abs().sum(-1) / 2 > TOLERANCE


def _named(row: Row) -> str:
    """Return how a message names a row."""
    source, prefix = row
    return f"the prefix {list(prefix)} of source {source}"
