"""From a plan to a full store: what is missing is computed, and kept as it comes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from cpsbs.experiments.cells import Cell
from cpsbs.experiments.compute import Subjects, Worker
from cpsbs.experiments.engines import Pool, computed
from cpsbs.experiments.plan import Subject
from cpsbs.experiments.store import Store
from cpsbs.fingerprint import model_fingerprint
from cpsbs.loading import configuration, dtype_on

AS_STORED = "as stored"
"""The dtype of a model whose configuration does not tell it; the model's fingerprint does."""


def fill(
    store: Store, cells: Sequence[Cell], make_pool: Callable[[int], Pool], workers: int
) -> Iterator[Cell]:
    """Compute the cells that are not there; those that measure time one by one, at the end.

    ``make_pool`` takes how many workers share the machine. Yields each cell when it is kept.
    """
    missing = [cell for cell in cells if not store.has(cell)]
    timed = [cell for cell in missing if cell.kind == "runtime"]
    others = [cell for cell in missing if cell.kind != "runtime"]
    for part, count in ((others, workers), (timed, 1)):
        if part:
            for cell, done in computed(make_pool(count), part, count):
                store.write(cell, done.rows, done.seconds)
                yield cell


def subject_of(subjects: Subjects, devices: tuple[str, ...]) -> Subject:
    """Return what tells this model and test set from others.

    Of the model only the configuration is loaded, and the files of a folder are read.

    Raises:
        ValueError: if there is no such model or dtype.
    """
    texts = json.dumps([list(subjects.sources), list(subjects.references)])
    name = subjects.model
    config = configuration(name, subjects.trust_remote_code)
    stored = getattr(config, "dtype", None) or AS_STORED

    def computed_in(device: str) -> str:
        dtype = dtype_on(torch.device(device), subjects.dtype)
        return str(stored if dtype == "auto" else dtype).removeprefix("torch.")

    on_cpu, on_gpu = computed_in("cpu"), computed_in("cuda")
    device = subjects.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Subject(
        model=Path(name).name if Path(name).is_dir() else name,
        model_fingerprint=model_fingerprint(name, config),
        texts_fingerprint=hashlib.sha256(texts.encode()).hexdigest()[:16],
        sentences=len(subjects.sources),
        devices=devices,
        dtype=on_cpu if torch.device(device).type == "cpu" else on_gpu,
        cpu_dtype=on_cpu,
        gpu_dtype=on_gpu,
    )


def seconds_needed(store: Store, cells: Sequence[Cell], worker: Worker) -> float:
    """About how long the missing cells take one after the other.

    By the cells that are there, of the same kind; else by two small ones, computed to see.
    """
    missing = [cell for cell in cells if not store.has(cell)]
    done = [cell for cell in cells if store.has(cell)]
    total = 0.0
    for kind in {cell.kind for cell in missing}:
        mine = [cell for cell in missing if cell.kind == kind]
        seen = [(cell.effort, store.seconds(cell)) for cell in done if cell.kind == kind]
        if len(seen) < 4:
            trial = sorted(mine, key=lambda cell: cell.effort)
            trial = [trial[0], trial[len(trial) // 2]]
            seen += [(cell.effort, worker.compute(cell)[1]) for cell in trial]
        fixed, rate = _line(seen)
        total += sum(fixed + rate * cell.effort for cell in mine)
    return total


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds = fixed + rate · effort, neither below zero, by least squares."""
    n = len(points)
    x, y = (sum(values) / n for values in zip(*points, strict=True))
    spread = sum((a - x) ** 2 for a, _ in points)
    rate = sum((a - x) * (b - y) for a, b in points) / spread if spread else 0.0
    rate = min(max(rate, 0.0), y / x)
    return y - rate * x, rate
