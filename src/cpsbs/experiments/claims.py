"""Compares the paper's claims with what was measured; verdicts follow from the rows alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from cpsbs.experiments.analysis import (
    Estimates,
    hindsight_deviation,
    inclusion_error,
    runtimes,
    trade_offs,
)
from cpsbs.experiments.cells import look_up
from cpsbs.experiments.figures import LABELS
from cpsbs.experiments.plan import Scale
from cpsbs.experiments.store import Row

CPSBS, SBS, MONTE_CARLO = "conditional-poisson", "gumbel-top-k", "independent"
PAPERS = ("independent", "sum-and-sample", "gumbel-top-k")
"""The baselines that the paper compares with."""


@dataclass(frozen=True)
class Claim:
    """A statement of the paper in our words, with what was measured and a verdict."""

    experiment: str
    statement: str
    measured: str
    verdict: str
    """Whether the statement holds: yes, partly, no, or – where that is not the question."""


def claims(experiments: Sequence[str], rows: Sequence[Row], scale: Scale) -> list[Claim]:
    """Return all claims that the rows allow a statement about.

    Raises:
        ValueError: if an experiment is unknown.
    """
    makers = {
        "bleu": _bleu,
        "bleu-unnormalized": _unnormalized,
        "entropy": _entropy,
        "truncation": _truncation,
        "rmse": _rmse,
        "diversity": _diversity,
        "runtime": _runtime,
        "hindsight": _hindsight,
    }
    return [
        claim for name in experiments for claim in look_up("experiment", name, makers)(rows, scale)
    ]


def _verdict(share: float) -> str:
    return "yes" if share >= 0.95 else "no" if share <= 0.5 else "partly"


def _ratio(numerator: float, denominator: float) -> float:
    """Return the ratio of two errors, one of which may be zero on short sentences."""
    if denominator > 0:
        return numerator / denominator
    return 1.0 if numerator == 0 else math.inf


def _lowest(found: Estimates, design: str, rivals: Sequence[str]) -> tuple[int, int]:
    """Return in how many cells a design has the smallest deviation, and the number of cells."""
    ahead = total = 0
    for (line, temperature, k, name, nucleus), spread in found.spread.items():
        if name == design and nucleus is None:
            others = [
                found.spread[line, temperature, k, rival, None].deviation
                for rival in rivals
                if (line, temperature, k, rival, None) in found.spread
            ]
            if others:
                total += 1
                ahead += spread.deviation <= min(others)
    return ahead, total


def _bleu(rows: Sequence[Row], scale: Scale) -> list[Claim]:
    found = Estimates(rows, scale, "BLEU", normalized=True)
    ahead, total = _lowest(found, CPSBS, PAPERS)
    ours, _ = _lowest(found, "stratified", [*PAPERS, CPSBS, "arithmetic"])
    made = [
        Claim(
            "bleu",
            "Estimates of expected BLEU by CPSBS vary less than those by the others, at all "
            "temperatures and for all sentences.",
            f"The smallest deviation of the paper's four in {ahead} of {total} cells (a sentence, "
            f"a temperature, a K). `stratified` has a smaller one than all baselines in {ours}.",
            _verdict(ahead / max(total, 1)),
        )
    ]
    coldest = min(scale.temperatures)
    off = []
    for (line, temperature, k, name, nucleus), spread in found.spread.items():
        small = temperature == coldest and 2 <= k <= 5 and name == CPSBS and nucleus is None
        if small and (line, temperature) in found.truth:
            off.append(abs(spread.mean - found.truth[line, temperature].value))
    if off:
        made.append(
            Claim(
                "bleu",
                "At low temperature the estimates are close to the exact value already for small "
                "samples.",
                f"At τ = {coldest}, K = 2 to 5, the mean over the repeats is off by {max(off):.4f} "
                "BLEU (between 0 and 1) at most.",
                "yes" if max(off) < 0.02 else "no",
            )
        )
    return made


def _unnormalized(rows: Sequence[Row], scale: Scale) -> list[Claim]:
    plain = Estimates(rows, scale, "BLEU", normalized=False)
    normalized = Estimates(rows, scale, "BLEU", normalized=True)
    ratios = {}
    for design in (CPSBS, SBS):
        own = [
            plain.spread[key].deviation / spread.deviation
            for key, spread in normalized.spread.items()
            if key[3] == design and key in plain.spread and spread.deviation > 0
        ]
        if own:
            ratios[design] = statistics.median(own)
    if not ratios:
        return []
    comparison = " and ".join(f"{ratio:.1f} times ({LABELS[d]})" for d, ratio in ratios.items())
    return [
        Claim(
            "bleu-unnormalized",
            "The paper shows both forms, and prefers normalised ones.",
            f"The deviation without normalisation is {comparison} that with it (medians over the "
            "cells).",
            "yes" if min(ratios.values()) > 1 else "partly",
        )
    ]


def _rmse(rows: Sequence[Row], scale: Scale) -> list[Claim]:
    return [claim for f in ("BLEU", "entropy") for claim in _rmse_of(f, rows, scale)]


def _rmse_of(f: str, rows: Sequence[Row], scale: Scale) -> list[Claim]:
    found = Estimates(rows, scale, f, normalized=True).rmse()
    cells = list(dict.fromkeys(key[:2] for key in found))
    warmest = max(scale.temperatures)
    cold = [cell for cell in cells if cell[0] <= 0.2 and 2 <= cell[1] <= 5]
    warm = [cell for cell in cells if cell[0] == warmest]
    if not cold or not warm:
        return []

    def ratio(design: str, to: str, some: list[tuple[float, int]]) -> float:
        """Return the median ratio of two designs' errors."""
        ratios = (_ratio(found[(*cell, design)], found[(*cell, to)]) for cell in some)
        return statistics.median(ratios)

    rivals = (*PAPERS, CPSBS, "arithmetic")
    best = sum(
        found[(*cell, "stratified")] <= min(found[(*cell, rival)] for rival in rivals)
        for cell in cells
    )
    against_monte_carlo = ratio(CPSBS, MONTE_CARLO, cold)
    at_warmest = ratio(CPSBS, MONTE_CARLO, warm)
    why = (
        " The paper's weights forget how unlikely a prefix's survival was: much of the weight is "
        "in beams that do not come up."
    )
    return [
        Claim(
            "rmse",
            f"Expected {f}: CPSBS clearly beats Monte Carlo at small K and low temperature.",
            f"RMSE of CPSBS over that of Monte Carlo, K = 2 to 5 and τ ≤ 0.2: "
            f"{against_monte_carlo:.2f} in the median; over that of SBS "
            f"{ratio(CPSBS, SBS, cold):.2f}.",
            "yes" if against_monte_carlo < 0.9 else "no",
        ),
        Claim(
            "rmse",
            f"Expected {f}: the error of CPSBS is low except at higher temperatures.",
            f"At τ = {warmest}, over Monte Carlo's RMSE: {at_warmest:.1f} "
            f"(SBS {ratio(SBS, MONTE_CARLO, warm):.1f})." + (why if at_warmest > 1 else ""),
            "yes" if at_warmest > 1 else "no",
        ),
        Claim(
            "rmse",
            f"(ours) Expected {f}: `stratified` is unbiased and has the smallest error.",
            f"Smallest RMSE of all in {best} of {len(cells)} cells; over Monte Carlo's "
            f"{ratio('stratified', MONTE_CARLO, cells):.2f} in the median.",
            _verdict(best / len(cells)),
        ),
    ]


