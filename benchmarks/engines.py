"""Sentences a second, against the engines that people translate with.

    python -m benchmarks.engines --source FILE --reference FILE [--device cpu|cuda]
        [--sentences N] [--rounds R] [--json FILE] [--page FILE]

The embedded model translates sentences of FILE with K = 5: beam search, CPSBS and ``stratified``
here; beam search by CTranslate2 with the same weights (``benchmarks.ctranslate2_conversion``); and
beam search by transformers. On a CPU weights are in float32 and in int8, with a thread for every
core; on a GPU they are in float16. A run goes from texts to texts. Runs take turns, the figures are
medians over the rounds, and a ratio is the median of the ratios of single rounds. "over
CTranslate2" compares with its beam search of the same precision and batch size. "A second of
processor time" is one of a single core, and other work on the machine changes it less. BLEU is
sacrebleu's, of the sentences that were translated.

All beam searches here and by CTranslate2 rank hypotheses by log-probability. By default CTranslate2
divides it by the length, which is another task and has another BLEU. It is asked for the best
translation alone, and may stop when no other can be better; ours goes on until all K have ended.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.ctranslate2_conversion import convert
from benchmarks.tables import into_readme, table
from benchmarks.timing import machine
from cpsbs import load
from cpsbs.cli.batches import ROWS, batches, refill_size
from cpsbs.text import TextModel

K, LONGEST = 5, 128
RIVAL = "CTranslate2, beam search"

Run = Callable[[list[str]], list[str]]
Row = dict[str, object]
Batch = int | None
"""The number of sentences in a batch, or None for what suits each engine best."""


@dataclass(frozen=True)
class Place:
    """A device, and what is compared there."""

    designs: dict[str, tuple[str, float]]
    """Design and temperature by name."""
    weights: dict[str, dict[str, Any]]
    """How a model with these weights is loaded."""
    rival_batch: int
    """The batch size with which CTranslate2 is fastest there."""
    transformers: tuple[Batch, int]
    """The row of ``batches`` in which transformers is measured, and its batch size."""
    batches: dict[Batch, int]
    """Batch sizes, and which share of the sentences is enough: all, or one of so many."""
    warm: bool = False
    """Whether all sentences are translated once before anything is measured, or only some."""


DESIGNS = {
    "cpsbs, beam search": ("top-k", 1.0),
    "CPSBS, τ = 0.5": ("conditional-poisson", 0.5),
    "stratified, τ = 0.5": ("stratified", 0.5),
}
AT_ONE = {"CPSBS, τ = 1": ("conditional-poisson", 1.0), "stratified, τ = 1": ("stratified", 1.0)}
PLACES = {
    "cpu": Place(
        DESIGNS,
        {"float32": {}, "int8": {"quantize": "int8"}},
        rival_batch=32,
        transformers=(8, 8),
        batches={None: 1, 8: 6, 1: 12},
    ),
    "cuda": Place(
        DESIGNS | AT_ONE,
        {"float16": {"dtype": "float16"}},
        rival_batch=1024,
        transformers=(None, 3003),
        batches={None: 1, 64: 1},
        warm=True,
    ),
}


@dataclass(frozen=True)
class Engine:
    """What translates, and in what precision."""

    name: str
    weights: str
    run: Run


def ours(
    model: TextModel, design: str, temperature: float, size: int, texts: list[str]
) -> list[str]:
    """Return the most probable of the K sequences of each text."""
    refill = refill_size(size) if model.model.device.type == "cuda" else size
    lengths = {i: len(text) for i, text in enumerate(texts)}
    grouped = list(batches(lengths, lengths, size, refill))
    given = ([texts[i] for i in numbers] for numbers in grouped)
    best: dict[int, str] = {}
    each = model.beams_each(given, K, design, temperature=temperature, seed=0)
    for numbers, beams in zip(grouped, each, strict=True):
        best |= zip(numbers, (row[0] for row in model.texts(beams)), strict=True)
    return [best[i] for i in range(len(texts))]


def by_ctranslate2(model: TextModel, translator: Any, size: int, texts: list[str]) -> list[str]:
    """Return CTranslate2's translations by beam search, ranked by log-probability like ours."""
    tokens = [model.tokenizer.convert_ids_to_tokens(ids) for ids in model.tokens(texts)]
    found = translator.translate_batch(
        tokens,
        beam_size=K,
        max_batch_size=size,
        max_decoding_length=LONGEST,
        length_penalty=0,  # the default, 1, divides log-probabilities by lengths
    )
    ids = [model.tokenizer.convert_tokens_to_ids(x.hypotheses[0]) for x in found]
    return model.decode(ids)


def by_transformers(model: TextModel, size: int, texts: list[str]) -> list[str]:
    """Return transformers' translations by beam search."""
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    best: list[str] = []
    for first in range(0, len(texts), size):
        batch = [texts[i] for i in order[first : first + size]]
        given = model.tokenizer(batch, return_tensors="pt", padding=True).to(model.model.device)
        mask = given["attention_mask"]
        ids = model.model.generate(
            given["input_ids"], attention_mask=mask, num_beams=K, max_new_tokens=LONGEST
        )
        best += model.decode(ids.tolist())
    return [text for _, text in sorted(zip(order, best, strict=True))]


