"""What sampling without replacement gives: the table on the first page.

    python -m benchmarks.front [--json FILE] [--pages README.md docs/index.md]

Draws K translations of every sentence, again and again with other seeds, by `independent` sampling
and by `stratified`, and reports how many of the K texts differ, and how much the mean over the
sentences of expected BLEU and of the entropy varies from seed to seed. Both designs are unbiased,
so that this standard deviation is the error of the corpus mean; no reference value is needed. The
sentences are those that come with the package unless --source and --reference name others, which
then need a --name of their own; the table has all sentences that are in the JSON file.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import cpsbs
from benchmarks.tables import into_readme, table
from benchmarks.timing import machine
from cpsbs.functions import Bleu, Entropy
from cpsbs.text import demonstration

DESIGNS = ("independent", "stratified")
MOST = 10_000
"""From this number of independent samples on, the table says "over"."""


def cell(
    model: cpsbs.TextModel,
    sources: list[str],
    bleu: Bleu,
    design: str,
    temperature: float,
    k: int,
    repeats: int,
) -> dict[str, Any]:
    """Measure a design at one temperature: different texts, errors, and what error bars claim."""
    different = 0
    functions = {"BLEU": bleu, "entropy": Entropy(rao_blackwell=True)}
    values: dict[str, list[torch.Tensor]] = {name: [] for name in functions}
    claimed: dict[str, list[float]] = {name: [] for name in functions}
    for seed in range(repeats):
        beams = model.beams(sources, k, design, temperature=temperature, seed=seed, entropy=True)
        different += sum(len(set(texts)) for texts in model.texts(beams))
        for name, f in functions.items():
            found = cpsbs.estimate(beams, f, decode=model.decode)
            values[name].append(found.value)
            error = found.mean().standard_error
            claimed[name].append(math.nan if error is None else float(error))
    out: dict[str, Any] = {"design": design, "temperature": temperature}
    out["texts"] = different / (repeats * len(sources))
    for name, of_seeds in values.items():
        by_seed = torch.stack(of_seeds)
        # The beams of different sentences are independent, so that their variances add up.
        out[name] = math.sqrt(float(by_seed.var(0).sum())) / len(sources)
        out[f"mean {name}"] = float(by_seed.mean())
        out[f"claimed {name}"] = float(torch.tensor(claimed[name]).nanmedian())
    return out


def rows(results: Mapping[str, Any]) -> list[dict[str, object]]:
    """Return the rows of the table, for all sets of sentences: independent → stratified.

    An error falls with the square root of the number of independent samples, hence the last
    column: the K at which independent sampling would have the errors of ``stratified``.
    """
    shown: list[dict[str, object]] = []
    for name, of_set in results.items():
        cells = {(c["temperature"], c["design"]): c for c in of_set["cells"]}
        for temperature in dict.fromkeys(t for t, _ in cells):
            plain, ours = (cells[temperature, design] for design in DESIGNS)
            row: dict[str, object] = {"sentences": name, "temperature": temperature}
            row[f"different texts of {of_set['k']}"] = f"{plain['texts']:.1f} → {ours['texts']:.1f}"
            worth = []
            for f in ("BLEU", "entropy"):
                row[f"error of mean {f}"] = f"{_two_digits(plain[f])} → {_two_digits(ours[f])}"
                worth.append(of_set["k"] * (plain[f] / ours[f]) ** 2)
            row["independent samples for the same errors"] = " and ".join(map(_many, worth))
            shown.append(row)
    return shown


def _many(count: float) -> str:
    """Return a number of samples to two significant digits."""
    return f"{float(f'{count:.2g}'):,.0f}" if count < MOST else f"over {MOST:,}"


def _two_digits(error: float) -> str:
    """Return a positive number to two significant digits, without an exponent."""
    return f"{error:.{max(0, 1 - math.floor(math.log10(error)))}f}"


def main() -> None:
    """Measure every cell, print the table, and put it where it belongs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="en-fr")
    parser.add_argument("--source", type=Path, help="a sentence per line")
    parser.add_argument("--reference", type=Path, help="their references, one per line")
    parser.add_argument("--sentences", type=int, default=20, help="how many of them")
    parser.add_argument("-k", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=128, help="seeds per cell")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.3, 0.5, 1.0])
    parser.add_argument("--name", default="everyday", help="what the table calls the sentences")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument(
        "--pages", type=Path, nargs="*", default=[], help="with the table to fill in"
    )
    arguments = parser.parse_args()
    pairs = demonstration()
    if arguments.source and arguments.reference:
        both = (arguments.source, arguments.reference)
        lines = [file.read_text(encoding="utf-8").splitlines() for file in both]
        pairs = list(zip(*lines, strict=True))
    sources, references = (list(side) for side in zip(*pairs[: arguments.sentences], strict=True))
    model, bleu = cpsbs.load(arguments.model), Bleu(references)
    results: dict[str, Any] = {
        "machine": machine(),
        "model": arguments.model,
        "sentences": len(sources),
        "k": arguments.k,
        "repeats": arguments.repeats,
        "cells": [
            cell(model, sources, bleu, design, temperature, arguments.k, arguments.repeats)
            for temperature in arguments.temperatures
            for design in DESIGNS
        ],
    }
    everything = {arguments.name: results}
    if arguments.json:
        kept = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        everything = {**kept, **everything}
        arguments.json.write_text(json.dumps(everything, indent=1) + "\n")
    print(table(rows(everything)))
    for page in arguments.pages:
        text = into_readme(page.read_text(encoding="utf-8"), {"front": rows(everything)})
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