def _entropy(rows: Sequence[Row], scale: Scale) -> list[Claim]:
    found = Estimates(rows, scale, "entropy", normalized=True)
    ahead, total = _lowest(found, CPSBS, PAPERS)
    return [
        Claim(
            "entropy",
            "For the conditional entropy CPSBS is generally quite efficient.",
            f"The smallest deviation of the paper's four in {ahead} of {total} cells. But a small "
            "deviation around a wrong value is no advantage; see the errors.",
            _verdict(ahead / max(total, 1)),
        )
    ]


def _truncation(rows: Sequence[Row], scale: Scale) -> list[Claim]:
    found = Estimates(rows, scale, "BLEU", normalized=True).spread
    differences = []
    unchanged = 0
    for (line, temperature, k, design, nucleus), cut in found.items():
        whole = found.get((line, temperature, k, design, None))
        if nucleus is not None and whole is not None and k > 1:
            error = (cut.deviation**2 / cut.count + whole.deviation**2 / whole.count) ** 0.5
            differences.append(abs(cut.mean - whole.mean))
            unchanged += differences[-1] < max(3 * error, 0.005)
    if not differences:
        return []
    return [
        Claim(
            "truncation",
            "Truncation to 0.99 of the mass leaves the estimates virtually unchanged.",
            f"{unchanged} of {len(differences)} means (K > 1) agree within three standard errors "
            f"or 0.005 BLEU; they differ by {statistics.median(differences):.4f} in the median and "
            f"{max(differences):.4f} at most.",
            _verdict(unchanged / len(differences)),
        )
    ]


