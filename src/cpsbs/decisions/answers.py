"""How sure is the model of this answer? The distribution over answers, from beams.

Several sequences may give the same answer: in other words, at other length, or written in other
tokens. With a key that maps a sequence to its answer, the probability of the answer a is

    P(a) = E[key(y) = a] ,

estimated like any expectation, with a standard error; and because the probability of every sequence
is exact, P(a) certainly lies in [Σ_{key(y) = a} p(y), 1 − Σ_{key(y) ≠ a} p(y)], summed over the
sequences that were found.

The *entropy over answers*, −Σ P(a) log P(a), says how undecided the model is; with answers grouped
by meaning it is the semantic entropy (Kuhn, Gal and Farquhar, 2023). It is estimated by plugging in
the estimated probabilities, which is biased, usually downwards: answers that were not found are
missing. Bounds that are certain stand beside it, and it may lie outside them: the entropy is
smallest when all that was not found goes to a single answer; and largest when it is spread over all
answers as evenly as possible, which bounds it only if the key lists its answers.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpsbs.decisions import keys
from cpsbs.decisions.entropy import entropy_bounds, plug_in_entropy
from cpsbs.decisions.keyed import answers_of, check_key, texts_of
from cpsbs.decisions.keys import Key
from cpsbs.estimation.arguments import Decode, checked_beams
from cpsbs.estimation.estimate import estimate
from cpsbs.estimation.result import Estimate, rounded_bound, with_error
from cpsbs.extras import required
from cpsbs.search.beams import Beams

if TYPE_CHECKING:
    import pandas

COLUMNS = ["source", "answer", "probability", "standard_error", "lower", "upper", "texts"]
"""The keys of ``Answers.to_rows``."""

ROUNDING = 1e-12
"""Less probability than this is rounding, and counts as none."""


def answers(
    beams: Beams | Sequence[Beams],
    key: Key = keys.text,
    *,
    decode: Decode | None = None,
    normalize: bool = False,
) -> Answers:
    """Return the distribution over answers of every source.

    Args:
        beams: the result of ``search`` by any design, or a list of independent ones. Beams without
            weights, such as those of beam search, give certain bounds only.
        key: maps a text to its answer, or to None if it gives none; see ``cpsbs.keys``.
        decode: a function from lists of tokens to texts, such as ``TextModel.decode``. Without it
            the key is given lists of tokens.
        normalize: whether to divide by the sum of the weights, as in ``estimate``.

    Raises:
        ValueError: if a source has no sequences, or the key fails, naming the sequence.

    Warns:
        WeightWarning: as ``estimate``.
    """
    several = checked_beams(beams)
    check_key(key)
    texts = [texts_of(several, b, decode) for b in range(len(several[0]))]
    found = [answers_of(b, own, key, decode is not None) for b, own in enumerate(texts)]
    order = [list(dict.fromkeys(table.values())) for table in found]
    indicator = _Indicators(found, order)
    given = several if len(several) > 1 else several[0]
    estimated = estimate(given, indicator, normalize=normalize)
    possible = getattr(key, "choices", None)
    return Answers(
        tuple(
            _ranked(b, order[b], table, texts[b] if decode else {}, estimated, possible)
            for b, table in enumerate(found)
        ),
        estimated,
        several,
        indicator,
    )


@dataclass(frozen=True)
class Answer:
    """One answer of a source."""

    answer: Any
    """What the key returned; None for sequences that give no answer."""
    probability: float
    """The estimate of P(answer); NaN from beams without weights."""
    standard_error: float | None
    """Its standard error; None if it is not known."""
    lower: float
    """P(answer) is certainly at least this: the probability of the sequences found."""
    upper: float
    """P(answer) is certainly at most this."""
    sequences: tuple[tuple[int, ...], ...]
    """The sequences that give this answer, as tokens, the most probable first."""
    texts: tuple[str, ...]
    """The same as texts; empty without ``decode``."""

    def __str__(self) -> str:
        value = (
            "?"
            if math.isnan(self.probability)
            else with_error(self.probability, self.standard_error)
        )
        low, high = rounded_bound(self.lower, math.floor), rounded_bound(self.upper, math.ceil)
        return f"{self.answer!r}: {value}, certainly in [{low}, {high}]"


@dataclass(frozen=True)
class SourceAnswers:
    """The answers of one source, the most probable first."""

    source: int
    """The number of the source."""
    answers: tuple[Answer, ...]
    entropy: float
    """The plug-in estimate of the entropy over answers, in nats; NaN from beams without weights. It
    is biased, usually downwards."""
    entropy_bounds: tuple[float, float]
    """Between these the entropy over answers certainly lies; the upper one is inf unless the key
    lists its answers."""
    unseen: float
    """The probability of the sequences that were not found."""

    @property
    def best(self) -> Answer:
        """The most probable answer."""
        return self.answers[0]

    @property
    def certain(self) -> bool:
        """Whether the best answer is certainly the most probable one of all."""
        others = [a.upper for a in self.answers[1:]]
        return self.best.lower > max([self.unseen, *others])

    def __str__(self) -> str:
        low, high = self.entropy_bounds
        until = "" if math.isinf(high) else f" and {high:.3g}"
        value = "not estimated" if math.isnan(self.entropy) else f"{self.entropy:.3g} nats, plug-in"
        bounds = f"at least {low:.3g}{until}" if not until else f"between {low:.3g}{until}"
        lines = [str(answer) for answer in self.answers]
        lines.append(f"entropy over answers {value}, certainly {bounds}")
        return "\n".join(lines)


class Answers(Sequence[SourceAnswers]):
    """The answers of every source; ``answers[b]`` are those of source b."""

    def __init__(
        self,
        sources: tuple[SourceAnswers, ...],
        estimated: Estimate,
        beams: list[Beams],
        indicator: _Indicators,
    ) -> None:
        self._sources, self._beams, self._indicator = sources, beams, indicator
        self.settings: Mapping[str, Any] = estimated.settings
        """How the beams were made; see ``Beams.settings``."""
        self._normalize = "normalised" in estimated.estimator

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, source: Any) -> Any:
        return self._sources[source]

    def __str__(self) -> str:
        if len(self) == 1:
            return str(self._sources[0])
        return "\n".join(f"[{own.source}]\n{own}" for own in self._sources)

    __repr__ = __str__

    def estimate(self, coefficients: Mapping[Any, float], source: int = 0) -> Estimate:
        """Return Σ_a c_a P(a) of a source, with its error and certain bounds.

        ``{"Paris": 1, "Lyon": -1}`` is the lead of one answer over another, whose error takes into
        account that both come from one beam. Answers that are not named count zero.
        """
        if not isinstance(coefficients, Mapping):
            raise ValueError(
                f"coefficients is {coefficients!r}; it must map answers to numbers, such as "
                "{'Paris': 1, 'Lyon': -1}"
            )
        return self._combination(source, [coefficients], [_name(coefficients)])

    def lead(self, source: int = 0) -> Estimate:
        """Return the lead of the best answer over the second, P(best) − P(second)."""
        own = self._sources[source].answers
        coefficients = {own[0].answer: 1.0}
        if len(own) > 1:
            coefficients[own[1].answer] = -1.0
        return self.estimate(coefficients, source)

    def covariance(self, source: int = 0) -> Tensor:
        """Return [n, n] the covariance of the errors of a source's answers, in their order.

        It comes from the variances of differences, Cov(a, b) = ½ (Var(a) + Var(b) − Var(a − b)),
        and is NaN where they are not known.
        """
        own = [answer.answer for answer in self._sources[source].answers]
        pairs = [(a, b) for i, a in enumerate(own) for b in own[i + 1 :]]
        terms = [{a: 1.0} for a in own] + [{a: 1.0, b: -1.0} for a, b in pairs]
        variance = self._combination(source, terms, ["answers"]).variance
        table = torch.full((len(own), len(own)), math.nan, dtype=torch.float64, device="cpu")
        if variance is None:
            return table
        flat = variance.reshape(-1).cpu()
        table.diagonal().copy_(flat[: len(own)])
        place = {answer: i for i, answer in enumerate(own)}
        for (a, b), difference in zip(pairs, flat[len(own) :], strict=True):
            i, j = place[a], place[b]
            table[i, j] = table[j, i] = (table[i, i] + table[j, j] - difference) / 2
        return table

    def _combination(
        self, source: int, terms: Sequence[Mapping[Any, float]], names: Sequence[str]
    ) -> Estimate:
        """Return the estimate of linear combinations of the answers' indicators."""
        source = range(len(self))[source]
        beams = [own[source] for own in self._beams]
        f = self._indicator.combined(source, terms, ", ".join(names))
        return estimate(beams if len(beams) > 1 else beams[0], f, normalize=self._normalize)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a dictionary for each answer of each source, with the keys of ``COLUMNS``."""
        return [
            {"source": own.source, **row}
            for own, entry in zip(self._sources, self.to_dicts(), strict=True)
            for row in entry["answers"]
        ]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return a dictionary of plain values for each source."""
        return [
            {
                "answers": [
                    {
                        "answer": a.answer,
                        "probability": None if math.isnan(a.probability) else a.probability,
                        "standard_error": a.standard_error,
                        "lower": a.lower,
                        "upper": a.upper,
                        "texts": list(a.texts),
                    }
                    for a in own.answers
                ],
                "entropy": None if math.isnan(own.entropy) else own.entropy,
                "entropy_bounds": [
                    own.entropy_bounds[0],
                    None if math.isinf(own.entropy_bounds[1]) else own.entropy_bounds[1],
                ],
                "unseen": own.unseen,
                "certain": own.certain,
                "settings": dict(self.settings),
            }
            for own in self._sources
        ]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a ``pandas.DataFrame`` with a row for each answer. Needs the extra ``pandas``."""
        frame: pandas.DataFrame = required("pandas", "pandas").DataFrame(
            self.to_rows(), columns=COLUMNS
        )
        return frame


class _Indicators:
    """f(y) = the vector of indicators of all answers, padded with zeros to the largest number."""

    name = "answers"
    bounds = (0.0, 1.0)

    def __init__(
        self, found: list[dict[tuple[int, ...], Hashable]], order: list[list[Hashable]]
    ) -> None:
        self._found = found
        self._place = [{answer: i for i, answer in enumerate(own)} for own in order]
        self._size = max(len(own) for own in order)

    def of_beams(self, beams: Beams, source: int, decode: Decode | None = None) -> Tensor:
        """Return [n, d] the indicators of the source's sequences."""
        places = [self._place[source][self._found[source][tuple(y)]] for y in beams.tokens(source)]
        index = torch.tensor(places, dtype=torch.int64, device="cpu")
        return torch.nn.functional.one_hot(index, self._size).to(torch.float64)

    def combined(
        self, source: int, terms: Sequence[Mapping[Any, float]], name: str
    ) -> _Combination:
        """Return the function whose components are linear combinations of indicators."""
        for unknown in (a for term in terms for a in term if a not in self._place[source]):
            raise ValueError(
                f"{unknown!r} is not among the answers that were found for source {source}: "
                f"{', '.join(map(repr, self._place[source]))}"
            )
        return _Combination(self._found[source], terms, name)


