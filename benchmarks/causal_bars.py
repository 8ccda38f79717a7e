"""What are the error bars worth on a causal model? Coverage and width, as in ``benchmarks.bars``.

    python -m benchmarks.causal_bars [--json FILE] [--pages FILE …]

The model is the small GPT-2 that notebooks/causal.ipynb trains, in seconds on a CPU: its code is
run from the notebook. The prompts are the six sums that the model never saw. Functions are the
entropy in both forms, the length, the probability that the answer begins with its most common word
(an event that the first token decides), and that of the right number, which many sentences state.
The truth comes from beams of 1,000 sequences, which hold nearly everything.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.estimators import as_json
from benchmarks.tables import into_readme, table
from benchmarks.timing import machine
from cpsbs import Beams, TextModel, estimate
from cpsbs.estimation.functions import Entropy, Length, Probability

NOTEBOOK = Path(__file__).parents[1] / "notebooks/causal.ipynb"
SIZES, TEMPERATURES, MAX_LENGTH = (5, 10, 20), (1.0, 0.5), 8
DESIGNS = {"stratified": False, "gumbel-top-k": True}
"""The designs, and whether their estimates are normalised."""


def notebook_model() -> tuple[TextModel, list[str], list[str]]:
    """The model that the notebook trains, prompts that it never saw, and the right numbers."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code" and "model" not in names:
            exec("".join(cell["source"]), names)
    sums = names["unseen"]
    prompts = [names["prompt"](a, b) for a, b in sums]
    return names["model"], prompts, [names["NUMBERS"][a + b] for a, b in sums]


class Cases:
    """The functions, for prompts that are repeated, and their expectations."""

    def __init__(
        self, model: TextModel, prompts: list[str], right: list[str], temperature: float
    ) -> None:
        self._model, self._prompts, self._right = model, prompts, right
        self._temperature = temperature
        largest = self.beams("stratified", 1000, 1)
        self._first = [
            max(_first_tokens(largest, b).items(), key=lambda x: x[1])[0]
            for b in range(len(prompts))
        ]
        self.truth = {
            name: estimate(largest, f, decode=decode).value
            for name, (f, decode) in self.functions(1).items()
        }

    def beams(self, design: str, k: int, repeats: int) -> Beams:
        """Independent searches of every prompt: sources s·repeats + r."""
        texts = [text for text in self._prompts for _ in range(repeats)]
        return self._model.beams(
            texts,
            k,
            design,
            max_length=MAX_LENGTH,
            temperature=self._temperature,
            seed=3,
            entropy=True,
        )

    def functions(self, repeats: int) -> dict[str, Any]:
        """Each function for every source, and what it needs to read texts."""
        decode = self._model.decode
        begins = [_begins(token) for token in self._first for _ in range(repeats)]
        states = [Probability(_states(word)) for word in self._right for _ in range(repeats)]
        return {
            "entropy": (Entropy(), None),
            "entropy RB": (Entropy(rao_blackwell=True), None),
            "length": (Length(), None),
            "first word": (begins, None),
            "right number": (states, decode),
        }


def _first_tokens(beams: Beams, source: int) -> dict[int, float]:
    """The probability of each first token, from the sequences of a source."""
    mass: dict[int, float] = {}
    own = beams.log_prob[source][beams.present[source]].exp().tolist()
    for y, p in zip(beams.tokens(source), own, strict=True):
        mass[y[0]] = mass.get(y[0], 0.0) + p
    return mass


def _begins(token: int) -> Any:
    return lambda y: y[0] == token


def _states(word: str) -> Any:
    return lambda text: word in text.split()


def cell(cases: Cases, design: str, k: int, repeats: int) -> list[dict[str, Any]]:
    """Coverage and width for every function, averaged over the prompts."""
    beams, rows = cases.beams(design, k, repeats), []
    for name, (f, decode) in cases.functions(repeats).items():
        result = estimate(beams, f, normalize=DESIGNS[design], decode=decode)
        true = cases.truth[name][:, None]
        value = result.value.view(len(true), repeats)
        low, high = (end.view(len(true), repeats) for end in result.interval())
        assert result.standard_error is not None
        claimed, spread = result.standard_error.view(len(true), repeats), value.std(1)
        rows.append(
            {
                "f": name,
                "k": k,
                "design": design,
                "coverage": float(((low <= true) & (true <= high)).double().mean()),
                "width": float((claimed.nanmedian(1).values / spread)[spread > 1e-9].nanmean()),
                "unknown": float(claimed.isnan().double().mean()),
            }
        )
    return rows


def tables(results: dict[str, Any]) -> dict[str, list[dict[str, object]]]:
    """A row for every temperature, K and design, a column for every function."""
    rows: dict[tuple[float, int, str], dict[str, object]] = {}
    for r in results["rows"]:
        row = rows.setdefault(
            (r["temperature"], r["k"], r["design"]),
            {
                "τ": r["temperature"],
                "K": r["k"],
                "design": r["design"] + (" n." if DESIGNS[r["design"]] else ""),
            },
        )
        row[r["f"]] = f"{100 * r['coverage']:.0f}%, × {r['width']:.2f}"
    return {"causal_bars": list(rows.values())}


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pages", type=Path, nargs="*", default=[], help="with a table to fill in")
    parser.add_argument("--repeats", type=int, default=256)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as the notebook does, so that it trains the same model
    model, prompts, right = notebook_model()
    results: dict[str, Any] = {"machine": machine(), "repeats": arguments.repeats, "rows": []}
    for temperature in TEMPERATURES:
        cases = Cases(model, prompts, right, temperature)
        for k in SIZES:
            for design in DESIGNS:
                found = cell(cases, design, k, arguments.repeats)
                results["rows"] += [{"temperature": temperature, **row} for row in found]
    if arguments.json is not None:
        arguments.json.write_text(as_json(results))
    print(table(tables(results)["causal_bars"]))
    for page in arguments.pages:
        page.write_text(into_readme(page.read_text(), tables(results)))


if __name__ == "__main__":
    main()
