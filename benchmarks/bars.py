"""What are the error bars worth? Coverage and width of intervals from a single beam.

    python -m benchmarks.bars --model FOLDER --source FILE --reference FILE --json FILE

The sentences and temperatures of ``benchmarks.estimators``, K = 5, 10 and 20, and designs that tell
their error from one beam. For expected BLEU, both forms of the entropy, and the probability of an
event that a prefix decides (that the translation begins with the prefix whose probability is
closest to one half): how often the 95% interval covers the truth, and how wide the error bar is,
as the median of the claimed standard errors over the real standard deviation of the estimates.
The truth is the mean of 1,024 beams of 50 sequences by ``stratified``, which is unbiased (fewer
with ``--truth-runs``). Cells that are in the JSON file already are not computed again.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.estimators import LINES, Sentences, as_json
from benchmarks.tables import into_readme, table
from benchmarks.timing import machine
from cpsbs import Beams, estimate
from cpsbs.estimation.functions import Bleu, Entropy

COLUMNS = {
    "stratified": ("stratified", False),
    "SBS n.": ("gumbel-top-k", True),
    "Monte Carlo": ("independent", False),
    "CPSBS n.": ("conditional-poisson", True),
    "calibrated n.": ("calibrated", True),
}
"""What the columns of a table are called; n. is for normalised."""

FUNCTIONS = ("BLEU", "entropy", "entropy RB", "event")

ROUNDING = 1e-5
"""Estimates that differ by no more than this differ by the rounding of float32 models: entropies
are sums over dozens of steps."""


def on_cpu(beams: Beams) -> Beams:
    """The same beams on the CPU, where Python reads them."""
    moved: dict[str, Any] = {
        part.name: value.cpu()
        for part in fields(beams)
        if isinstance(value := getattr(beams, part.name), Tensor)
    }
    return replace(beams, **moved)


class Cases:
    """The functions of one temperature, for sentences that are repeated."""

    def __init__(self, sentences: Sentences, temperature: float) -> None:
        self._sentences, self._temperature = sentences, temperature
        self._events = [
            partial(_begins, prefix) for prefix in likely_prefixes(self.beams(1, 200, seed=9))
        ]
        self._bleu: dict[int, Bleu] = {}

    def beams(self, repeats: int, k: int, design: str = "stratified", seed: int = 1) -> Beams:
        """Independent searches of every sentence: sources s·repeats + r."""
        return on_cpu(self._sentences.beams(repeats, k, design, self._temperature, seed))

    def functions(self, repeats: int) -> dict[str, Any]:
        """The functions of ``FUNCTIONS``."""
        if repeats not in self._bleu:
            decode = partial(self._sentences.tokenizer.batch_decode, skip_special_tokens=True)
            references = [text for text in self._sentences.references for _ in range(repeats)]
            self._bleu[repeats] = Bleu(references, decode)
        return {
            "BLEU": self._bleu[repeats],
            "entropy": Entropy(),
            "entropy RB": Entropy(rao_blackwell=True),
            "event": [event for event in self._events for _ in range(repeats)],
        }

    def truth(self, runs: int, repeats: int = 128) -> dict[str, list[float]]:
        """The truth for each function and sentence, nearly."""
        found: dict[str, list[Tensor]] = {}
        for run in range(runs):
            beams = self.beams(repeats, 50, seed=10_000 + run)
            for name, f in self.functions(repeats).items():
                found.setdefault(name, []).append(estimate(beams, f).value.view(len(LINES), -1))
        out = {name: torch.cat(parts, 1).mean(1).tolist() for name, parts in found.items()}
        return {**out, "entropy": out["entropy RB"]}


def likely_prefixes(beams: Beams) -> list[list[int]]:
    """For each source, the prefix whose estimated probability is closest to one half."""
    assert beams.log_weight is not None
    found = []
    for b in range(len(beams)):
        mass: dict[tuple[int, ...], float] = {}
        weights = beams.log_weight[b][beams.present[b]].exp().tolist()
        for y, w in zip(beams.tokens(b), weights, strict=True):
            for n in range(1, len(y)):
                mass[tuple(y[:n])] = mass.get(tuple(y[:n]), 0.0) + w
        closest = min((round(abs(p - 0.5), 6), len(x), x) for x, p in mass.items())
        found.append(list(closest[-1]))
    return found


def _begins(prefix: list[int], y: list[int]) -> bool:
    return y[: len(prefix)] == prefix


def cell(
    cases: Cases, truth: dict[str, list[float]], name: str, k: int, repeats: int
) -> list[dict[str, Any]]:
    """Coverage and width of a design for every function, averaged over the sentences."""
    design, normalize = COLUMNS[name]
    beams, rows = cases.beams(repeats, k, design), []
    for f_name, f in cases.functions(repeats).items():
        result = estimate(beams, f, normalize=normalize)
        true = torch.tensor(truth[f_name], dtype=torch.float64)[:, None]
        value = result.value.view(len(LINES), repeats)
        row = {
            "f": f_name,
            "k": k,
            "design": name,
            "repeats": repeats,
            "rmse": float((value - true).square().mean().sqrt()),
        }
        error = result.standard_error
        if error is not None:
            claimed, spread = error.view(len(LINES), repeats), value.std(1)
            low, high = (end.view(len(LINES), repeats) for end in result.interval())
            covers = (low <= true + ROUNDING) & (true <= high + ROUNDING)
            matters = spread > ROUNDING
            width = (claimed.nanmedian(1).values / spread)[matters]
            row["coverage"] = float(covers.double().mean())
            row["width"] = float(width.nanmean()) if len(width) else math.nan
            row["unknown"] = float(claimed.isnan().double().mean())
        rows.append(row)
    return rows


def tables(results: dict[str, Any]) -> dict[str, list[dict[str, object]]]:
    """For each function a row for every temperature and K, a column for every design."""
    found = {(r["f"], r["temperature"], r["k"], r["design"]): r for r in results["rows"]}
    cells = dict.fromkeys((r["temperature"], r["k"]) for r in results["rows"])
    designs = [name for name in COLUMNS if name in {r["design"] for r in results["rows"]}]
    return {
        f"bars_{f.replace(' ', '_')}": [
            {"τ": t, "K": k, **{name: _shown(found.get((f, t, k, name))) for name in designs}}
            for t, k in cells
        ]
        for f in FUNCTIONS
    }


def _shown(row: dict[str, Any] | None) -> str:
    """Coverage in percent, and the width."""
    if row is None or "coverage" not in row:
        return ""
    width = "" if math.isnan(row["width"]) else f", × {row['width']:.2f}"
    return f"{100 * row['coverage']:.0f}%{width}"


def main() -> None:
    """Compute what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument(
        "--json", type=Path, required=True, help="read, and written after each cell"
    )
    parser.add_argument("--pages", type=Path, nargs="*", default=[], help="with tables to fill in")
    parser.add_argument("--repeats", type=int, default=256)
    parser.add_argument("--truth-runs", type=int, default=8, help="of 128 beams each")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.1, 0.2, 0.3, 0.5, 1.0])
    parser.add_argument("--k", type=int, nargs="+", default=[5, 10, 20])
    parser.add_argument("--designs", nargs="+", default=list(COLUMNS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(), "truth": {}, "rows": []}
    if arguments.json.exists():
        results = json.loads(arguments.json.read_text())
    done = {(r["temperature"], r["k"], r["design"]) for r in results["rows"]}
    wanted = [
        (t, k, d) for t in arguments.temperatures for k in arguments.k for d in arguments.designs
    ]
    missing = [key for key in wanted if key not in done]
    sentences = None
    if missing:
        files = arguments.model, arguments.source, arguments.reference
        sentences = Sentences(*files, arguments.device)
    for temperature in dict.fromkeys(t for t, _, _ in missing):
        assert sentences is not None
        cases, truths = Cases(sentences, temperature), results["truth"]
        if str(temperature) not in truths:
            truths[str(temperature)] = cases.truth(arguments.truth_runs)
        for _, k, design in (key for key in missing if key[0] == temperature):
            truth = truths[str(temperature)]
            found = cell(cases, truth, design, k, arguments.repeats)
            results["rows"] += [{"temperature": temperature, **row} for row in found]
            partial_file = arguments.json.with_suffix(".partial")
            partial_file.write_text(as_json(results))
            partial_file.replace(arguments.json)
    for name, rows in tables(results).items():
        print(f"\n{name}\n\n{table(rows)}")
    for page in arguments.pages:
        page.write_text(into_readme(page.read_text(), tables(results)))


if __name__ == "__main__":
    main()