class _Combination:
    """f(y) = Σ_a c_a [key(y) = a], for one or more lists of coefficients c."""

    def __init__(
        self,
        found: Mapping[tuple[int, ...], Hashable],
        terms: Sequence[Mapping[Any, float]],
        name: str,
    ) -> None:
        self._found, self._terms, self.name = found, terms, name
        ends = [(min([0.0, *t.values()]), max([0.0, *t.values()])) for t in terms]
        self.bounds = tuple(zip(*ends, strict=True))

    def of_beams(self, beams: Beams, source: int, decode: Decode | None = None) -> Tensor:
        """Return [n] or [n, d] the values of the source's sequences."""
        own = [self._found[tuple(y)] for y in beams.tokens(source)]
        rows = [[term.get(answer, 0.0) for term in self._terms] for answer in own]
        table = torch.tensor(rows, dtype=torch.float64, device="cpu")
        table = table.reshape(len(rows), len(self._terms))
        return table[:, 0] if len(self._terms) == 1 else table


def _name(coefficients: Mapping[Any, float]) -> str:
    """Return how a linear combination of probabilities is printed."""
    parts = [
        f"{'−' if c < 0 else '+'} {'' if abs(c) == 1 else f'{abs(c):g} '}{a}"
        for a, c in coefficients.items()
    ]
    return " ".join(parts).removeprefix("+ ")


