"""Bias and variance of gradient estimates, exactly, on the toy of Kool et al. (2020).

    python -m benchmarks.gradients [--pages FILE …]

Three bits are one with probability σ(η) each, and f is a sum of squares; the gradient of E f by η
is −0.0450 at η = 0, where all eight outcomes are equally probable, and −0.00318 at η = −4, where
one of them has 95% of the probability. For every estimator all beams of K outcomes are enumerated
with their probabilities (``tests.laws``), ``cpsbs.risk`` is differentiated for each, and mean and
variance of the gradients are summed up: nothing is sampled. K is the number of times f is
evaluated, so that "cross" has two beams of K/2. Ties between outcomes are broken at random.

Results go to ``benchmarks/results/gradients.json``, the figure to ``docs/gradients.svg``.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.tables import into_readme, table
from cpsbs import TableModel
from cpsbs.decisions.baselines import FEWEST
from cpsbs.experiments.figures import PLOT, STYLES, image
from cpsbs.extras import required
from tests import laws
from tests.exact import paths, poisson_rule

ROOT = Path(__file__).parents[1]
ETAS = (0.0, -4.0)
SIZES = range(1, 9)
ZERO = 1e-11
"""What is smaller is rounding error."""


class Toy:
    """The toy at one η, with the laws of all designs."""

    def __init__(self, eta: float) -> None:
        self.eta = eta
        self.outcomes, self.f, self.score, _ = laws.bernoulli_toy(eta)
        p = self.outcomes.p
        self.expectation = float((p * self.f).sum())
        self.truth = float((p * self.f * self.score[:, 0]).sum())
        self._known: dict[tuple[str, int], laws.Law] = {}

    def law(self, design: str, k: int) -> laws.Law:
        """Return the law of the beams of a design."""
        if (design, k) not in self._known:
            self._known[design, k] = self._made(design, k)
        return self._known[design, k]

    def _made(self, design: str, k: int) -> laws.Law:
        outcomes = self.outcomes
        if design == "independent":
            return laws.independent(outcomes, k)
        if design == "gumbel-top-k":
            return laws.gumbel(outcomes, k)
        if design == "stratified":
            return laws.stratified(outcomes, k, laws.rankings(outcomes, k))
        if design == "sum-and-sample":
            return laws.sum_and_sample(outcomes, k, laws.rankings(outcomes, k - 1))
        model = TableModel({(): outcomes.p.tolist()}, 0)
        every = paths(model, k, 1, poisson_rule(lambda p: p / (1 - p)))
        return laws.from_paths(outcomes, every, k, design)

    def risk(self, design: str, k: int, baseline: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Return the probability and the gradient of every beam, by ``cpsbs.risk``."""
        law = self.law(design, k)
        return law.probability, laws.gradients(law, self.f, self.score, baseline, **options)

    def crossed(self, design: str, k: int) -> tuple[Tensor, Tensor]:
        """Return them for two independent beams of K/2, each the baseline of the other."""
        both = laws.pairs(self.law(design, k // 2))
        return both[0].probability, laws.gradients(both, self.f, self.score, "cross")


@dataclass(frozen=True)
class Estimator:
    """A way to estimate a gradient from K evaluations of f."""

    name: str
    design: str
    made: Callable[[Toy, int], tuple[Tensor, Tensor]]
    unbiased: bool = True
    sizes: tuple[int, ...] = tuple(SIZES)
    finite_from: int = 1
    """The smallest K with a finite variance."""
    drawn: str = ""
    """How its line is drawn; not at all if empty."""


def plain(design: str, baseline: Any, **options: Any) -> Callable[[Toy, int], Any]:
    """Return what an estimator of one beam makes of a toy and K."""
    return lambda toy, k: toy.risk(design, k, baseline, **options)


def fixed(design: str) -> Callable[[Toy, int], Any]:
    """Return the same with the baseline E f, as if it were known beforehand."""
    return lambda toy, k: toy.risk(design, k, toy.expectation)


ABOVE_ONE, EVEN = (2, 3, 4, 5, 6, 7, 8), (2, 4, 6, 8)
SBS, POISSON = "gumbel-top-k", "conditional-poisson"
ESTIMATORS = [
    Estimator("REINFORCE", "independent", plain("independent", "none"), drawn=":"),
    Estimator("RLOO", "independent", plain("independent", "loo"), sizes=ABOVE_ONE, drawn="-"),
    Estimator("independent, b = E f", "independent", fixed("independent")),
    Estimator("SBS", SBS, plain(SBS, "none"), finite_from=2),
    Estimator(
        "SBS, loo",
        SBS,
        plain(SBS, "loo"),
        True,
        ABOVE_ONE,
        finite_from=FEWEST["gumbel-top-k"],
        drawn="-",
    ),
    Estimator(
        "SBS, normalised", SBS, plain(SBS, "auto", normalize=True), False, ABOVE_ONE, drawn="--"
    ),
    Estimator(
        "unordered set",
        "unordered set",
        lambda toy, k: laws.unordered_set(toy.outcomes, k, toy.f, toy.score),
        sizes=ABOVE_ONE,
        drawn="-",
    ),
    Estimator("conditional Poisson", POISSON, plain(POISSON, "none")),
    Estimator(
        "conditional Poisson, loo", POISSON, plain(POISSON, "loo"), sizes=ABOVE_ONE, drawn="-"
    ),
    Estimator("stratified", "stratified", plain("stratified", "none")),
    Estimator(
        "stratified, cross",
        "stratified",
        lambda toy, k: toy.crossed("stratified", k),
        sizes=EVEN,
        drawn="-.",
    ),
    Estimator("stratified, b = E f", "stratified", fixed("stratified"), drawn="-"),
    Estimator(
        "stratified, own", "stratified", plain("stratified", "own"), False, ABOVE_ONE, drawn="--"
    ),
    Estimator("sum-and-sample", "sum-and-sample", plain("sum-and-sample", "none")),
    Estimator("sum-and-sample, b = E f", "sum-and-sample", fixed("sum-and-sample"), drawn="-"),
]


def measured() -> dict[str, Any]:
    """Return bias and standard deviation of every estimator, η and K.

    The standard deviation is None where it is infinite.
    """
    toys = [Toy(eta) for eta in ETAS]
    rows = []
    for toy in toys:
        for estimator in ESTIMATORS:
            for k in estimator.sizes:
                probability, gradient = estimator.made(toy, k)
                mean = float((probability * gradient[:, 0]).sum())
                variance = float((probability * (gradient[:, 0] - mean).square()).sum())
                finite = k >= estimator.finite_from or k == max(SIZES)
                row = {
                    "eta": toy.eta,
                    "estimator": estimator.name,
                    "k": k,
                    "bias": _rounded(mean - toy.truth),
                    "deviation": _rounded(math.sqrt(variance)) if finite else None,
                }
                rows.append(row)
    return {"truth": {f"{toy.eta:g}": _rounded(toy.truth) for toy in toys}, "rows": rows}


def _rounded(x: float) -> float:
    """Return x with nine digits, or 0 for rounding error."""
    return float(f"{x:.9g}") if abs(x) > ZERO else 0.0


def tables(results: dict[str, Any]) -> dict[str, list[dict[str, object]]]:
    """Standard deviations by estimator and K for each η, and the biases that there are."""
    names = list(dict.fromkeys(row["estimator"] for row in results["rows"]))
    known = {(row["eta"], row["estimator"], row["k"]): row for row in results["rows"]}
    found: dict[str, list[dict[str, object]]] = {}
    for eta, title in zip(ETAS, ("gradients", "gradients_peaked"), strict=True):
        found[title] = [
            {"K": name, **{str(k): _shown(known.get((eta, name, k)), "deviation") for k in SIZES}}
            for name in names
        ]
    found["gradients_bias"] = [
        {
            "K": f"{e.name}, η = {eta:g}".replace("η = -", "η = −"),
            **{str(k): _shown(known.get((eta, e.name, k)), "bias") for k in e.sizes},
        }
        for eta in ETAS
        for e in ESTIMATORS
        if not e.unbiased
    ]
    return found


def _shown(row: dict[str, Any] | None, name: str) -> str:
    if row is None:
        return ""
    return "∞" if row[name] is None else f"{row[name]:.2g}"


def figure(results: dict[str, Any]) -> bytes:
    """Return the figure as SVG: the error against K, a panel for each η."""
    matplotlib: Any = required("matplotlib", "plots")
    matplotlib.use("agg")
    pyplot: Any = required("matplotlib.pyplot", "plots")
    styles = STYLES | {"unordered set": ("#000000", "x")}
    with matplotlib.rc_context(PLOT):
        made, axes = pyplot.subplots(1, len(ETAS), figsize=(9.0, 3.8))
        pyplot.close(made)
        for axis, eta in zip(axes, ETAS, strict=True):
            for estimator in (e for e in ESTIMATORS if e.drawn):
                own = [
                    (row["k"], math.hypot(row["deviation"], row["bias"]))
                    for row in results["rows"]
                    if (row["eta"], row["estimator"]) == (eta, estimator.name)
                    and row["deviation"] is not None
                ]
                colour, marker = styles[estimator.design]
                axis.plot(
                    [k for k, _ in own],
                    [error or math.nan for _, error in own],  # no zeros on this axis
                    color=colour,
                    marker=marker,
                    linestyle=estimator.drawn,
                    label=estimator.name + ("" if estimator.unbiased else " (biased)"),
                )
            axis.set_yscale("log")
            axis.minorticks_off()
            axis.set_xticks(list(SIZES))
            axis.set_xlabel("K, evaluations of f")
            axis.set_title(f"η = {eta:g}".replace("-", "−"))
        axes[0].set_ylabel("root mean square error of the gradient")
        handles, labels = axes[0].get_legend_handles_labels()
        made.legend(handles, labels, loc="outside lower center", ncols=4)
    return image(made, "svg")


def main() -> None:
    """Compute, write and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/gradients.json")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs/gradients.svg")
    parser.add_argument("--pages", type=Path, nargs="*", default=[], help="with tables to fill in")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = measured()
    arguments.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    arguments.figure.write_bytes(figure(results))
    found = tables(results)
    for name, lines in found.items():
        print(f"\n{name}\n\n{table(lines)}")
    for page in arguments.pages:
        page.write_text(into_readme(page.read_text(), found))


if __name__ == "__main__":
    main()
