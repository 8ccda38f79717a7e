"""Conditional Poisson sampling against plain top-k and against the textbook recurrence.

    python -m benchmarks.conditional_poisson [--json FILE] [--readme FILE] [--quick]

Every figure is a ratio of medians that were measured in turns in the same run. Log-weights are
float32, Gaussian with standard deviation 3 unless a row says otherwise.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.tables import into_readme, table
from benchmarks.timing import in_fresh_process, machine, medians, peak_bytes
from cpsbs import ConditionalPoisson
from tests.oracles import textbook_log_normalizer


def weights(n: int, kind: str = "gaussian") -> Tensor:
    """[N] log-weights: Gaussian, flat, or a model's: log-softmax of a Zipf law in random order."""
    generator = torch.Generator().manual_seed(n)
    if kind == "gaussian":
        return 3 * torch.randn(n, generator=generator)
    if kind == "flat":
        return torch.zeros(n)
    rank = torch.randperm(n, generator=generator) + 1
    return (-1.2 * rank.log()).log_softmax(-1)


def sample_with_inclusion(x: Tensor, k: int) -> Tensor:
    """One sample and the log inclusion of its items, from raw weights."""
    design = ConditionalPoisson(x, k)
    return design.log_inclusion_of(design.sample())


def against_topk(k: int, n: int, kind: str, seconds: float) -> dict[str, object]:
    """Ratios to torch.topk(k) of the same tensor."""
    x = weights(n, kind)
    t = medians(
        {
            "topk": lambda: x.topk(k),
            "sample": lambda: sample_with_inclusion(x, k),
            "log_z": lambda: ConditionalPoisson(x, k).log_normalizer,
            "all_pi": lambda: ConditionalPoisson(x, k).log_inclusion,
        },
        seconds,
    )
    return {
        "k": k,
        "n": n,
        "weights": kind,
        "topk_ms": 1e3 * t["topk"],
        **{name: t[name] / t["topk"] for name in ("sample", "log_z", "all_pi")},
    }


def against_textbook(k: int, n: int, seconds: float) -> dict[str, object]:
    """Ratios to one forward pass of the textbook recurrence, vectorised over k."""
    x = weights(n).double()
    t = medians(
        {
            "textbook": lambda: textbook_log_normalizer(x, k),
            "sample": lambda: sample_with_inclusion(x, k),
            "log_z": lambda: ConditionalPoisson(x, k).log_normalizer,
            "all_pi": lambda: ConditionalPoisson(x, k).log_inclusion,
        },
        seconds,
    )
    return {
        "k": k,
        "n": n,
        "textbook_ms": 1e3 * t["textbook"],
        **{name: t[name] / t["textbook"] for name in ("sample", "log_z", "all_pi")},
    }


def growth(k: int, n: int, seconds: float) -> dict[str, object]:
    """Milliseconds of one sample with its inclusion probabilities, and the ratio to top-k."""
    x = weights(n)
    t = medians({"topk": lambda: x.topk(k), "sample": lambda: sample_with_inclusion(x, k)}, seconds)
    return {"k": k, "n": n, "sample_ms": 1e3 * t["sample"], "ratio": t["sample"] / t["topk"]}


def memory(k: int, n: int) -> dict[str, object]:
    """Peak extra memory of one sample, in copies of its float32 input; in a fresh process."""
    copies = in_fresh_process("benchmarks.conditional_poisson", f"peak({k}, {n})")
    return {"k": k, "n": n, "copies": copies}


def peak(k: int, n: int) -> float:
    """How far a sample raises the peak resident memory of this process, in copies of its input."""
    x = weights(n)
    sample_with_inclusion(x[:100_000], k)  # what is loaded on first use is not the sample's
    return peak_bytes(lambda: sample_with_inclusion(x, k)) / (4 * n)


def main() -> None:
    """Measure, print tables and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--readme", type=Path, help="also put the tables into this file")
    parser.add_argument("--quick", action="store_true", help="a tenth of the time")
    arguments = parser.parse_args()
    seconds = 1.0 if arguments.quick else 8.0

    results: dict[str, object] = {"machine": machine()}
    print(results["machine"])
    kinds = ("gaussian", "zipf", "flat")
    sections: dict[str, tuple[str, list[dict[str, object]]]] = {}
    sections["topk"] = (
        "Ratios to torch.topk(k) of the same float32 tensor",
        [
            against_topk(k, n, kind, seconds)
            for k, n in ((20, 10**6), (10, 320_000))
            for kind in kinds
        ],
    )
    sections["textbook"] = (
        "Ratios to one forward pass of the textbook recurrence",
        [against_textbook(k, n, seconds) for k, n in ((400, 1000), (2000, 5000))],
    )
    sections["growth_n"] = (
        "One sample with its inclusion probabilities: growth with N",
        [growth(20, 10**e, seconds / 2) for e in (4, 5, 6, 7)],
    )
    sections["growth_k"] = (
        "One sample with its inclusion probabilities: growth with K",
        [growth(k, 10**6, seconds / 2) for k in (1, 2, 5, 10, 20, 50, 100, 200)],
    )
    sections["memory"] = (
        "Peak extra memory of one sample, in copies of its float32 input",
        [memory(20, 10**7)],
    )
    for name, (title, rows) in sections.items():
        print(f"\n{title}\n\n{table(rows)}")
        results[name] = rows
    if arguments.readme:
        text = arguments.readme.read_text()
        arguments.readme.write_text(into_readme(text, results))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
