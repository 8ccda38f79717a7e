"""What are the error bars worth? Coverage and width of intervals from a single beam.

    python -m benchmarks.bars --model FOLDER --source FILE --reference FILE --json FILE

The sentences and temperatures of ``benchmarks.estimators``, K = 5, 10 and 20, and designs that tell
their error from one beam. For expected BLEU, both forms of the entropy, and the probability of an
event that a prefix decides (that the translation begins with the prefix whose probability is
closest to one half): how often the 95% interval covers the truth, and how wide the error bar is,
as the median of the claimed standard errors over the real standard deviation of the estimates.
The truth is the mean over all repeats of ``stratified`` at the largest K, which is unbiased; its
error is a twentieth of that of one beam. Cells that are in the JSON file already are not computed
again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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


def joined(parts: list[Beams]) -> Beams:
    """Independent searches of the same sentences as one beam, on the CPU: sources s·repeats + r."""
    longest = max(beams.sequences.shape[-1] for beams in parts)

    def together(name: str) -> Tensor:
        own: list[Tensor] = [getattr(beams, name).cpu() for beams in parts]
        if name == "sequences":
            pad = parts[0].pad
            own = [nn.functional.pad(x, (0, longest - x.shape[-1]), value=pad) for x in own]
        if name == "trace":
            own = [nn.functional.pad(x, (0, 0, 0, longest - x.shape[2])) for x in own]
        grouped = [x.view(len(LINES), -1, *x.shape[1:]) for x in own]
        return torch.cat(grouped, 1).flatten(0, 1)

    first = parts[0]
    names = [part.name for part in fields(first) if isinstance(getattr(first, part.name), Tensor)]
    moved: dict[str, Any] = {name: together(name) for name in names}
    return replace(first, **moved)


class Cases:
    """The functions of one temperature, and their expectations.

    Args:
        tokenizer: the tokenizer of the model.
        references: a reference translation of each sentence.
        beams: many beams of each sentence, by ``stratified`` with a large K.
    """

    def __init__(self, tokenizer: Any, references: list[str], beams: Beams) -> None:
        self._decode = partial(tokenizer.batch_decode, skip_special_tokens=True)
        self._references = references
        self._events = [partial(_begins, prefix) for prefix in likely_prefixes(beams)]
        self._bleu: dict[int, Bleu] = {}
        found = {name: estimate(beams, f) for name, f in self.functions(beams).items()}
        means = {name: result.value.view(len(LINES), -1).mean(1) for name, result in found.items()}
        self.truth = {**means, "entropy": means["entropy RB"]}
        """The truth for each function and sentence, nearly."""

    def functions(self, beams: Beams) -> dict[str, Any]:
        """The functions of ``FUNCTIONS``, for beams of each sentence."""
        repeats = len(beams) // len(LINES)
        if repeats not in self._bleu:
            references = [text for text in self._references for _ in range(repeats)]
            self._bleu[repeats] = Bleu(references, self._decode)
        return {
            "BLEU": self._bleu[repeats],
            "entropy": Entropy(),
            "entropy RB": Entropy(rao_blackwell=True),
            "event": [event for event in self._events for _ in range(repeats)],
        }


def likely_prefixes(beams: Beams) -> list[list[int]]:
    """For each sentence, the prefix whose estimated probability is closest to one half."""
    assert beams.log_weight is not None
    repeats, found = len(beams) // len(LINES), []
    for sentence in range(len(LINES)):
        mass: dict[tuple[int, ...], float] = {}
        for b in range(sentence * repeats, (sentence + 1) * repeats):
            weights = beams.log_weight[b][beams.present[b]].exp().tolist()
            for y, w in zip(beams.tokens(b), weights, strict=True):
                for n in range(1, len(y)):
                    mass[tuple(y[:n])] = mass.get(tuple(y[:n]), 0.0) + w / repeats
        closest = min((round(abs(p - 0.5), 6), len(x), x) for x, p in mass.items())
        found.append(list(closest[-1]))
    return found


def _begins(prefix: list[int], y: list[int]) -> bool:
    return y[: len(prefix)] == prefix


def cell(cases: Cases, name: str, k: int, beams: Beams) -> list[dict[str, Any]]:
    """Coverage and width of a design for every function, averaged over the sentences."""
    repeats, rows = len(beams) // len(LINES), []
    for f_name, f in cases.functions(beams).items():
        result = estimate(beams, f, normalize=COLUMNS[name][1])
        true, value = cases.truth[f_name][:, None], result.value.view(len(LINES), repeats)
        rmse = float((value - true).square().mean().sqrt())
        row = {"f": f_name, "k": k, "design": name, "repeats": repeats, "rmse": rmse}
        error = result.standard_error
        if error is not None:
            claimed, spread = error.view(len(LINES), repeats), value.std(1)
            low, high = (end.view(len(LINES), repeats) for end in result.interval())
            covers = (low <= true + ROUNDING) & (true <= high + ROUNDING)
            width = (claimed.nanmedian(1).values / spread)[spread > ROUNDING]
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
    parser.add_argument("--repeats", type=int, default=512)
    parser.add_argument("--slices", type=int, default=4, help="to search one after the other")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.1, 0.2, 0.3, 0.5, 1.0])
    parser.add_argument("--k", type=int, nargs="+", default=[5, 10, 20])
    parser.add_argument("--designs", nargs="+", default=list(COLUMNS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(), "rows": []}
    if arguments.json.exists():
        results = json.loads(arguments.json.read_text())
    done = {(r["temperature"], r["k"], r["design"]) for r in results["rows"]}
    wanted = itertools.product(arguments.temperatures, arguments.k, arguments.designs)
    missing = [key for key in wanted if key not in done]
    files = arguments.model, arguments.source, arguments.reference
    sentences = Sentences(*files, arguments.device) if missing else None
    for temperature in dict.fromkeys(t for t, _, _ in missing):
        assert sentences is not None

        def draw(design: str, k: int, at: float = temperature) -> Beams:
            each = arguments.repeats // arguments.slices
            slices = range(arguments.slices)
            return joined([sentences.beams(each, k, design, at, seed=7 + i) for i in slices])

        largest = draw("stratified", max(arguments.k))
        cases = Cases(sentences.tokenizer, sentences.references, largest)
        for _, k, name in (key for key in missing if key[0] == temperature):
            found = cell(cases, name, k, draw(COLUMNS[name][0], k))
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
