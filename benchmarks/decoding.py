"""Decoding on a CPU: stochastic beams against transformers' own beam search.

    python -m benchmarks.decoding [--json FILE] [--quick] [--page FILE]

A Marian-shaped model of some 12 million parameters with random weights (d = 256, 6 + 3 layers,
V = 16,000), eight sources of 20 tokens, 32 steps that nothing ends early. Medians of whole runs
that take turns, divided by the number of steps. Then what takes the time of a search with the
embedded model, on one thread, and how much memory a selection needs.
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

from benchmarks.tables import into_readme, table
from benchmarks.timing import in_fresh_process, machine, medians, peak_bytes
from cpsbs import DESIGNS, FunctionModel, TextModel, TransformersModel, load, search
from cpsbs.backends.base import StepsTaken
from cpsbs.backends.cpu.steps import PARTS
from cpsbs.search.several import SeveralSteps
from cpsbs.text import demonstration

SOURCES, STEPS, VOCABULARY = 8, 32, 16_000


def marian(vocabulary: int = VOCABULARY) -> Any:
    """The model, with a vocabulary of this size."""
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=vocabulary,
        decoder_vocab_size=vocabulary,
        d_model=256,
        encoder_layers=6,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=1024,
        decoder_ffn_dim=1024,
        max_position_embeddings=512,
        eos_token_id=1,
        pad_token_id=0,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
    )
    model: Any = MarianMTModel(config)
    return model.eval()


def compare(model: Any, k: int, seconds: float) -> list[dict[str, object]]:
    """Milliseconds a step of every design, and of transformers' beam search, for K beams."""
    ids = torch.randint(2, VOCABULARY, (SOURCES, 20), generator=torch.Generator().manual_seed(0))
    model.generation_config.eos_token_id = None  # nothing ends early

    def ours(design: str) -> None:
        inputs = TransformersModel(model, input_ids=ids)
        search(inputs, k, design, max_length=STEPS, generator=0)

    def theirs() -> None:
        model.generate(input_ids=ids, num_beams=k, max_new_tokens=STEPS, do_sample=False)

    runs: dict[str, Callable[[], None]] = {"transformers": theirs}
    runs |= {name: partial(ours, name) for name in DESIGNS}
    t = medians(runs, seconds, burst=1)
    return [
        {
            "k": k,
            "design": name,
            "ms a step": 1e3 * t[name] / STEPS,
            "time over transformers'": t[name] / t["transformers"],
        }
        for name in runs
    ]


def shares(
    model: TextModel, sources: int, k: int, design: str, rounds: int = 5
) -> dict[str, object]:
    """Return what share of a search each part of its steps takes, on one thread.

    The rest is the encoder, the first step, and Python.
    """
    texts = sorted((source for source, _ in demonstration()), key=len, reverse=True)
    batch = (texts * (1 + sources // len(texts)))[:sources]
    spent, whole = dict.fromkeys(PARTS, 0.0), 0.0
    take = SeveralSteps.take

    def counted(*given: Any) -> StepsTaken | None:
        taken = take(*given)
        if taken is not None:
            for part, seconds in taken.seconds.items():
                spent[part] += seconds
        return taken

    with patch.object(SeveralSteps, "take", counted):
        for n in range(rounds + 1):
            if n == 1:  # the first one loads what is loaded on first use
                spent, whole = dict.fromkeys(PARTS, 0.0), 0.0
            start = time.perf_counter()
            model.beams(batch, k, design, temperature=0.5, seed=n)
            whole += time.perf_counter() - start
    found = {part: seconds / whole for part, seconds in spent.items()}
    return {
        "design": design,
        "sources": sources,
        "k": k,
        "ms a search": 1e3 * whole / rounds,
        **found,
        "rest": 1 - sum(found.values()),
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
    parser.add_argument("--page", type=Path, help="put the figures into the tables of this page")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"machine": machine()}
    model = marian()
    for k in (5, 20):
        results[f"k{k}"] = compare(model, k, 5.0 if arguments.quick else 60.0)
    embedded, threads = load("en-fr", device="cpu"), torch.get_num_threads()
    torch.set_num_threads(1)
    results["shares"] = [
        shares(embedded, sources, k, design)
        for design in ("top-k", "conditional-poisson", "stratified")
        for sources, k in ((1, 5), (8, 5), (32, 5), (16, 20))
    ]
    torch.set_num_threads(threads)
    results["memory"] = [
        memory(design, 20, finished)
        for design in ("conditional-poisson", "stratified", "top-k")
        for finished in (False, True)
    ]
    for name in ("k5", "k20", "shares", "memory"):
        print(f"\n{name}\n\n{table(results[name])}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.page:
        arguments.page.write_text(into_readme(arguments.page.read_text(), results))


if __name__ == "__main__":
    main()
