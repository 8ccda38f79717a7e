"""How far off are the estimators? RMSE and bias of every design on a translation model.

    python -m benchmarks.estimators --model FOLDER --source FILE --reference FILE [--json FILE]

For three sentences (the paper's: 1500, 2000 and 2500 of newstest2014, counted from 0), at every
temperature and sample size: expected sentence BLEU and the conditional entropy, by independent
repeats of every design. The paper's baseline, 50 Monte Carlo runs of 200 samples, is itself too
noisy at low temperature, where some designs with 20 sequences come closer to the truth than it
does. So the baseline is computed twice, with independent samples and with the stratified design,
for each function and sentence the one with the smaller standard error counts, and both are kept, to
see that they agree. For entropy it is the Rao–Blackwellised form. Cells that are in the JSON file
already are not computed again. ``benchmarks.bars`` measures what the error bars are worth.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.tables import into_readme, table
from benchmarks.timing import machine
from cpsbs import Beams, TransformersModel, estimate, search
from cpsbs.designs import design_named
from cpsbs.estimation.functions import Bleu, Entropy

DESIGNS = (
    "conditional-poisson",
    "calibrated",
    "stratified",
    "gumbel-top-k",
    "independent",
    "arithmetic",
    "sum-and-sample",
)
LINES = (1500, 2000, 2500)
MAX_LENGTH = 100


class Sentences:
    """The model and the sentences, each as often as it is asked for."""

    def __init__(self, folder: Path, source: Path, reference: Path, device: str) -> None:
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
        self.model = model.to(device).eval()
        self.sources = [_line(source, n) for n in LINES]
        self.references = [_line(reference, n) for n in LINES]

    def beams(self, repeats: int, k: int, design: str, temperature: float, seed: int) -> Beams:
        """Independent searches of every sentence: sources s·repeats + r."""
        texts = [text for text in self.sources for _ in range(repeats)]
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True)
        return search(
            TransformersModel(self.model, **inputs.to(self.model.device)),
            k,
            design,
            max_length=MAX_LENGTH,
            temperature=temperature,
            generator=torch.Generator().manual_seed(seed),
            joint=design_named(design).needs_joint,
            entropy=True,
        )

    def functions(self, repeats: int) -> dict[str, Any]:
        """BLEU and both forms of the entropy."""
        decode = partial(self.tokenizer.batch_decode, skip_special_tokens=True)
        references = [text for text in self.references for _ in range(repeats)]
        bleu = Bleu(references, decode)
        return {"BLEU": bleu, "entropy": Entropy(), "entropy RB": Entropy(rao_blackwell=True)}


def _line(file: Path, number: int) -> str:
    return file.read_text(encoding="utf-8").splitlines()[number]


def baseline(
    sentences: Sentences, design: str, temperature: float, runs: int = 50, k: int = 200
) -> Any:
    """The truth, nearly: its value and standard error for each function and sentence."""
    values: dict[str, list[Tensor]] = {}
    for run in range(runs // 10):
        beams = sentences.beams(10, k, design, temperature, seed=10_000 + run)
        for name, f in sentences.functions(10).items():
            values.setdefault(name, []).append(estimate(beams, f).value.view(len(LINES), 10).cpu())
    out = {}
    for name, parts in values.items():
        all_runs = torch.cat(parts, dim=1)
        out[name] = {
            "value": all_runs.mean(1).tolist(),
            "standard_error": (all_runs.std(1) / math.sqrt(all_runs.shape[1])).tolist(),
        }
    out["entropy"] = out["entropy RB"]
    return out


def better(baselines: Any) -> dict[str, Tensor]:
    """[sentences] for each function, what the baseline with the smaller standard error says."""
    both = list(baselines.values())
    out = {}
    for name in both[0]:
        errors = torch.tensor([b[name]["standard_error"] for b in both])
        values = torch.tensor([b[name]["value"] for b in both], dtype=torch.float64)
        out[name] = values.gather(0, errors.argmin(0, keepdim=True))[0]
    return out


def as_json(results: dict[str, Any]) -> str:
    """A line for each row, numbers to five digits."""

    def short(value: Any) -> Any:
        return float(f"{value:.5g}") if isinstance(value, float) else value

    rows = [json.dumps({name: short(v) for name, v in row.items()}) for row in results["rows"]]
    rest = json.dumps({name: value for name, value in results.items() if name != "rows"}, indent=1)
    return rest[:-2] + ',\n "rows": [\n' + ",\n".join(rows) + "\n]}\n"


def cell(
    sentences: Sentences,
    truth: dict[str, Tensor],
    design: str,
    temperature: float,
    k: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """RMSE and bias of a design, normalised and not, averaged over the sentences."""
    start = time.perf_counter()
    beams = sentences.beams(repeats, k, design, temperature, seed=1)
    seconds = time.perf_counter() - start
    assert beams.log_weight is not None
    weight = beams.log_weight.exp().sum(-1)
    always_one = float((weight - 1).abs().max()) < 1e-6
    rows = []
    for name, f in sentences.functions(repeats).items():
        true = truth[name][:, None]
        for normalize in (False,) if always_one else (False, True):
            result = estimate(beams, f, normalize=normalize)
            value = result.value.cpu().view(len(LINES), repeats)
            error = value - true
            row = {
                "f": name,
                "temperature": temperature,
                "k": k,
                "design": design,
                "normalized": normalize,
                "rmse": float(error.square().mean(1).sqrt().mean()),
                "bias": float(error.mean(1).abs().mean()),
                "bias_error": float((value.std(1) / math.sqrt(repeats)).mean()),
                "sum_of_weights": float(weight.mean()),
                "seconds": seconds,
            }
            rows.append(row)
    return rows


def main() -> None:
    """Compute what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument(
        "--json", type=Path, required=True, help="read, and written after each cell"
    )
    parser.add_argument("--pages", type=Path, nargs="*", default=[], help="with tables to fill in")
    parser.add_argument("--repeats", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.1, 0.2, 0.3, 0.5, 1.0])
    parser.add_argument("--k", type=int, nargs="+", default=[2, 5, 10, 20])
    parser.add_argument("--designs", nargs="+", default=list(DESIGNS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    sentences = Sentences(arguments.model, arguments.source, arguments.reference, arguments.device)
    results: dict[str, Any] = {"machine": machine(), "repeats": arguments.repeats}
    results |= {"baseline": {}, "rows": []}
    if arguments.json.exists():
        results = json.loads(arguments.json.read_text())
    for temperature in arguments.temperatures:
        truths = results["baseline"]
        if str(temperature) not in truths:
            truths[str(temperature)] = {
                design: baseline(sentences, design, temperature)
                for design in ("independent", "stratified")
            }
        for k in arguments.k:
            for design in arguments.designs:
                key = (temperature, k, design)
                if key in {(r["temperature"], r["k"], r["design"]) for r in results["rows"]}:
                    continue
                truth = better(truths[str(temperature)])
                results["rows"] += cell(sentences, truth, design, temperature, k, arguments.repeats)
                partial_file = arguments.json.with_suffix(".partial")
                partial_file.write_text(as_json(results))
                partial_file.replace(arguments.json)
    for name, rows in tables(results).items():
        print(f"\n{name}\n\n{table(rows)}")
    for page in arguments.pages:
        page.write_text(into_readme(page.read_text(), tables(results)))


COLUMNS = {
    "CPSBS": ("conditional-poisson", False),
    "CPSBS n.": ("conditional-poisson", True),
    "calibrated": ("calibrated", False),
    "calibrated n.": ("calibrated", True),
    "stratified": ("stratified", False),
    "SBS": ("gumbel-top-k", False),
    "SBS n.": ("gumbel-top-k", True),
    "Monte Carlo": ("independent", False),
    "arithmetic": ("arithmetic", False),
    "sum-and-sample": ("sum-and-sample", False),
}
"""What the columns of a table are called; n. is for normalised."""


def tables(results: dict[str, Any]) -> dict[str, list[dict[str, object]]]:
    """Rows by temperature and K: RMSE and bias for each function; and a summary."""
    found = {
        (r["f"], r["temperature"], r["k"], r["design"], r["normalized"]): r for r in results["rows"]
    }
    cells = list(dict.fromkeys(key[:3] for key in found))
    out: dict[str, list[dict[str, object]]] = {}
    for f, t, k in cells:
        for what in ("rmse", "bias"):
            row: dict[str, object] = {"τ": t, "K": k}
            for name, design in COLUMNS.items():
                row[name] = found.get((f, t, k, *design), {}).get(what, "")
            out.setdefault(f"{what}_{f.replace(' ', '_')}", []).append(row)
    out["summary"] = [
        {"f": f.replace("_", " "), **{name: row[name] for name in SUMMARY}}
        for f in ("BLEU", "entropy", "entropy_RB")
        for row in out[f"rmse_{f}"]
        if row["K"] in (5, 20) and row["τ"] in (0.1, 0.3, 1.0)
    ]
    return out


SUMMARY = (
    "τ",
    "K",
    "CPSBS n.",
    "SBS n.",
    "Monte Carlo",
    "arithmetic",
    "sum-and-sample",
    "stratified",
)


if __name__ == "__main__":
    main()
