"""On a GPU: what the kernels of a step would take with other sizes of their programs.

    python -m benchmarks.tuning [products] [attention] [selection] [--json FILE]

One size is changed at a time, or a few that belong together, from what the package uses, which is
the row "as it is". Kernels run as in a step: recorded, one after another, on other weights or keys
each time, so that these are not in the card's cache. "Time over reading" is 1 for a kernel that
reads its weights, or keys and values, at the speed of a copy and does nothing else. The constants
are those of ``cpsbs.backends.triton.kernels.few_rows``, ``tree_attention`` and ``poisson``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu import Row, copy_rate, medians, recorded, selecting
from benchmarks.gpu_models import DEVICE
from benchmarks.tables import table
from cpsbs.backends.triton.kernels import few_rows, poisson, tree_attention
from cpsbs.backends.triton.kernels.attention import attend_by_table
from cpsbs.backends.triton.kernels.launching import compiling_only

CACHE = 256_000_000
"""Bytes after which the first ones are no longer in the card's cache."""

ROUNDS = 20

Sizes = dict[str, Any]
"""What stands in for some of a module's constants."""


def cut_into(
    width: int,
    parts: int,
    rows: int,
    inputs: int,
    outputs: tuple[int, ...],
    matrices: int,
    programs: int,
) -> few_rows.Cut:
    """Return the cut into this width and so many parts, in place of ``few_rows.best_cut``."""
    widest = few_rows.MOST_COLUMNS // matrices
    return few_rows.Cut(min(width, widest), parts, -(-inputs // few_rows.DEPTH // parts))


PRODUCTS: dict[str, Sizes] = {
    "as it is": {},
    "launched one after the other": {"early": dict},
    **{f"at most {n} stages": {"MOST_STAGES": n} for n in (3, 4, 6)},
    **{f"{n} outputs for a warp": {"COLUMNS_OF_A_WARP": n} for n in (16, 64)},
    **{
        f"{width} outputs, {parts} parts": {"best_cut": partial(cut_into, width, parts)}
        for width in (64, 128, 256)
        for parts in (1, 2, 4, 8)
    },
}


ATTENTION: dict[str, Sizes] = {
    "as it is": {},
    **{f"at most {n} rows": {"MOST_MEMBERS": n, "MOST_WIDE_MEMBERS": n} for n in (1, 2, 4, 8, 16)},
    **{f"{n} keys at a time": {"BLOCK": n, "WIDE_BLOCK": n} for n in (32, 64, 128)},
    **{f"{n} warps": {"WARPS": n} for n in (2, 8)},
}

SELECTION: dict[str, Sizes] = {
    "as it is": {},
    **{f"{n} items of the tail at a time": {"DRAWN": n} for n in (8, 16, 64)},
    **{f"{n} warps draw": {"DRAW_WARPS": n} for n in (4, 8)},
    **{f"{n} warps add up the tail": {"TAIL_WARPS": n} for n in (4, 16)},
}

LAYERS = {
    "1B": (2048, 8192, 3072),
    "7B": (4096, 11_008, 12_288),
}
"""Dimension, that of the feed-forward layers, and outputs of queries, keys and values."""


@contextmanager
def changed(module: Any, sizes: Sizes) -> Iterator[None]:
    """Let these stand in for constants of a module."""
    with ExitStack() as all_of_them:
        for constant, value in sizes.items():
            all_of_them.enter_context(patch.object(module, constant, value))
        yield


def compared(
    name: str,
    module: Any,
    ways: dict[str, Sizes],
    launches: list[Callable[[], object]],
    read: int,
    rate: float,
) -> list[Row]:
    """Return a row for each way to launch a kernel; those that do not fit are left out.

    Args:
        name: what the kernel computes.
        module: the module whose constants are changed.
        ways: to what they are changed.
        launches: the kernel on one set of tensors after the other.
        read: the bytes that it reads from one of them.
        rate: bytes a second that a copy reads and writes.
    """

    def run() -> None:
        for launch in launches:
            launch()

    # All of them side by side; what fails is said below.
    with suppress(Exception), compiling_only():
        for sizes in ways.values():
            with changed(module, sizes), suppress(Exception):
                launches[0]()
    replays: dict[str, Callable[[], object]] = {}
    for way, sizes in ways.items():
        with changed(module, sizes):
            try:
                replays[way] = recorded(run)
            except Exception as error:
                print(f"{name}, {way}: {type(error).__name__}: {str(error)[:80]}", flush=True)
                torch.cuda.synchronize()
    taken = medians(replays, ROUNDS)
    return [
        {
            "kernel": name,
            "sizes": way,
            "µs": 1e6 * seconds / len(launches),
            "time over as it is": seconds / taken["as it is"],
            "time over reading": seconds * rate / (len(launches) * read),
        }
        for way, seconds in taken.items()
    ]


def some(make: Callable[[], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """Return so many sets of tensors that the first is no longer in the cache after the last."""
    first = make()
    held = sum(x.nbytes for x in first)
    return [first, *(make() for _ in range(max(1, -(-CACHE // held))))]


def matrices(*sizes: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return random matrices of these sizes."""
    return tuple(
        torch.randn(size, device=DEVICE, dtype=torch.bfloat16) / size[1] ** 0.5 for size in sizes
    )


def products(rows: int = 80) -> Iterator[list[Row]]:
    """The products of the layers of a Llama for so many rows."""
    rate = copy_rate()
    for shape, (size, inner, width) in LAYERS.items():
        of_layer: dict[str, tuple[Callable[..., Tensor], list[tuple[int, int]], int]] = {
            "queries, keys, values": (few_rows.products_in_parts, [(width, size)], size),
            "out": (few_rows.products_in_parts, [(size, size)], size),
            "gate and up": (few_rows.gated_product, 2 * [(inner, size)], size),
            "down": (few_rows.products_in_parts, [(size, inner)], inner),
        }
        for name, (product, sizes, inputs) in of_layer.items():
            weights = some(partial(matrices, *sizes))
            (x,) = matrices((rows, inputs))
            launches: list[Callable[[], object]] = [partial(product, x, *own) for own in weights]
            read = sum(w.nbytes for w in weights[0])
            yield compared(f"{shape}, {name}", few_rows, PRODUCTS, launches, read, rate)
            del weights, launches
            torch.cuda.empty_cache()


def tree(sources: int, k: int, capacity: int, parted: int) -> Tensor:
    """Return the table of hypotheses that part at this position and never meet again."""
    place = torch.zeros((sources, k, capacity), dtype=torch.int32, device=DEVICE)
    place[:, :, parted:] = torch.arange(k, dtype=torch.int32, device=DEVICE)[:, None]
    return place


def attention() -> Iterator[list[Row]]:
    """Attention of the models of ``benchmarks.gpu``, where hypotheses part late and early."""
    rate, capacity, length = copy_rate(), 128, 90
    for name, sources, k, heads, kv_heads, dim in (
        ("Marian", 32, 20, 8, 8, 64),
        ("Llama 1B", 8, 10, 32, 8, 64),
        ("Llama 7B", 8, 10, 32, 32, 128),
    ):
        rows = sources * k
        query = torch.randn((rows, heads, 1, dim), dtype=torch.float16, device=DEVICE)
        position = torch.full((sources,), length, dtype=torch.int64, device=DEVICE)

        def keys(rows: int = rows, kv_heads: int = kv_heads, dim: int = dim) -> tuple[Tensor, ...]:
            sizes = 2 * [(rows, kv_heads, 1, dim)] + 2 * [(rows, kv_heads, capacity, dim)]
            return tuple(torch.randn(size, dtype=torch.float16, device=DEVICE) for size in sizes)

        sets = some(keys)
        for parted in (80, 40, 10):
            place = tree(sources, k, capacity, parted)
            launches: list[Callable[[], object]] = [
                partial(attend_by_table, query, (a, b), (c, d), place, position)
                for a, b, c, d in sets
            ]
            # Keys and values of the positions that some row refers to, each once.
            places = sources * (parted + k * (length - parted))
            read = 2 * places * kv_heads * dim * query.dtype.itemsize
            what = f"{name}, parted at {parted} of {length}"
            yield compared(what, tree_attention, ATTENTION, launches, read, rate)


def selection() -> Iterator[list[Row]]:
    """A whole selection of conditional Poisson sampling, from the scores to the inclusion."""
    rate = copy_rate()
    for sources, k, tokens, dtype in (
        (32, 20, 50_000, torch.float32),
        (64, 5, 128_256, torch.bfloat16),
        (8, 50, 32_000, torch.float32),
        (8, 200, 32_000, torch.float32),
    ):
        size = (sources, k, tokens)

        def scores(size: tuple[int, ...] = size, dtype: torch.dtype = dtype) -> tuple[Tensor]:
            return (2 * torch.randn(size, device=DEVICE).to(dtype),)

        sets = some(scores)
        launches = [selecting("conditional-poisson", x, k) for (x,) in sets]
        what = f"{sources} × {k} × {tokens}, {str(dtype)[6:]}"
        yield compared(what, poisson, SELECTION, launches, sets[0][0].nbytes, rate)
        del launches, sets
        torch.cuda.empty_cache()


def main() -> None:
    """Measure, print tables and write JSON."""
    parts = {"products": products, "attention": attention, "selection": selection}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *parts], metavar="PART")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"machine": {"card": torch.cuda.get_device_name()}}
    for name in arguments.parts or parts:
        results[name] = []
        for rows in parts[name]():
            results[name] += rows
            print(f"\n{table(rows)}", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
