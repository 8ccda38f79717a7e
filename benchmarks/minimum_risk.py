"""Minimum-risk training by several ways to draw: what they reach, how noisy their gradients are.

    python -m benchmarks.minimum_risk run --train pairs.tsv.xz --dev EN FR --test EN FR --folder F
    python -m benchmarks.minimum_risk table --folder F --json FILE [--pages FILE …]

``run`` trains the embedded model by every method of ``examples/minimum_risk.py`` with three seeds,
one process for each method at a time, and evaluates the model as it is (no steps); runs that are
there already are not repeated. ``table`` puts what they saw together: BLEU and chrF of beam search
on the test set, as means over seeds with their standard deviation, and the standard deviation of
the gradient at the first weights, which are the same for all, and at the last ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.tables import into_readme, table
from benchmarks.timing import machine
from examples.minimum_risk import METHODS

EMBEDDED = "none"
"""The name of the run that does not train."""


def run(arguments: argparse.Namespace) -> None:
    """Train by every method and seed, as far as that has not been done."""
    arguments.folder.mkdir(parents=True, exist_ok=True)
    shared = ["--train", str(arguments.train), "--k", str(arguments.k)]
    for name, files in (("--dev", arguments.dev), ("--test", arguments.test)):
        shared += [name, *map(str, files)]
    still = arguments.folder / f"{EMBEDDED}.json"
    jobs = [[(still, ["--steps", "0", "--draws", "1"])]]
    for seed in range(arguments.seeds):
        own = ["--seed", str(seed), "--steps", str(arguments.steps)]
        jobs.append(
            [
                (arguments.folder / f"{method}.{seed}.json", [*own, "--method", method])
                for method in METHODS
            ]
        )
    for together in jobs:
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "examples.minimum_risk", *shared, *own, "--json", str(file)]
            )
            for file, own in together
            if not file.exists()
        ]
        for process in running:
            if process.wait():
                raise SystemExit(f"{process.args!r} failed")


def collected(folder: Path) -> dict[str, Any]:
    """Return what all runs saw, by method."""
    embedded = json.loads((folder / f"{EMBEDDED}.json").read_text())
    runs = [json.loads(file.read_text()) for file in sorted(folder.glob("*.*.json"))]
    settings = {
        name: {own[name] for own in runs} for name in ("k", "temperature", "rate", "batch", "steps")
    }
    for name, values in settings.items():
        if len(values) > 1:
            raise SystemExit(f"the runs have different settings of {name}: {sorted(values)}")
    return {
        "machine": machine(),
        "settings": {name: values.pop() for name, values in settings.items()},
        "embedded": {"dev": runs[0]["history"][0], "test": embedded["test"]},
        "methods": {m: [r for r in runs if r["method"] == m] for m in METHODS},
    }


def tables(results: dict[str, Any]) -> dict[str, list[dict[str, object]]]:
    """A row for the embedded model and for each method."""
    embedded = results["embedded"]
    lines: list[dict[str, object]] = [
        {
            "": "embedded model",
            "BLEU, newstest2013": f"{embedded['dev']['BLEU']:.2f}",
            "BLEU, newstest2014": f"{embedded['test']['BLEU']:.2f}",
            "chrF, newstest2014": f"{embedded['test']['chrF2']:.2f}",
            "deviation of the gradient, before": "",
            "and after": "",
            "s a step": "",
        }
    ]
    for name, runs in results["methods"].items():
        dev, test, chrf = (
            [r["history"][-1]["BLEU"] for r in runs],
            [r["test"]["BLEU"] for r in runs],
            [r["test"]["chrF2"] for r in runs],
        )
        first, last = ([r["history"][i]["spread"] for r in runs] for i in (0, -1))
        lines.append(
            {
                "": name,
                "BLEU, newstest2013": _mean(dev),
                "BLEU, newstest2014": _mean(test),
                "chrF, newstest2014": _mean(chrf),
                "deviation of the gradient, before": f"{statistics.mean(first):.2f}",
                "and after": f"{statistics.mean(last):.2f}",
                "s a step": f"{statistics.mean(r['seconds_a_step'] for r in runs):.2f}",
            }
        )
    return {"minimum_risk": lines}


def _mean(values: list[float]) -> str:
    """Return the mean over seeds, and the standard deviation between them."""
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def main() -> None:
    """Run, or make the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", choices=["run", "table"])
    parser.add_argument("--train", type=Path)
    parser.add_argument("--dev", type=Path, nargs=2)
    parser.add_argument("--test", type=Path, nargs=2)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pages", type=Path, nargs="*", default=[], help="with tables to fill in")
    arguments = parser.parse_args()
    if arguments.task == "run":
        run(arguments)
        return
    results = collected(arguments.folder)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(table(tables(results)["minimum_risk"]))
    for page in arguments.pages:
        page.write_text(into_readme(page.read_text(), tables(results)))


if __name__ == "__main__":
    main()
