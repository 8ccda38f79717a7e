"""The result of ``estimate``: a value for each source, with its error, as one immutable object."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cpsbs.estimation.uncertainty import mean_variance, student_quantile


@dataclass(frozen=True, eq=False, repr=False)
class Estimate:
    """An estimated expectation for each of B sources.

    Printing it gives a line for each source that can be pasted into a report: the value with its
    standard error, and all that is needed to compute it again.
    """

    value: Tensor
    """[B] the estimates, or [B, d] if f is vector-valued; NaN from beams without weights, which
    have ``bounds`` only."""
    variance: Tensor | None
    """Estimates of Var[value], of the same shape: 0 where the value is exact, NaN where the error
    is not known, and sometimes negative. None if the error of no source is known."""
    freedom: Tensor
    """[B] the degrees of freedom of the variance, for the interval; inf if it is not a sample
    variance."""
    exact: Tensor
    """[B] whether nothing was left out: every beam holds all sequences that there are (Σp = 1 to
    rounding) and weights each by its probability. The value then has no error."""
    distinct: Tensor
    """[B] the number of different sequences that the value rests on."""
    effective_size: Tensor
    """[B] the effective sample size, (Σ w)² / Σ w² over these sequences."""
    captured: Tensor
    """[B] Σ p(y) over these sequences."""
    sum_of_weights: Tensor
    """[B] Σ w before normalisation, whose expectation is 1; ``estimate`` warns where it is far from
    that."""
    function: str
    """The name of f."""
    estimator: str
    """Which weights were used, and whether they were normalised."""
    repeats: int
    """The number of independent beams of each source."""
    settings: Mapping[str, Any]
    """How the beams were made; see ``Beams.settings``."""
    advice: str = ""
    """What to do to get an error bar where the error is not known."""
    mean_of: int = 1
    """The number of sources that each value is a mean over: 1 unless this comes from ``mean``."""
    errors_known: int = 1
    """Of a mean: the number of these sources whose own error is known."""
    lower: Tensor | None = None
    """The lower end of ``bounds``, of the shape of the value."""
    upper: Tensor | None = None
    """The upper end of ``bounds``."""

    @property
    def standard_error(self) -> Tensor | None:
        """The standard errors, of the shape of the value; NaN where they are not known.

        None if the error of no source is known.
        """
        return None if self.variance is None else self.variance.sqrt()

    @property
    def bounds(self) -> tuple[Tensor, Tensor] | None:
        """Lower and upper bounds of the expectation that are certain, on the CPU.

        They follow from the exact probabilities of the sequences that were found; see
        ``cpsbs.estimation.bounds``. None if it is not known between which bounds f lies.
        """
        return None if self.lower is None or self.upper is None else (self.lower, self.upper)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the ends of the confidence interval, with Student's t for a sample variance.

        Where there are certain bounds, the interval is cut to them; where the error is not known,
        they are the interval.
        """
        if not 0 < level < 1:
            raise ValueError(f"level is {level}; it must be between 0 and 1")
        error = self.standard_error
        if error is None and self.bounds is None:
            raise ValueError(
                f"one beam of {self.settings.get('design', 'this design')} does not tell its "
                f"error{self.advice and '; '}{self.advice}"
            )
        if error is None:
            error = torch.full_like(self.value, math.nan)
        half = student_quantile((1 + level) / 2, self.freedom)
        wide = half.to(error).view(-1, *[1] * (error.ndim - 1)) * error
        ends = self.value - wide, self.value + wide
        if self.bounds is None:
            return ends
        low, high = (end.to(self.value) for end in self.bounds)
        # An estimate may lie outside the bounds; both ends are then the nearer bound.
        cut = [torch.minimum(torch.maximum(end, low), high) for end in ends]
        return cut[0].where(~cut[0].isnan(), low), cut[1].where(~cut[1].isnan(), high)

    def mean(self) -> Estimate:
        """Return the mean over the sources, with its error, as an estimate of one source.

        The value is the mean of all B values. Beams of different sources are drawn independently,
        so that its variance is Σ_b v_b / B². The error is that of the sampling: the sources are
        taken as given, not as a sample of others.

        A source whose error is not known does not spoil the rest. It is taken to have the average
        variance of the sources whose error is known and that are not exact, and the printed line
        says "error from n of B sources". If there is no such source, the error of the mean is not
        known. ``distinct`` is the sum over the sources, ``captured`` and ``sum_of_weights`` are
        means, and ``effective_size`` is B² / Σ_b (1 / ESS_b). The mean of certain bounds is certain
        too.
        """
        count = len(self.value)
        if count == 1:
            return self
        variance, freedom, known = mean_variance(self.variance, self.freedom, self.exact)
        return replace(
            self,
            value=self.value.mean(0, keepdim=True),
            variance=variance,
            freedom=freedom,
            exact=self.exact.all(0, keepdim=True),
            distinct=self.distinct.sum(0, keepdim=True),
            effective_size=count**2 / self.effective_size.reciprocal().sum(0, keepdim=True),
            captured=self.captured.mean(0, keepdim=True),
            sum_of_weights=self.sum_of_weights.mean(0, keepdim=True),
            mean_of=count,
            errors_known=known,
            lower=None if self.lower is None else self.lower.mean(0, keepdim=True),
            upper=None if self.upper is None else self.upper.mean(0, keepdim=True),
        )

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        count = len(self.value)
        return "\n".join(self._line(b, f"[{b}]" if count > 1 else "") for b in range(count))

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return a dictionary of plain numbers for each source, lists if f is vector-valued.

        ``value`` is None for beams without weights. ``variance`` and ``standard_error`` are None
        where the error is not known, and so are the ends of ``interval_95`` unless there are
        ``bounds``; the variance alone may be there and negative. If ``exact`` is true, the standard
        error is 0.0 and both ends are the value. ``bounds`` has the two ends of the certain bounds,
        None where they are infinite, or is None if there are none. ``degrees_of_freedom`` is None
        unless the variance is a sample variance. ``line`` is the printed line. A mean over sources
        has ``mean_of`` and ``errors_known`` too.
        """
        error = self.standard_error
        low, high = (None, None)
        if error is not None or self.bounds is not None:
            low, high = self.interval()
        averaged = {"mean_of": self.mean_of, "errors_known": self.errors_known}
        return [
            {
                "function": self.function,
                "value": _numbers(self.value, b),
                "variance": _numbers(self.variance, b),
                "standard_error": _numbers(error, b),
                "exact": bool(self.exact[b]),
                "degrees_of_freedom": _numbers(self.freedom, b),
                "interval_95": [_numbers(low, b), _numbers(high, b)],
                "bounds": None
                if self.bounds is None
                else [_numbers(self.lower, b), _numbers(self.upper, b)],
                "distinct": int(self.distinct[b]),
                "effective_size": float(self.effective_size[b]),
                "captured": float(self.captured[b]),
                "sum_of_weights": float(self.sum_of_weights[b]),
                "estimator": self.estimator,
                "repeats": self.repeats,
                "settings": dict(self.settings),
                "line": self._line(b, ""),
                **(averaged if self.mean_of > 1 else {}),
            }
            for b in range(len(self.value))
        ]

    @staticmethod
    def from_dicts(entries: Iterable[Mapping[str, Any]]) -> Estimate:
        """Return the estimate that the dictionaries of ``to_dicts``, one for each source, describe.

        The sources may come from several estimates of the same function with the same settings.
        """
        found = list(entries)
        if not found:
            raise ValueError("entries is empty; it must have at least one source")

        def column(name: str, missing: Any = math.nan) -> Tensor:
            values = [missing if entry[name] is None else entry[name] for entry in found]
            return torch.tensor(values, dtype=torch.float64, device="cpu")

        def end(which: int, missing: float) -> Tensor | None:
            pairs = [entry["bounds"] for entry in found if entry.get("bounds") is not None]
            if len(pairs) < len(found):
                return None
            ends = [missing if pair[which] is None else pair[which] for pair in pairs]
            return torch.tensor(ends, dtype=torch.float64, device="cpu")

        known = any(entry["variance"] is not None for entry in found)
        lower, upper = end(0, -math.inf), end(1, math.inf)
        first = found[0]
        if lower is not None and all(entry["value"] is None for entry in found):
            value = torch.full_like(lower, math.nan)  # of beams without weights
        else:
            value = column("value")
        unknown = torch.full_like(value[0], math.nan).tolist()
        return Estimate(
            lower=lower,
            upper=upper,
            value=value,
            variance=column("variance", unknown) if known else None,
            freedom=column("degrees_of_freedom", math.inf),
            exact=column("exact").bool(),
            distinct=column("distinct").long(),
            effective_size=column("effective_size"),
            captured=column("captured"),
            sum_of_weights=column("sum_of_weights"),
            function=first["function"],
            estimator=first["estimator"],
            repeats=first["repeats"],
            settings=first["settings"],
        )

    @staticmethod
    def joined(estimates: Sequence[Estimate]) -> Estimate:
        """Return one estimate with the sources of all of these, in their order.

        They must be of the same function, with the same settings.
        """
        if not estimates:
            raise ValueError("estimates is empty; it must have at least one estimate")

        def every(name: str) -> Tensor:
            return torch.cat([getattr(part, name) for part in estimates])

        def unless_missing(name: str) -> Tensor | None:
            return None if any(getattr(p, name) is None for p in estimates) else every(name)

        variances = [
            torch.full_like(part.value, math.nan) if part.variance is None else part.variance
            for part in estimates
        ]
        return replace(
            estimates[0],
            value=every("value"),
            variance=None if all(p.variance is None for p in estimates) else torch.cat(variances),
            lower=unless_missing("lower"),
            upper=unless_missing("upper"),
            freedom=every("freedom"),
            exact=every("exact"),
            distinct=every("distinct"),
            effective_size=every("effective_size"),
            captured=every("captured"),
            sum_of_weights=every("sum_of_weights"),
        )

    def _line(self, b: int, number: str) -> str:
        """Return the line of a source, with its number in brackets if there are several."""
        made = dict(self.settings)
        label = f"E[{self.function}]{number}"
        if self.mean_of > 1:
            label = f"mean E[{self.function}] over {self.mean_of} sources"
        how = [
            str(made.pop("design", "?")),
            f"K={made.pop('k', '?')}",
            *([f"{self.repeats} beams"] if self.repeats > 1 else []),
            self.estimator,
            f"{int(self.distinct[b])} distinct",
            *([f"ESS {float(self.effective_size[b]):.1f}"] if self._weighted(b) else []),
            f"Σp {float(self.captured[b]):.3g}",
            *([f"Σw {float(self.sum_of_weights[b]):.3g}"] if self._weighted(b) else []),
            *self._notes(b),
            *(f"{name} {value}" for name, value in made.items() if value is not None),
        ]
        return f"{label} = {self._number(b)}{self._certain(b)} ({', '.join(how)})"

    def _number(self, b: int) -> str:
        """Return the value of a source with its error, as it is printed."""
        values, error = self.value[b].reshape(-1).tolist(), self.standard_error
        if all(map(math.isnan, values)):
            return "not estimated"
        if bool(self.exact[b]) and self.value.ndim > 1:
            return f"[{', '.join(f'{value:.6g}' for value in values)}] exactly"
        errors = [None] * len(values) if error is None else error[b].reshape(-1).tolist()
        shown = ", ".join(map(with_error, values, errors))
        return f"[{shown}]" if self.value.ndim > 1 else shown

    def _certain(self, b: int) -> str:
        """Return the certain bounds of a source as they are printed; nothing if they say nothing.

        They are rounded outwards.
        """
        if self.bounds is None or bool(self.exact[b]) or self.value.ndim > 1:
            return ""
        low, high = (float(end[b]) for end in self.bounds)
        if math.isinf(low) and math.isinf(high):
            return ""
        if math.isinf(high):
            return f", certainly at least {rounded_bound(low, math.floor)}"
        if math.isinf(low):
            return f", certainly at most {rounded_bound(high, math.ceil)}"
        return (
            f", certainly in [{rounded_bound(low, math.floor)}, {rounded_bound(high, math.ceil)}]"
        )

    def _weighted(self, b: int) -> bool:
        """Return whether the beams of a source have weights."""
        return float(self.sum_of_weights[b]) > 0

    def _notes(self, b: int) -> list[str]:
        """Return remarks on the error of a source, for its line."""
        if not self._weighted(b):
            return [self.advice] if self.advice else []
        error = self.standard_error
        if error is None or not bool(error[b].isfinite().all()):
            return ["error not known" + (f" ({self.advice})" if self.advice else "")]
        if self.errors_known < self.mean_of:
            return [f"error from {self.errors_known} of {self.mean_of} sources"]
        return []


def rounded_bound(value: float, direction: Callable[[float], int]) -> str:
    """Return a number with four digits, rounded down or up."""
    if abs(value) < 1e-300:
        return "0" if value == 0 or (value > 0) == (direction is math.floor) else f"{value:.4g}"
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - 3)
    return f"{direction(round(value / unit, 6)) * unit:.4g}"


def with_error(value: float, error: float | None) -> str:
    """Return "value ± error" to two digits of the error, "value exactly", or the value alone."""
    if error is None or not math.isfinite(error):
        return f"{value:.4g}"
    if error == 0:
        return f"{value:.6g} exactly"
    digits = min(8, max(0, 1 - math.floor(math.log10(error))))
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def _numbers(x: Tensor | None, b: int) -> Any:
    """Return the numbers of source b, or None where they are not known."""
    return None if x is None or not bool(x[b].isfinite().all()) else x[b].tolist()
