"""Computes the statistics of figures and tables: means, deviations, errors, trade-offs."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cpsbs.experiments.plan import Scale
from cpsbs.experiments.store import Row

ALWAYS_PLAIN = ("independent", "arithmetic", "sum-and-sample")
"""Estimators that are never normalised: their weights sum to one, or it does not help."""


@dataclass(frozen=True)
class Spread:
    """The mean and standard deviation of independent repeats."""

    mean: float
    deviation: float
    count: int


@dataclass(frozen=True)
class Truth:
    """The baseline estimate for a sentence at a temperature."""

    value: float
    variance: float
    """The variance of one run of the baseline."""


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows grouped by the values of these columns."""
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[tuple(row[name] for name in names)].append(row)
    return dict(found)


class Estimates:
    """The estimates of one function by all designs, with the baseline as truth."""

    def __init__(self, rows: Iterable[Row], scale: Scale, f: str, normalized: bool) -> None:
        mine = [row for row in rows if "f" in row and row["f"] == f]
        baseline = [
            row
            for row in mine
            if row["k"] == scale.baseline_size
            and row["design"] == "independent"
            and not row["normalized"]
        ]
        self.truth = {
            key: _truth([row["value"] for row in some])
            for key, some in grouped(baseline, "line", "temperature").items()
        }
        compared = [
            row
            for row in mine
            if row["k"] in scale.sizes
            and row["normalized"] == (normalized and row["design"] not in ALWAYS_PLAIN)
        ]
        groups = grouped(compared, "line", "temperature", "k", "design", "nucleus")
        self._values = {key: [row["value"] for row in some] for key, some in groups.items()}
        self.spread = {key: _spread(values) for key, values in self._values.items()}

    def rmse(self) -> dict[tuple[float, int, str], float]:
        """Return the root mean square error by temperature, K and design, without truncation.

        It is averaged over the sentences.
        """
        errors: dict[tuple[float, int, str], list[float]] = defaultdict(list)
        for (line, temperature, k, design, nucleus), values in self._values.items():
            if nucleus is None and (line, temperature) in self.truth:
                true = self.truth[line, temperature].value
                square = statistics.fmean((value - true) ** 2 for value in values)
                errors[temperature, k, design].append(math.sqrt(square))
        return {key: statistics.fmean(some) for key, some in errors.items()}


def _spread(values: list[float]) -> Spread:
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return Spread(statistics.fmean(values), deviation, len(values))


def _truth(values: list[float]) -> Truth:
    spread = _spread(values)
    return Truth(spread.mean, spread.deviation**2)


@dataclass(frozen=True)
class TradeOff:
    """The diversity and BLEU of sets of translations, averaged over the sentences."""

    diversity: float
    least: float
    mean: float
    most: float
    sentences: int


def trade_offs(rows: Iterable[Row]) -> dict[tuple[int, str, float], TradeOff]:
    """Return trade-offs by K, design, and temperature (strength, for diverse beam search)."""
    found = {}
    mine = [row for row in rows if "diversity" in row]
    for (k, design, temperature, strength), some in grouped(
        mine, "k", "design", "temperature", "strength"
    ).items():

        def mean(name: str, some: list[Row] = some) -> float:
            return statistics.fmean(row[name] for row in some)

        found[k, design, temperature if strength is None else strength] = TradeOff(
            mean("diversity"), mean("min"), mean("mean"), mean("max"), len(some)
        )
    return found


def runtimes(rows: Iterable[Row]) -> dict[tuple[str, str, int], float]:
    """Return seconds per sentence by device, design and K: the mean of the sentences' medians."""
    found = {}
    mine = [row for row in rows if "seconds" in row]
    for key, some in grouped(mine, "device", "design", "k").items():
        by_line = grouped(some, "line").values()
        medians = [statistics.median(row["seconds"] for row in line) for line in by_line]
        found[key] = statistics.fmean(medians)
    return found


def hindsight_deviation(rows: Iterable[Row]) -> dict[tuple[float, bool, int], float]:
    """Return the deviation of expected BLEU by temperature, normalisation, and M (0: own path)."""
    mine = [row for row in rows if "runs" in row and "normalized" in row]
    by_line = grouped(mine, "temperature", "normalized", "runs", "line")
    return _means(by_line, lambda some: statistics.stdev(row["value"] for row in some))


def inclusion_error(rows: Iterable[Row]) -> dict[tuple[float, int], float]:
    """Return the root mean square of log π̂ − log π by temperature and M (0: own path)."""
    mine = [row for row in rows if "truth" in row]

    def error(some: list[Row]) -> float:
        return math.sqrt(
            statistics.fmean(math.log(row["value"] / row["truth"]) ** 2 for row in some)
        )

    return {key: error(some) for key, some in grouped(mine, "temperature", "runs").items()}


def _means(
    groups: Mapping[tuple[Any, ...], list[Row]], measure: Callable[[list[Row]], float]
) -> dict[Any, float]:
    """Return the mean of a measure over all groups whose keys differ in the last part only."""
    found: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for key, some in groups.items():
        found[key[:-1]].append(measure(some))
    return {key: statistics.fmean(values) for key, values in found.items()}
