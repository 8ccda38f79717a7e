"""Expectations from beams, with their uncertainty (§4 of the paper, and beyond it).

    G = Σ_{y ∈ Y} w(y) f(y) ,      w(y) = p(y) / π(y)                                    (eq:ht)

With π the product of inclusion probabilities along the path that the search took, G is *exactly
unbiased* for E_p f: P(path) / Π_t π_t is the law of the search that is forced to keep y at every
step (lem:decomposition), which sums to one over the paths, for every y. The paper, which takes
M = 1 of ``eq:is-good`` and so the same number, presents it as a consistent estimator only.
*Normalised* estimates divide by Σ w. They are biased; where the weights vary much, their error is
much smaller.

The expectation is under the distribution that was searched: processed, scaled by the temperature,
cut off at ``max_length``, where a sequence that has not ended counts as an outcome.

``uncertainty`` says how much one beam tells of its error; several independent ones always do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cpsbs.designs import Design
from cpsbs.estimation.uncertainty import one_beam_variance, student_quantile
from cpsbs.search.beams import Beams

AGREEMENT = 1e-14
"""Variances below this, relative to the square of the value, are the rounding of beams that agree;
log-probabilities are in float32."""

Decode = Callable[[Sequence[Sequence[int]]], list[str]]


@dataclass(frozen=True, eq=False, repr=False)
class Estimate:
    """An estimated expectation for each of B sources; print it to get a line for each."""

    value: Tensor
    """[B], or [B, d] if f is vector-valued."""
    variance: Tensor | None
    """Of the same shape: an estimate of Var[value]; it can be negative. None if it is not known."""
    freedom: Tensor
    """[B] degrees of freedom of the variance, for the interval; inf where none are counted."""
    distinct: Tensor
    """[B] how many different sequences it rests on."""
    effective_size: Tensor
    """[B] (Σ w)² / Σ w² over these sequences."""
    captured: Tensor
    """[B] Σ p(y) over these sequences."""
    sum_of_weights: Tensor
    """[B] Σ w, before normalisation: 1 in expectation, and a warning where it is far from it."""
    function: str
    """What was estimated."""
    estimator: str
    """How: the design's weights, normalised or not."""
    repeats: int
    """How many beams."""
    settings: Mapping[str, Any]
    """How the beams were made; see ``Beams.settings``."""
    made_by: Design | None = None
    """The design that made the beams, if they know it."""

    @property
    def standard_error(self) -> Tensor | None:
        """Of the shape of the value; NaN where the variance came out negative."""
        return None if self.variance is None else self.variance.sqrt()

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The ends of the confidence interval, by Student's t where the variance is a sample's."""
        if not 0 < level < 1:
            raise ValueError(f"level is {level}; allowed are numbers between 0 and 1")
        if self.standard_error is None:
            raise ValueError(
                f"one beam of {self.settings.get('design', 'this design')} does not tell its "
                f"error; estimate from a list of independent beams{self._hint(', or ')}"
            )
        half = [student_quantile((1 + level) / 2, df) for df in self.freedom.tolist()]
        error = self.standard_error
        wide = error.new_tensor(half).view(-1, *[1] * (error.ndim - 1)) * error
        return self.value - wide, self.value + wide

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        count = len(self.value)
        return "\n".join(self._line(b, f"[{b}]" if count > 1 else "") for b in range(count))

    def to_dicts(self) -> list[dict[str, Any]]:
        """For each source plain numbers, lists if f is vector-valued, and the line in print."""
        error = self.standard_error
        low, high = (None, None) if error is None else self.interval()
        return [
            {
                "function": self.function,
                "value": self.value[b].tolist(),
                "standard_error": _numbers(error, b),
                "interval_95": [_numbers(low, b), _numbers(high, b)],
                "distinct": int(self.distinct[b]),
                "effective_size": float(self.effective_size[b]),
                "captured": float(self.captured[b]),
                "sum_of_weights": float(self.sum_of_weights[b]),
                "estimator": self.estimator,
                "repeats": self.repeats,
                "settings": dict(self.settings),
                "line": self._line(b, ""),
            }
            for b in range(len(self.value))
        ]

    def _hint(self, before: str) -> str:
        """Return what would give an error bar from one beam of this design."""
        needs = self.made_by is not None and self.made_by.needs_joint and self.variance is None
        needs = needs and not self.estimator.startswith("given")
        return f"{before}search with joint=True (and k > 1)" if needs else ""

    def _line(self, b: int, where: str) -> str:
        values = self.value[b].reshape(-1).tolist()
        error = self.standard_error
        errors = [None] * len(values) if error is None else error[b].reshape(-1).tolist()
        numbers = ", ".join(map(with_error, values, errors))
        if self.value.ndim > 1:
            numbers = f"[{numbers}]"
        made = dict(self.settings)
        known = error is not None and bool(error[b].isfinite().all())
        how = [
            str(made.pop("design", "?")),
            f"K={made.pop('k', '?')}",
            *([f"{self.repeats} beams"] if self.repeats > 1 else []),
            self.estimator,
            f"{int(self.distinct[b])} distinct",
            f"ESS {float(self.effective_size[b]):.1f}",
            f"Σp {float(self.captured[b]):.3g}",
            f"Σw {float(self.sum_of_weights[b]):.3g}",
            *([] if known else ["error not known" + self._hint("; ")]),
            *(f"{name} {value}" for name, value in made.items() if value is not None),
        ]
        return f"E[{self.function}]{where} = {numbers} ({', '.join(how)})"


def estimate(
    beams: Beams | Sequence[Beams],
    f: Any,
    *,
    normalize: bool = False,
    log_inclusion: Any = None,
    decode: Decode | None = None,
    name: str | None = None,
) -> Estimate:
    """Estimate E_p f(y) for every source.

    Args:
        beams: from ``search``; or a list of independent ones, of the same kind, whose spread gives
            the standard error.
        f: a function of a sequence, given as a list of tokens, or, with ``decode``, as a text; it
            returns a number or a vector. Called once for each different sequence of a source. If
            it has an attribute ``batched`` that is true, it gets a list of sequences and returns a
            number or vector for each. Or a list with such a function for each source; or a function
            of ``cpsbs.functions``, or of the same form.
        normalize: divide by the sum of the weights.
        log_inclusion: [B, K] log π(y) to use instead of what the beams have, or an ``Inclusion``.
            There is no error bar then: it would have to tell the error of π too.
        decode: from lists of tokens to texts, such as
            ``partial(tokenizer.batch_decode, skip_special_tokens=True)``.
        name: what to call f in print.

    Raises:
        ValueError: if f fails, naming the sequence; or if the beams have no weights.
    """
    several: list[Beams] = [beams] if isinstance(beams, Beams) else []
    if isinstance(beams, list | tuple):
        several = list(beams)
    if not several or not all(isinstance(b, Beams) for b in several):
        raise ValueError("beams must be Beams, or a list of some that is not empty")
    _check_same(several)
    if isinstance(f, type):
        raise ValueError(f"f is the class {f.__name__}; give an object of it, {f.__name__}(...)")
    if isinstance(f, list | tuple) and len(f) != len(several[0]):
        raise ValueError(f"f is a list of {len(f)} functions for {len(several[0])} sources")
    log_inclusion = getattr(log_inclusion, "log_value", log_inclusion)
    if log_inclusion is not None and len(several) > 1:
        raise ValueError("log_inclusion belongs to one Beams, not to a list of them")
    log_weights = torch.stack([_log_weight(b, log_inclusion) for b in several])
    known: list[dict[tuple[int, ...], Tensor]] = [{} for _ in range(len(several[0]))]
    values = torch.stack([_values(f, b, known, decode) for b in several])
    # [B] what the weights are relative to: the product of many probabilities can be very small.
    unit = log_weights.amax((0, 2)).clamp(min=-1e300) if normalize else log_weights.new_zeros(1)
    weights = (log_weights - unit[:, None]).exp()
    total = (weights[..., None] * values).sum(2)
    norm = weights.sum(-1, keepdim=True)
    value = total.mean(0) / norm.mean(0) if normalize else total.mean(0)
    merged = [_merged(several, log_weights, b) for b in range(len(known))]
    captured = _on_cpu([sum(math.exp(p) for _, p in m.values()) for m in merged])
    if len(several) > 1:
        # Of the mean of R independent ones; of a ratio of means, by linearisation.
        error = (total - norm * value) / norm.mean(0) if normalize else total
        spread = error.var(0) / len(several)
        # Beams that agree do not tell how often others would not, unless they hold all there is.
        told = (spread > AGREEMENT * value.square()) | (
            captured.to(spread.device)[:, None] > 1 - 1e-9
        )
        variance: Tensor | None = torch.where(told, spread, math.nan)
        freedom = _on_cpu([float(len(several) - 1)] * len(known))
    elif log_inclusion is None:
        scale = norm[0] if normalize else None
        rest = values[0] - value[:, None] if normalize else values[0]
        variance, freedom = one_beam_variance(several[0], weights[0], rest, unit, scale)
    else:
        variance, freedom = None, _on_cpu([math.inf] * len(known))
    scalar = all(v.ndim == 0 for table in known for v in table.values())
    seeds = [b.settings.get("seed") for b in several]
    source = "unbiased weights" if log_inclusion is None else "given inclusion"
    return Estimate(
        value=value[:, 0] if scalar else value,
        variance=None if variance is None else (variance[:, 0] if scalar else variance),
        freedom=freedom,
        distinct=_on_cpu([len(m) for m in merged]),
        effective_size=_on_cpu([_effective_size([w for w, _ in m.values()]) for m in merged]),
        captured=captured,
        sum_of_weights=log_weights.exp().sum(-1).mean(0).cpu(),
        function=name or str(getattr(f, "name", getattr(f, "__name__", type(f).__name__))),
        estimator=source + (", normalised" if normalize else ""),
        repeats=len(several),
        settings={**several[0].settings, **({"seed": seeds} if len(several) > 1 else {})},
        made_by=several[0].made_by,
    )


def _check_same(several: Sequence[Beams]) -> None:
    """Refuse beams that cannot be averaged: they must be independent and of one kind."""
    if len({(b.design, b.k, len(b)) for b in several}) > 1:
        raise ValueError("beams of different designs, sizes or numbers of sources cannot be mixed")
    designs: list[Any] = [b.made_by for b in several]
    if None in designs:  # beams from elsewhere have the design's settings in print at most
        designs = [b.settings.get("design") for b in several]
    if any(design != designs[0] for design in designs):
        raise ValueError(
            f"beams made with different settings of design cannot be mixed: {designs}. A design "
            "that is no frozen dataclass is equal to itself only: pass one object to all searches"
        )
    for name in ("temperature", "nucleus", "max_length", "model"):
        made = [b.settings.get(name) for b in several]
        if any(value != made[0] for value in made):
            raise ValueError(
                f"beams made with different settings of {name} cannot be mixed: {made}"
            )
    seeds = [b.settings.get("seed") for b in several if b.settings.get("seed") is not None]
    if len(set(seeds)) < len(seeds):
        raise ValueError("two of the beams were drawn with the same seed: they are not independent")


def _log_weight(beams: Beams, log_inclusion: Tensor | None) -> Tensor:
    if log_inclusion is None:
        if beams.log_weight is None:
            raise ValueError(
                f"the design {beams.design!r} has no inclusion probabilities, so its beams cannot "
                "estimate an expectation; search with one that has, such as 'stratified'"
            )
        return beams.log_weight
    if log_inclusion.shape != beams.log_prob.shape:
        raise ValueError(
            f"log_inclusion has the shape {list(log_inclusion.shape)}; "
            f"it must be [B, K] = {list(beams.log_prob.shape)}"
        )
    missing = beams.present & ~(log_inclusion.isfinite() & (log_inclusion <= 1e-9))
    if bool(missing.any()):
        b, i = missing.nonzero()[0].tolist()
        raise ValueError(
            f"log_inclusion is {float(log_inclusion[b, i])} for sequence {i} of source {b}: "
            "a sequence without an inclusion probability, finite and at most 0 as a logarithm, "
            "cannot be weighted"
        )
    return torch.where(beams.present, beams.log_prob - log_inclusion, -math.inf)


def _values(
    f: Any,
    beams: Beams,
    known: list[dict[tuple[int, ...], Tensor]],
    decode: Decode | None,
) -> Tensor:
    """[B, K, d] f of every sequence, zero in empty places; ``known`` is what f was for each."""
    rows: list[list[Tensor]] = []
    for b, table in enumerate(known):
        tokens = [tuple(y) for y in beams.tokens(b)]
        g = f[b] if isinstance(f, list | tuple) else f
        if hasattr(g, "of_beams"):
            found = g.of_beams(beams, b, decode).to(torch.float64)
            table.update(zip(tokens, found, strict=True))
        else:
            new = [y for y in dict.fromkeys(tokens) if y not in table]
            table.update(zip(new, _called(g, new, b, decode), strict=True))
        rows.append([_checked(table[y], y, b) for y in tokens])
    sizes = {v.numel() for row in rows for v in row}
    if len(sizes) > 1:
        raise ValueError(f"f returned vectors of different lengths: {sorted(sizes)}")
    out = beams.log_prob.new_zeros((*beams.log_prob.shape, *(sizes or {1})))
    for b, row in enumerate(rows):
        if row:
            out[b, beams.present[b]] = torch.stack([v.reshape(-1) for v in row]).to(out)
    return out


def _called(
    f: Any, sequences: list[tuple[int, ...]], source: int, decode: Decode | None
) -> list[Tensor]:
    tokens = [list(y) for y in sequences]
    if not tokens:  # a tokenizer may decode no sequences to one empty text
        return []
    arguments: Sequence[Any] = tokens if decode is None else decode(tokens)
    if len(arguments) != len(tokens):
        raise ValueError(
            f"decode returned {len(arguments)} texts for {len(tokens)} sequences of source {source}"
        )
    groups = [list(arguments)] if getattr(f, "batched", False) else arguments
    results: list[Any] = []
    for i, argument in enumerate(groups):
        try:
            results.append(f(argument))
        except Exception as error:
            which = "sequences" if groups is not arguments else f"sequence {tokens[i]}"
            hint = "" if decode else " (it got tokens; for texts, pass decode)"
            raise ValueError(
                f"f failed on the {which} of source {source}: {type(error).__name__}: {error}{hint}"
            ) from error
    if groups is not arguments:
        results = list(results[0])
        if len(results) != len(arguments):
            raise ValueError(
                f"f is batched and returned {len(results)} values for {len(arguments)} sequences"
            )
    try:
        return [torch.as_tensor(r, dtype=torch.float64, device="cpu") for r in results]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"f must return numbers or vectors of numbers; it returned {results[0]!r}"
        ) from error


def _checked(value: Tensor, sequence: tuple[int, ...], source: int) -> Tensor:
    if value.ndim > 1:
        raise ValueError(
            f"f returned the shape {list(value.shape)}; allowed are numbers and vectors"
        )
    if not bool(value.isfinite().all()):
        raise ValueError(
            f"f is {value.tolist()} on the sequence {list(sequence)} of source {source}; "
            "it must be finite"
        )
    return value


def _merged(
    several: Sequence[Beams], log_weights: Tensor, source: int
) -> dict[tuple[int, ...], tuple[float, float]]:
    """Relative weight and log p of every different sequence of a source."""
    merged: dict[tuple[int, ...], tuple[float, float]] = {}
    relative = (log_weights[:, source] - log_weights[:, source].amax().clamp(min=-1e300)).exp()
    for beams, weight in zip(several, relative, strict=True):
        here = beams.present[source]
        w = weight[here].tolist()
        log_p = beams.log_prob[source][here].tolist()
        for y, wy, py in zip(beams.tokens(source), w, log_p, strict=True):
            before = merged.get(tuple(y), (0.0, py))[0]
            merged[tuple(y)] = (before + wy, py)
    return merged


def _on_cpu(values: Sequence[float]) -> Tensor:
    """[n] as a tensor on the CPU, whatever torch's default device is."""
    return torch.tensor(values, device="cpu")


def _effective_size(weights: Sequence[float]) -> float:
    square = sum(w * w for w in weights)
    return sum(weights) ** 2 / square if square > 0 else 0.0


def _numbers(x: Tensor | None, b: int) -> Any:
    """Of source b; None where it is not known."""
    return None if x is None or not bool(x[b].isfinite().all()) else x[b].tolist()


def with_error(value: float, error: float | None) -> str:
    """Value ± error, to two digits of the error."""
    if error is None or not math.isfinite(error):
        return f"{value:.4g}"
    digits = 4 if error == 0 else min(8, max(0, 1 - math.floor(math.log10(error))))
    return f"{value:.{digits}f} ± {error:.{digits}f}"