def _diversity(rows: Sequence[Row], scale: Scale) -> list[Claim]:
    found = trade_offs(rows)
    k = min(scale.decoding_sizes)

    def of(design: str) -> list[float]:
        return [t.diversity for key, t in sorted(found.items()) if key[:2] == (k, design)]

    ours, sbs, diverse = of(CPSBS), of(SBS), of("diverse")
    at_most = sum(c > d for c, d in zip(ours, diverse, strict=True))
    better = [
        (key, t, found[key[0], MONTE_CARLO, key[2]])
        for key, t in found.items()
        if key[1] == CPSBS and (key[0], MONTE_CARLO, key[2]) in found
    ]
    mean_ahead = sum(c.mean > r.mean for _, c, r in better)
    return [
        Claim(
            "diversity",
            "Temperature has virtually no effect on the diversity of CPSBS's sets.",
            f"K = {k}: D goes from {min(ours):.2f} to {max(ours):.2f} over the temperatures (SBS "
            f"{min(sbs):.2f} to {max(sbs):.2f}).",
            "yes" if max(ours) - min(ours) < 0.2 * (max(sbs) - min(sbs)) else "no",
        ),
        Claim(
            "diversity",
            "CPSBS's sets are more diverse than those of diverse beam search.",
            f"K = {k}: D is larger at {at_most} of {len(ours)} temperatures (strengths).",
            _verdict(at_most / max(len(ours), 1)),
        ),
        Claim(
            "diversity",
            "CPSBS has better min, mean and max BLEU than independent sampling.",
            f"At the same temperature the mean is higher in {mean_ahead} of {len(better)} cases, "
            f"the minimum in {sum(c.least > r.least for _, c, r in better)}, the maximum in "
            f"{sum(c.most > r.most for _, c, r in better)}.",
            _verdict(mean_ahead / max(len(better), 1)),
        ),
    ]


def _runtime(rows: Sequence[Row], scale: Scale) -> list[Claim]:
    found = runtimes(rows)
    largest = max(scale.runtime_sizes)
    parts = []
    for device in dict.fromkeys(key[0] for key in found):
        beam = found.get((device, "top-k", largest))
        ratios = {
            design: found[device, design, largest] / beam
            for design in (CPSBS, SBS, MONTE_CARLO, "stratified")
            if beam and (device, design, largest) in found
        }
        times = ", ".join(f"{LABELS[d]} {ratio:.2f}" for d, ratio in ratios.items())
        parts.append(f"On {device}, K = {largest}, time over that of beam search: {times}")
    return [
        Claim(
            "runtime",
            "The paper plots time against K on a CPU, with its dynamic program on truncated "
            "candidates.",
            "; ".join(parts) + " (here over all candidates, without truncation).",
            "–",
        )
    ]


def _hindsight(rows: Sequence[Row], scale: Scale) -> list[Claim]:
    error, deviation = inclusion_error(rows), hindsight_deviation(rows)
    made = []
    if error:
        most = max(m for _, m in error)
        own = statistics.fmean(v for (_, m), v in error.items() if m == 0)
        hind = statistics.fmean(v for (_, m), v in error.items() if m == most)
        made.append(
            Claim(
                "hindsight",
                "Hindsight importance sampling is a consistent estimator of π(y).",
                f"On a model that can be enumerated, the error of log π is {own:.3f} by the own "
                f"path and {hind:.3f} with M = {most}.",
                "yes" if hind < own else "no",
            )
        )
    if deviation:
        most = max(m for _, _, m in deviation)
        ratio = statistics.median(
            _ratio(deviation[t, True, most], deviation[t, True, 0])
            for t, normalized, m in deviation
            if normalized and m == most
        )
        made.append(
            Claim(
                "hindsight",
                "(ours) Is it worth its M more searches a sequence?",
                f"Normalised expected BLEU with M = {most} deviates {ratio:.2f} times as much as "
                "with the own path, which costs nothing.",
                "–",
            )
        )
    return made
