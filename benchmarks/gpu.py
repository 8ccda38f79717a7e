"""On a GPU: selection against torch.topk, decoding against transformers' own beam search.

    python -m benchmarks.gpu [selection] [decoding] [corpus] [scaling] [leak] [weights] [kernels]
        [first]
        [--json FILE] [--source FILE] [--page FILE] [--before FOLDER]

All ratios are of medians in one run on one card. A step is recorded once and then replayed; the
first call, which records, does not count.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.gpu_models import DEVICE, large, llama, marian
from benchmarks.tables import into_readme, table
from cpsbs import TransformersModel, load, search
from cpsbs.backends import backend_for
from cpsbs.designs import Candidates, design_named
from cpsbs.randomness import Streams, split_seed
from cpsbs.scores.reading import beam_chunk_length, read

Row = dict[str, object]
Key = TypeVar("Key", bound=Hashable)


def medians(functions: Mapping[Key, Callable[[], object]], rounds: int) -> dict[Key, float]:
    """Median seconds of each function; they take turns, and each waits for the card."""
    for function in functions.values():
        function()
        function()
    times: dict[Key, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def recorded(function: Callable[[], object]) -> Callable[[], None]:
    """The function's launches as one graph, so that only the card's time counts."""
    make: Any = torch.cuda.Stream
    stream = make()
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def selecting(name: str, scores: Tensor, k: int) -> Callable[[], object]:
    """A step of a design on scores [B, K, V], from the scores to the picks and their inclusion."""
    sources, parents, tokens = scores.shape
    design = design_named(name)
    backend = backend_for(DEVICE)
    streams = Streams(split_seed(0, sources, DEVICE), sources, DEVICE, backend)
    terms = backend.power_sums(design.power_sums)
    length = beam_chunk_length(parents, tokens, k, terms, backend)
    log_prob = torch.zeros((sources, parents), dtype=torch.float64, device=DEVICE).log_softmax(-1)
    row = torch.arange(sources, device=DEVICE)
    begun = design.begin(k, streams, row)
    state = {key: value.expand(sources, parents).clone() for key, value in begun.items()}
    finished = torch.zeros_like(log_prob, dtype=torch.bool)

    def run() -> None:
        candidates = Candidates(
            log_prob,
            read(scores, 1.0, length, terms, backend=backend),
            finished,
            state,
            torch.zeros_like(log_prob),
        )
        design.select(candidates, k, streams)

    return run


def _log_softmax_and_topk(scores: Tensor, k: int) -> None:
    scores.float().log_softmax(-1).topk(k)


def selection() -> list[Row]:
    """Milliseconds of a selection, and over torch.topk of the same tensor."""
    rows: list[Row] = []
    for sources, k, tokens, dtype in (
        (32, 20, 50_000, torch.float32),
        (64, 5, 128_256, torch.bfloat16),
    ):
        generator = torch.Generator(DEVICE).manual_seed(0)
        scores = 2 * torch.randn((sources, k, tokens), generator=generator, device=DEVICE)
        scores = scores.to(dtype)
        flat, copy = scores.view(sources, -1), torch.empty_like(scores)
        functions: dict[str, Callable[[], object]] = {
            "copy": partial(copy.copy_, scores),
            "topk": partial(flat.topk, k),
            "log-softmax and topk": partial(_log_softmax_and_topk, flat, k),
        }
        for name in ("conditional-poisson", "stratified", "gumbel-top-k", "top-k"):
            functions[name] = selecting(name, scores, k)
            functions[f"{name}, recorded"] = recorded(selecting(name, scores, k))
        t = medians(functions, 30)
        shape = f"{sources} × {k} × {tokens}, {str(dtype)[6:]}"
        rows += [
            {
                "scores": shape,
                "what": name,
                "ms": 1e3 * t[name],
                "time over topk": t[name] / t["topk"],
            }
            for name in functions
        ]
    return rows


def step_times(
    model: Any, ids: Tensor, k: int, steps: int, what: tuple[str, ...], rounds: int
) -> dict[str, tuple[float, float]]:
    """Seconds a step of designs and of transformers: of whole searches, and without their start.

    The start (encoder, prompt, buffers) is what a search of a quarter of the steps tells.
    """
    model.generation_config.eos_token_id = None  # nothing ends early
    few = steps // 4

    def run(name: str, length: int) -> object:
        if name == "transformers":
            return model.generate(
                input_ids=ids, num_beams=k, max_new_tokens=length, do_sample=False
            )
        return search(
            TransformersModel(model, input_ids=ids), k, name, max_length=length, generator=0
        )

    runs = {(name, n): partial(run, name, n) for name in what for n in (steps, few)}
    t = medians(runs, rounds)
    return {
        name: (t[name, steps] / steps, (t[name, steps] - t[name, few]) / (steps - few))
        for name in what
    }


def decoding() -> list[Row]:
    """Marian in float16 and the shape of Llama in bfloat16."""
    rows: list[Row] = []
    what = ("transformers", "conditional-poisson", "gumbel-top-k", "top-k", "stratified",
            "independent")  # fmt: skip
    generator = torch.Generator(DEVICE).manual_seed(0)
    for make, batch, k, length in ((marian, 32, 20, 20), (llama, 8, 10, 32)):
        model = make()
        ids = torch.randint(
            2, model.config.vocab_size, (batch, length), generator=generator, device=DEVICE
        )
        t = step_times(model, ids, k, 64, what, 3)
        theirs = t["transformers"]
        scores = torch.randn((batch, k, model.config.vocab_size), device=DEVICE)
        own = {
            name: recorded(selecting(name, scores.to(model.dtype), k))
            for name in what
            if name not in ("transformers", "independent")  # the latter is not recorded as a whole
        }
        selects = medians(own, 20)
        rows += [
            {
                "model": type(model).__name__,
                "batch": batch,
                "k": k,
                "what": name,
                "ms a step": 1e3 * step,
                "times as fast": theirs[0] / step,
                "ms a further step": 1e3 * further,
                "times as fast, further": theirs[1] / further,
                "share of the selection": selects[name] / further if name in selects else "-",
            }
            for name, (step, further) in t.items()
        ]
        del model, scores, own
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def corpus(source: Path) -> list[Row]:
    """Sentences a second of the embedded model, K = 5, from texts to tokens, longest first.

    Ours with sentences that take the places of those that are through, as ``cpsbs sample`` does it
    (half a batch or a whole one at a time), and batch after batch.
    """
    text = load("en-fr", device="cuda", dtype="float16")
    lines = source.read_text(encoding="utf-8").splitlines()
    lines.sort(key=lambda line: -len(line.split()))

    def batches(size: int, refill: int) -> list[list[str]]:
        rest = range(size, len(lines), refill)
        return [lines[:size]] + [lines[first : first + refill] for first in rest]

    def ours(size: int, refill: int, design: str) -> None:
        for beams in text.beams_each(batches(size, refill), 5, design, seed=0):
            beams.sequences.cpu()

    def one_by_one(size: int, design: str) -> None:
        for batch in batches(size, size):
            text.beams(batch, 5, design, seed=0).sequences.cpu()

    def theirs(size: int) -> None:
        for batch in batches(size, size):
            given = text.tokenizer(batch, return_tensors="pt", padding=True).to("cuda")
            text.model.generate(**given, num_beams=5, max_new_tokens=128).cpu()

    runs: dict[tuple[int, str], Callable[[], None]] = {}
    for design in ("conditional-poisson", "stratified", "top-k"):
        runs[64, f"{design}, refilled as a whole"] = partial(ours, 64, 64, design)
        runs[64, f"{design}, batch after batch"] = partial(one_by_one, 64, design)
        runs[1024, f"{design}, refilled by halves"] = partial(ours, 1024, 512, design)
        runs[1024, f"{design}, batch after batch"] = partial(one_by_one, 1024, design)
    runs[len(lines), "transformers"] = partial(theirs, len(lines))
    speed: dict[tuple[int, str], float] = {}
    for (size, name), run in runs.items():
        seconds = []
        for _ in range(1 if name == "transformers" else 2):  # the first of ours records
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        speed[size, name] = len(lines) / seconds[-1]
        print(size, name, speed[size, name], flush=True)
    best = max(value for (_, name), value in speed.items() if name == "transformers")
    return [
        {
            "batch": size,
            "what": name,
            "sentences a second": value,
            "over transformers' best": value / best,
        }
        for (size, name), value in speed.items()
    ]


def scaling() -> list[Row]:
    """Milliseconds of a recorded selection, and memory, as K, V and the batch grow."""
    rows: list[Row] = []
    cases = [("K", b, k, v) for b, v in ((8, 32_000),) for k in (1, 2, 5, 10, 20, 50, 100, 200)]
    cases += [("V", 8, 20, v) for v in (8_000, 16_000, 32_000, 64_000, 128_000, 256_000)]
    cases += [("batch", b, 10, 32_000) for b in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    for what, sources, k, tokens in cases:
        scores = 2 * torch.randn((sources, k, tokens), device=DEVICE)
        run = selecting("conditional-poisson", scores, k)
        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        extra = torch.cuda.max_memory_allocated() - before
        flat = scores.view(sources, -1)
        topk = recorded(partial(flat.topk, k))
        t = medians({"ours": recorded(run), "topk": topk}, 20)
        rows.append(
            {
                "grows": what,
                "batch": sources,
                "k": k,
                "V": tokens,
                "ms": 1e3 * t["ours"],
                "time over topk": t["ours"] / t["topk"],
                "GB/s": scores.nbytes / t["ours"] / 1e9,
                "memory over scores": extra / scores.nbytes,
            }
        )
        del scores, flat, run, topk
    return rows


def _searched(model: Any, ids: Tensor, k: int, design: str, steps: int) -> None:
    inputs = TransformersModel(model, input_ids=ids)
    search(inputs, k, design, max_length=steps, generator=0).sequences.cpu()


def launched(run: Callable[[], object]) -> tuple[dict[str, list[float]], float]:
    """Return the microseconds of each launch of a run by the kernel's name, and those of the run.

    The second figure is the time from the first launch to the end of the last one.
    """
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    launches = [e for e in found.events() or [] if "CUDA" in str(e.device_type)]
    spans = [(e.time_range.start, e.time_range.end) for e in launches]
    taken: dict[str, list[float]] = {}
    for event, (start, end) in zip(launches, spans, strict=True):
        taken.setdefault(str(event.name)[:60], []).append(end - start)
    return taken, max(end for _, end in spans) - min(start for start, _ in spans)


def _of_a_step(run: Callable[[], object], steps: int, most: int = 12) -> list[Row]:
    """Return what the kernels that take the most time of a run take of each of its steps."""
    taken, whole = launched(run)
    first = sorted(taken, key=lambda name: -sum(taken[name]))
    # Kernels that run side by side count twice, so that gaps may be larger than they seem.
    others = [x for name in first[most:] for x in taken[name]]
    shown = {name: taken[name] for name in first[:most]} | {"others": others}
    shown["gaps"] = [whole - sum(map(sum, taken.values()))]
    return [
        {
            "kernel": name,
            "launches a step": len(own) / steps if name != "gaps" else "-",
            "µs a step": sum(own) / steps,
            "share": sum(own) / whole,
        }
        for name, own in shown.items()
    ]


def _repeated(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()


def kernels(steps: int = 128) -> list[Row]:
    """Where the time of a step goes: the kernels that take the most of it, and the gaps.

    All of a search is counted, but it has so many steps that its start hardly shows. Beside them, a
    selection alone: recorded, and as many times in a row.
    """
    rows: list[Row] = []
    designs = ("conditional-poisson", "stratified")
    for make, batch, k, length in ((marian, 32, 20, 20), (llama, 8, 10, 32)):
        model = make()
        model.generation_config.eos_token_id = None
        ids = torch.randint(2, model.config.vocab_size, (batch, length), device=DEVICE)
        for design in designs:
            what: Row = {"what": type(model).__name__, "design": design}
            run = partial(_searched, model, ids, k, design, steps)
            rows += [what | row for row in _of_a_step(run, steps)]
        del model, run
        gc.collect()
        torch.cuda.empty_cache()
    scores = 2 * torch.randn((32, 20, 50_000), device=DEVICE)
    for design in designs:
        what = {"what": "selection alone", "design": design}
        run = partial(_repeated, recorded(selecting(design, scores, 20)), steps)
        rows += [what | row for row in _of_a_step(run, steps)]
    return rows


def compiled(model: Any, rows: int, length: int, steps: int) -> Callable[[], object]:
    """Steps of a model as ``torch.compile`` makes it, on a static KV cache, and nothing else."""
    from transformers import StaticCache

    cache: Any = StaticCache(config=model.config, max_cache_len=length + steps)
    ids = torch.randint(2, model.config.vocab_size, (rows, length), device=DEVICE)
    token = ids[:, :1].clone()
    step: Any = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)

    @torch.no_grad()
    def run() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(length)
        for _ in range(steps):
            step(input_ids=token, past_key_values=cache)

    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    return run


def copy_rate() -> float:
    """Bytes a second that a copy reads and writes."""
    buffer, copy = (torch.empty(2**31, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    return 2 * buffer.nbytes / medians({"copy": partial(copy.copy_, buffer)}, 10)["copy"]


def weights() -> list[Row]:
    """Milliseconds of a further step, against one reading of the weights at a copy's speed.

    For the smaller model also those of ``torch.compile``, which neither selects nor changes the
    order of hypotheses.
    """
    rows: list[Row] = []
    rate = copy_rate()
    batch, k, length, steps = 8, 10, 32, 64
    shapes: dict[str, Callable[[], Any]] = {
        "1B": llama,
        "7B": partial(large, 4096, 11_008, 32, 32, 32_000),
    }
    for name, make in shapes.items():
        model = make()
        held = sum(x.nbytes for x in model.parameters())
        ids = torch.randint(2, model.config.vocab_size, (batch, length), device=DEVICE)
        designs = ("conditional-poisson", "stratified")
        further = {d: t for d, (_, t) in step_times(model, ids, k, steps, designs, 3).items()}
        if name == "1B":
            yardstick = "torch.compile, the model alone"
            run = compiled(model, batch * k, length, steps)
            further[yardstick] = medians({yardstick: run}, 3)[yardstick] / steps
            del run
        rows += [
            {
                "shape": name,
                "batch": batch,
                "k": k,
                "what": what,
                "ms a further step": 1e3 * t,
                "ms for reading the weights": 1e3 * held / rate,
                "times as long": t * rate / held,
            }
            for what, t in further.items()
        ]
        del model
        gc.collect()
        torch.cuda.empty_cache()
    return rows


FIRST = """
import time
start = time.perf_counter()
import cpsbs, torch
model = cpsbs.load("en-fr", device="cuda", dtype="float16")
torch.cuda.synchronize()
loaded = time.perf_counter()
model.beams(["The museum opens at nine."], k=5, design={design!r}, seed=0).sequences.cpu()
print(loaded - start, time.perf_counter() - loaded)
"""


def first(before: Path | None = None) -> list[Row]:
    """Seconds until the first result in a fresh process, with and without compiled kernels.

    ``before`` is a folder with another version of the package, to compare with. Designs and
    versions take their time side by side, on cores of their own.
    """
    trees = {"now": os.environ.get("PYTHONPATH", "")}
    if before is not None:
        trees = {"before": os.pathsep.join([str(before), trees["now"]])} | trees
    designs = ("stratified", "conditional-poisson")
    given = [(version, design) for version in trees for design in designs]

    def rows(of: tuple[str, str]) -> list[Row]:
        version, design = of
        found: list[Row] = []
        with tempfile.TemporaryDirectory() as folder:
            for kernels in ("compiled now", "found on disk"):
                own = {"TRITON_CACHE_DIR": folder, "PYTHONPATH": trees[version]}
                done = subprocess.run(
                    [sys.executable, "-c", FIRST.format(design=design)],
                    env={**os.environ, **own}, check=True, stdout=subprocess.PIPE, text=True,
                )  # fmt: skip
                loading, result = map(float, done.stdout.split()[-2:])
                found.append(
                    {
                        "version": version,
                        "design": design,
                        "kernels": kernels,
                        "seconds for loading": loading,
                        "seconds for the first result": result,
                    }
                )
        return found

    with ThreadPoolExecutor(len(given)) as side_by_side:
        return [row for found in side_by_side.map(rows, given) for row in found]


def leak(steps: int = 1000) -> list[Row]:
    """Memory after searches of some steps in all."""
    model = marian()
    ids = torch.randint(2, 50_000, (8, 12), device=DEVICE)

    def once() -> None:
        inputs = TransformersModel(model, input_ids=ids)
        search(inputs, 5, max_length=50, generator=0)

    once()
    once()
    before = torch.cuda.memory_allocated()
    for _ in range(steps // 50):
        once()
    return [{"steps": steps, "bytes more": torch.cuda.memory_allocated() - before}]


def main() -> None:
    """Measure, print tables and write JSON."""
    parts: dict[str, Callable[[], list[Row]]] = {
        "selection": selection,
        "decoding": decoding,
        "scaling": scaling,
        "leak": leak,
        "weights": weights,
        "kernels": kernels,
        "first": first,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        choices=[[], *parts, "corpus"],
        metavar="PART",
        help=f"some of {', '.join(parts)}, and corpus, which needs --source. Default: all, or with "
        "--page none, which only puts what is in the file into the page",
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--source", type=Path, help="sentences to translate, for corpus")
    parser.add_argument("--page", type=Path, help="put what is in the file into this page's tables")
    parser.add_argument(
        "--before", type=Path, help="src/ of another version, which first compares with"
    )
    arguments = parser.parse_args()
    if "corpus" in arguments.parts and not arguments.source:
        parser.error("corpus needs --source, a file of sentences to translate")
    parts["first"] = partial(first, arguments.before)
    if arguments.source:
        parts["corpus"] = lambda: corpus(arguments.source)
    results: dict[str, Any] = {}
    if arguments.json and arguments.json.exists():
        results = json.loads(arguments.json.read_text())
    wanted = arguments.parts or ([] if arguments.page else list(parts))
    for name in wanted:
        results["machine"] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
        results[name] = parts[name]()
        print(f"\n{name}\n\n{table(results[name])}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.page:
        arguments.page.write_text(into_readme(arguments.page.read_text(), results))


if __name__ == "__main__":
    main()
