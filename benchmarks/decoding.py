"""Decoding on a CPU: stochastic beams against transformers' own beam search.

    python -m benchmarks.decoding [--json FILE] [--quick]

A Marian-shaped model of some 12 million parameters with random weights (d = 256, 6 + 3 layers,
V = 16,000), eight sources of 20 tokens, 32 steps that nothing ends early. Medians of whole runs
that take turns, divided by the number of steps. And what part of a search with the embedded model
the selection takes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.tables import table
from benchmarks.timing import in_fresh_process, machine, medians, peak_bytes
from cpsbs import DESIGNS, FunctionModel, TextModel, TransformersModel, load, search
from cpsbs.designs import Candidates, Design, Selection, design_named
from cpsbs.randomness import Streams
from cpsbs.scores.reading import read
from cpsbs.search import recursion
from cpsbs.text import demonstration

SOURCES, STEPS, VOCABULARY = 8, 32, 16_000


def marian() -> Any:
    """The model."""
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=VOCABULARY,
        decoder_vocab_size=VOCABULARY,
        d_model=256,
        encoder_layers=6,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=1024,
        decoder_ffn_dim=1024,
        max_position_embeddings=128,
        eos_token_id=1,
        pad_token_id=0,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
    )
    model: Any = MarianMTModel(config)
    return model.eval()


class Clocked:
    """A function that counts the seconds it takes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *arguments: Any) -> Any:
        """Call it, and look at the clock."""
        start = time.perf_counter()
        result = self.function(*arguments)
        self.seconds += time.perf_counter() - start
        return result


class Timed(Design):
    """A design that counts the seconds it takes."""

    def __init__(self, design: Design) -> None:
        self.design, self.name = design, design.name  # type: ignore[misc]
        self.clocked = Clocked(design.select)
        self.power_sums = design.power_sums  # type: ignore[misc]
        self.roots, self.begin = design.roots, design.begin  # type: ignore[method-assign]
        self.log_weight = design.log_weight  # type: ignore[method-assign]

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        """Pick, and look at the clock."""
        selection: Selection = self.clocked(candidates, k, streams, joint)
        return selection


def compare(model: Any, k: int, seconds: float) -> list[dict[str, object]]:
    """Milliseconds a step of every design, and of transformers' beam search, for K beams."""
    ids = torch.randint(2, VOCABULARY, (SOURCES, 20), generator=torch.Generator().manual_seed(0))
    bad = torch.full((1, VOCABULARY), 0.0)
    bad[0, 1] = -1e9  # nothing ends early

    def never_end(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + bad

    def ours(design: Design) -> None:
        inputs = TransformersModel(model, input_ids=ids, logits_processor=[never_end])
        search(inputs, k, design, max_length=STEPS, generator=torch.Generator().manual_seed(0))

    def theirs() -> None:
        model.generate(
            input_ids=ids,
            num_beams=k,
            max_new_tokens=STEPS,
            do_sample=False,
            logits_processor=[never_end],
        )

    timed = {name: Timed(design_named(name)) for name in DESIGNS}
    runs: dict[str, Callable[[], None]] = {"transformers": theirs}
    runs |= {name: partial(ours, design) for name, design in timed.items()}
    t = medians(runs, seconds, burst=1)
    rows: list[dict[str, object]] = []
    for name in runs:
        row: dict[str, object] = {"k": k, "design": name, "ms_a_step": 1e3 * t[name] / STEPS}
        row["ratio"] = t[name] / t["transformers"]
        if name in timed:
            timed[name].clocked.seconds = 0.0
            ours(timed[name])
            row["selection"] = timed[name].clocked.seconds / t[name]
        rows.append(row | ({} if name in timed else {"selection": "-"}))
    return rows


def shares(model: TextModel, sources: int, steps: int, rounds: int = 5) -> dict[str, object]:
    """Of the time of conditional Poisson searches, K = 20: reading the scores, and the rest of the
    selection. In few steps no hypothesis has ended; in many, those that have are not computed.
    """
    texts = sorted((source for source, _ in demonstration()), key=len, reverse=True)
    batch = (texts * (1 + sources // len(texts)))[:sources]
    design = Timed(design_named("conditional-poisson"))
    reading, whole = Clocked(read), 0.0
    with patch.object(recursion, "read", reading):
        for n in range(rounds + 1):
            if n == 1:  # the first one loads what is loaded on first use
                design.clocked.seconds = reading.seconds = whole = 0.0
            start = time.perf_counter()
            model.beams(batch, 20, design, max_length=steps, seed=n)
            whole += time.perf_counter() - start
    return {
        "sources": sources,
        "most steps": steps,
        "ms a search": 1e3 * whole / rounds,
        "selection": design.clocked.seconds / whole,
        "reading": reading.seconds / whole,
    }


def memory(design: str, k: int, finished: bool) -> dict[str, object]:
    """Peak extra memory of a step, in copies of the model's float32 scores [B, K·V]."""
    call = f"peak({design!r}, {k}, {finished})"
    copies = in_fresh_process("benchmarks.decoding", call)
    return {"design": design, "k": k, "some finished": finished, "copies": copies}


def peak(design: str, k: int, finished: bool, vocabulary: int = 128_000) -> float:
    """The same of this process, for two steps of a model whose scores are there already.

    With ``finished``, one hypothesis of each source ends at the first step.
    """
    scores = torch.randn((SOURCES * k, vocabulary), generator=torch.Generator().manual_seed(0))
    scores[:, 0] = 50.0 if finished else -50.0

    def two_steps(width: int) -> None:
        model = FunctionModel(lambda x: scores[: len(x), :width], width, eos=0, sources=SOURCES)
        search(model, k, design, max_length=2, generator=torch.Generator().manual_seed(0))

    two_steps(1000)  # what is loaded on first use does not count
    return peak_bytes(lambda: two_steps(vocabulary)) / (4 * scores.numel())


def main() -> None:
    """Measure, print tables and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    arguments = parser.parse_args()
    model = marian()
    results: dict[str, Any] = {"machine": machine()}
    for k in (5, 20):
        rows = compare(model, k, 5.0 if arguments.quick else 60.0)
        print(f"\nK = {k}\n\n{table(rows)}")
        results[f"k{k}"] = rows
    embedded = load("en-fr", device="cpu")
    results["shares"] = [shares(embedded, n, steps) for n in (8, 32) for steps in (10, 128)]
    print(f"\nshares\n\n{table(results['shares'])}")
    results["memory"] = [
        memory(design, 20, finished)
        for design in ("conditional-poisson", "stratified", "top-k")
        for finished in (False, True)
    ]
    print(f"\nmemory\n\n{table(results['memory'])}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
