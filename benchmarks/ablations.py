"""Ablations: whole searches with and without a part of the code that must show its worth.

    python -m benchmarks.ablations [growing] [logits] [--source FILE] [--json FILE] [--page FILE]

``growing`` runs on a CPU and ``logits`` on a GPU. Searches with and without the part take turns in
one process; the figures are medians. For ``growing`` they are processor time, which other work on
the machine hardly changes.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import gpu, gpu_models
from benchmarks.tables import into_readme, table
from benchmarks.timing import machine
from cpsbs import TransformersModel, load, search
from cpsbs.text import demonstration

TURNS = 9

Row = dict[str, object]
Run = Callable[[], object]


def growing(source: Path | None) -> list[Row]:
    """Return what a KV cache that grows in memory kept from step to step saves on a CPU.

    The embedded model translates the first lines of ``source``, or the demonstration's texts. A
    Llama shape with up to 37 MB of keys in each layer continues random prompts, and nothing ends.
    """
    text = load("en-fr", device="cpu")
    lines = [given for given, _ in demonstration()]
    if source is not None:
        lines = source.read_text(encoding="utf-8").splitlines()
    rows = []
    for sources, k in ((8, 5), (8, 20), (32, 5), (32, 20)):
        run = partial(text.beams, lines[:sources], k, "conditional-poisson", temperature=0.5)
        rows.append(_with_and_without_growing("en-fr", sources, k, partial(run, seed=0)))
    model, ids = _small_llama(), torch.randint(2, 8000, (8, 40))
    return [*rows, _with_and_without_growing("Llama, d = 1024", 8, 20, partial(_go, model, ids))]


def _with_and_without_growing(model: str, sources: int, k: int, run: Run) -> Row:
    # The cache grows where a model takes the ordinary steps of transformers.
    run = partial(_patched, run, TransformersModel, "_runs_directly", lambda _: False)
    without = partial(_patched, run, TransformersModel, "_let_grow", lambda self: None)
    run()
    without()
    times = [(_process_seconds(run), _process_seconds(without)) for _ in range(TURNS)]
    return {
        "model": model,
        "sources": sources,
        "k": k,
        "seconds with": statistics.median(a for a, _ in times),
        "seconds without": statistics.median(b for _, b in times),
        "time with / without": statistics.median(a / b for a, b in times),
    }


def _process_seconds(run: Run) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def _small_llama() -> Any:
    """Return 4 layers of d = 1024 with random weights, V = 8,000."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4,
        num_attention_heads=16, num_key_value_heads=16, bos_token_id=0, eos_token_id=1,
        pad_token_id=0,
    )  # fmt: skip
    make: Any = LlamaForCausalLM
    model = make(config).eval()
    model.generation_config.eos_token_id = None
    return model


def _go(model: Any, ids: Tensor, k: int = 20, steps: int = 16) -> None:
    inputs = TransformersModel(model, input_ids=ids)
    search(inputs, k, "conditional-poisson", max_length=steps, generator=0)


def logits() -> list[Row]:
    """Return what it saves on a GPU that a model writes its logits where the search reads them.

    Without it they are copied there. The models and searches are those of ``benchmarks.gpu``.
    """
    rows: list[Row] = []
    device = gpu_models.DEVICE
    generator = torch.Generator(device).manual_seed(0)
    for make, batch, k, length in ((gpu_models.marian, 32, 20, 20), (gpu_models.llama, 8, 10, 32)):
        model = make()
        model.generation_config.eos_token_id = None  # nothing ends early
        ids = torch.randint(
            2, model.config.vocab_size, (batch, length), generator=generator, device=device
        )
        rows += _with_and_without_redirect(model, ids, k, steps=64, rounds=15)
        del model
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def _with_and_without_redirect(
    model: Any, ids: Tensor, k: int, steps: int, rounds: int
) -> list[Row]:
    from cpsbs.backends.triton.logits import Logits

    def plain(self: Logits, model: Any, inputs: dict[str, Any]) -> Tensor:
        found: Tensor = model(**inputs, return_dict=True).logits[:, -1]
        return found

    # Graphs are kept with a model, so that the other way needs another model.
    ways: Mapping[str, tuple[Any, Callable[..., Tensor]]] = {
        "written in place": (model, Logits.of),
        "copied": (copy.deepcopy(model), plain),
    }
    few = steps // 4
    runs: dict[str, Run] = {}
    for name, (own, of) in ways.items():
        for length in (steps, few):
            run = partial(_go, own, ids, k, length)
            runs[f"{name} {length}"] = partial(_patched, run, Logits, "of", of)
    t = gpu.medians(runs, rounds)
    whole = {name: t[f"{name} {steps}"] for name in ways}
    further = {name: (whole[name] - t[f"{name} {few}"]) / (steps - few) for name in ways}
    return [
        {
            "model": type(model).__name__,
            "batch": len(ids),
            "k": k,
            "logits": name,
            "ms a step": 1e3 * whole[name] / steps,
            "time over copied": whole[name] / whole["copied"],
            "ms a further step": 1e3 * further[name],
            "time over copied, further": further[name] / further["copied"],
        }
        for name in ways
    ]


def _patched(run: Run, owner: Any, name: str, value: object) -> None:
    """Run with another attribute of an object."""
    with patch.object(owner, name, value):
        run()


def main() -> None:
    """Measure, print tables and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        choices=[[], "growing", "logits"],
        metavar="PART",
        help="growing or logits. Default: growing, or with --page only what is in the file",
    )
    parser.add_argument("--source", type=Path, help="sentences to translate, for growing")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--page", type=Path, help="put the figures into the tables of this page")
    arguments = parser.parse_args()
    parts: dict[str, Callable[[], list[Row]]] = {
        "growing": partial(growing, arguments.source),
        "logits": logits,
    }
    results: dict[str, Any] = {}
    if arguments.json and arguments.json.exists():
        results = json.loads(arguments.json.read_text())
    for name in arguments.parts or (["growing"] if not arguments.page else []):
        results[name] = parts[name]()
        results[f"{name} on"] = machine()
        if name == "logits":
            results["logits on"]["card"] = torch.cuda.get_device_name()
        print(f"\n{name}\n\n{table(results[name])}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.page:
        arguments.page.write_text(into_readme(arguments.page.read_text(), results))


if __name__ == "__main__":
    main()