def engines(
    place: Place, models: dict[str, TextModel], translators: dict[str, Any], batch: Batch
) -> list[Engine]:
    """Return the engines to compare, with this batch size or each with its own."""
    found = []
    for weights, model in models.items():
        size = batch or ROWS[model.model.device.type] // K
        if weights in translators:
            size_there = batch or place.rival_batch
            translate = partial(by_ctranslate2, model, translators[weights], size_there)
            found.append(Engine(RIVAL, weights, translate))
        for name, (design, temperature) in place.designs.items():
            found.append(Engine(name, weights, partial(ours, model, design, temperature, size)))
    if batch == place.transformers[0]:
        weights, model = next(iter(models.items()))
        generate = partial(by_transformers, model, place.transformers[1])
        found.append(Engine("transformers, beam search", weights, generate))
    return found


def compared(
    place: Place,
    every: list[Engine],
    batch: str,
    texts: list[str],
    references: list[str],
    rounds: int,
) -> list[Row]:
    """Return a row for each engine."""
    from sacrebleu import corpus_bleu

    threads = torch.get_num_threads()
    rates: dict[tuple[str, str], list[float]] = {(e.name, e.weights): [] for e in every}
    work: dict[tuple[str, str], list[float]] = {key: [] for key in rates}
    bleu: dict[tuple[str, str], float] = {}
    for n in range(-1, rounds):
        for engine in every:
            torch.set_num_threads(threads)  # CTranslate2 sets the number for the whole process
            # A GPU records all shapes of the batches in the round that does not count.
            few = texts if place.warm else texts[: max(2, len(texts) // 20)]
            given = few if n < 0 else texts
            start = time.perf_counter(), time.process_time()
            found = engine.run(given)
            ends = time.perf_counter(), time.process_time()
            rate, own_rate = (len(given) / (b - a) for a, b in zip(start, ends, strict=True))
            print(f"{n} {batch} {engine.name} {engine.weights} {rate:.1f}", flush=True)
            if n >= 0:
                rates[engine.name, engine.weights].append(rate)
                work[engine.name, engine.weights].append(own_rate)
                bleu[engine.name, engine.weights] = corpus_bleu(found, [references]).score
    rows: list[Row] = []
    for (name, weights), own in rates.items():
        of_cores = work[name, weights]
        rows.append(
            {
                "batch": batch,
                "what": name,
                "weights": weights,
                "sentences a second": statistics.median(own),
                "over CTranslate2": ratio(own, rates.get((RIVAL, weights))),
                "a second of processor time": statistics.median(of_cores),
                "over CTranslate2, processor time": ratio(of_cores, work.get((RIVAL, weights))),
                "BLEU": f"{bleu[name, weights]:.2f}" if "beam" in name else "-",
            }
        )
        print(rows[-1], flush=True)
    return rows


def ratio(own: list[float], rival: list[float] | None) -> float | str:
    """Return the median of the ratios of single rounds."""
    if rival is None:
        return "-"
    return statistics.median(a / b for a, b in zip(own, rival, strict=True))


def main() -> None:
    """Measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, help="sentences to translate, one a line")
    parser.add_argument("--reference", type=Path, help="their translations, one a line")
    parser.add_argument("--device", choices=list(PLACES), default="cpu")
    parser.add_argument(
        "--sentences", type=int, default=3003, help="translate this many, evenly spread"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--page", type=Path, help="put the figures into the tables of this page")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    if arguments.json and arguments.json.exists():
        results = json.loads(arguments.json.read_text())
    if arguments.source:
        texts, references = (
            path.read_text(encoding="utf-8").splitlines()
            for path in (arguments.source, arguments.reference)
        )
        name = f"engines_{arguments.device}"
        given = (arguments.device, texts, references, arguments.sentences, arguments.rounds)
        results[name] = []
        results["on"] = machine() | {"sentences": arguments.sentences, "rounds": arguments.rounds}
        for rows in measured(*given):
            results[name] += rows
            if arguments.json:  # a run that is cut off has what it has measured
                write(arguments.json, results)
        print(table(results[name]))
    elif arguments.json:
        write(arguments.json, results)
    if arguments.page:
        arguments.page.write_text(into_readme(arguments.page.read_text(), results))


def write(path: Path, results: dict[str, Any]) -> None:
    """Write results to a file, as JSON."""
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def measured(
    device: str, texts: list[str], references: list[str], sentences: int, rounds: int
) -> Iterator[list[Row]]:
    """Yield the rows of each batch size; small batches translate fewer sentences."""
    place = PLACES[device]
    models = {w: load("en-fr", device=device, **options) for w, options in place.weights.items()}
    translators: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if find_spec("ctranslate2") is None:
            print("CTranslate2 is not installed: its rows are left out")
        else:
            import ctranslate2

            convert(load("en-fr", device="cpu"), Path(folder))
            threads = torch.get_num_threads()
            workers = threads if device == "cpu" else 1
            for weights in models:
                translators[weights] = ctranslate2.Translator(
                    folder, device, compute_type=weights, inter_threads=workers, intra_threads=1
                )
            torch.set_num_threads(threads)
        for batch, fewer in place.batches.items():
            step = max(1, round(len(texts) * fewer / sentences))
            given = (engines(place, models, translators, batch), str(batch or "own"))
            yield compared(place, *given, texts[::step], references[::step], rounds)


if __name__ == "__main__":
    main()
