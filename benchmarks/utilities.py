"""How fast are the utilities of all pairs? Against sacrebleu's sentence functions and fastchrf.

    python -m benchmarks.utilities --texts FILE [--json FILE] [--pages FILE …]

Candidates and evidence are lines of a file in which some words are exchanged, 32 of each, all
different, so that texts of a sentence share most of their n-grams as samples of a model do.
sacrebleu is timed on a few of the sentences, pair by pair, and fastchrf on all, if it is installed.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.tables import into_readme, table
from benchmarks.timing import machine
from cpsbs.estimation.metrics import sentence_bleu, sentence_chrf
from cpsbs.utilities import Bleu, Chrf

SIZE, EXCHANGED, FEW = 32, 4, 10
"""Texts of a role, words to exchange in each, and sentences for sacrebleu."""


def neighbours(line: str, generator: random.Random) -> list[str]:
    """Return texts like this line."""
    found = []
    for _ in range(SIZE):
        words = line.split()
        for _ in range(EXCHANGED):
            words[generator.randrange(len(words))] = generator.choice(words)
        found.append(" ".join(words))
    return found


def seconds(f: Callable[[], object], repeats: int = 3) -> float:
    """Return the least time of several calls."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        f()
        times.append(time.perf_counter() - begin)
    return min(times)


def measure(lines: list[str], device: torch.device) -> list[dict[str, Any]]:
    """Return milliseconds a sentence for each way to compute all pairs."""
    generator = random.Random(0)
    candidates = [neighbours(line, generator) for line in lines]
    evidence = [neighbours(line, generator) for line in lines]

    def all_pairs(metric: Callable[[str, str], float]) -> None:
        for own, others in zip(candidates[:FEW], evidence[:FEW], strict=True):
            for candidate in own:
                for text in others:
                    metric(candidate, text)

    rows = []
    for utility, metric in ((Chrf(), sentence_chrf), (Bleu(), sentence_bleu)):
        own = seconds(lambda u=utility: u.tables(candidates, evidence, device)) / len(lines)  # type: ignore[misc]
        theirs = seconds(lambda m=metric: all_pairs(m), 1) / FEW  # type: ignore[misc]
        row = {"utility": utility.name, "device": device.type, "cpsbs": own, "sacrebleu": theirs}
        if utility.name == "chrF":
            row["fastchrf"] = fastchrf(candidates, evidence)
        rows.append(row)
    return rows


def fastchrf(candidates: list[list[str]], evidence: list[list[str]]) -> float | None:
    """Return the seconds a sentence of fastchrf; None if it is not installed."""
    try:
        import fastchrf as package
    except ImportError:
        return None
    return seconds(lambda: package.pairwise_chrf(candidates, evidence), 1) / len(candidates)


def tables(results: dict[str, Any]) -> dict[str, list[dict[str, object]]]:
    """A row for each utility and device."""
    lines: list[dict[str, object]] = []
    for row in results["rows"]:
        fast = row.get("fastchrf")
        lines.append(
            {
                "utility": row["utility"],
                "device": row["device"],
                "ms a sentence": f"{1000 * row['cpsbs']:.2f}",
                "times as fast as sacrebleu": f"{row['sacrebleu'] / row['cpsbs']:.0f}",
                "times as fast as fastchrf": f"{fast / row['cpsbs']:.1f}" if fast else "",
            }
        )
    return {"utilities": lines}


def main() -> None:
    """Measure on the CPU and, if there is one, on a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="read, and written with the devices of this run")
    parser.add_argument("--pages", type=Path, nargs="*", default=[], help="with tables to fill in")
    arguments = parser.parse_args()
    lines = arguments.texts.read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if line.split()][: arguments.sentences]
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    results: dict[str, Any] = {"rows": [], "machines": {}}
    if arguments.json is not None and arguments.json.exists():
        results = json.loads(arguments.json.read_text())
    for name in devices:
        results["machines"][name] = machine()
        others = [row for row in results["rows"] if row["device"] != name]
        results["rows"] = others + measure(lines, torch.device(name))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(table(tables(results)["utilities"]))
    for page in arguments.pages:
        page.write_text(into_readme(page.read_text(), tables(results)))


if __name__ == "__main__":
    main()