def _ranked(
    source: int,
    order: list[Hashable],
    found: Mapping[tuple[int, ...], Hashable],
    texts: Mapping[tuple[int, ...], str],
    estimated: Estimate,
    possible: Sequence[Any] | None,
) -> SourceAnswers:
    """Return the answers of a source, the most probable first, with their entropy."""
    assert estimated.bounds is not None
    count = len(order)
    value = estimated.value.reshape(len(estimated.value), -1)[source, :count].tolist()
    low, high = (end.reshape(len(end), -1)[source, :count].tolist() for end in estimated.bounds)
    errors: list[float] = [math.nan] * count
    if estimated.standard_error is not None:
        shaped = estimated.standard_error.reshape(len(estimated.value), -1)
        errors = shaped[source, :count].tolist()
    members: dict[Hashable, list[tuple[int, ...]]] = {}
    for y, answer in found.items():
        members.setdefault(answer, []).append(y)
    rows = [
        Answer(
            answer=answer,
            probability=value[i],
            standard_error=None if math.isnan(errors[i]) else errors[i],
            lower=low[i],
            upper=high[i],
            sequences=tuple(members[answer]),
            texts=tuple(texts[y] for y in members[answer]) if texts else (),
        )
        for i, answer in enumerate(order)
    ]
    unseen = 1 - math.fsum(low)
    if bool(estimated.exact[source]) or unseen < ROUNDING:
        unseen = 0.0
    rows.sort(key=lambda a: (-a.lower if math.isnan(a.probability) else -a.probability, -a.lower))
    least, most = entropy_bounds([a.lower for a in rows], unseen, _most(possible, order))
    return SourceAnswers(
        source=source,
        answers=tuple(rows),
        entropy=plug_in_entropy(value),
        entropy_bounds=(least, most),
        unseen=unseen,
    )


def _most(possible: Sequence[Any] | None, order: list[Hashable]) -> int | None:
    """Return how many different answers there can be, None included; None if nobody knows."""
    return None if possible is None else len({*possible, None, *order})
