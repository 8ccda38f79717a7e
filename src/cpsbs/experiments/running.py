"""Computes the planned cells that the store does not have, and stores each when it is done."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from cpsbs.experiments.cells import Cell
from cpsbs.experiments.compute import Subjects, Worker
from cpsbs.experiments.engines import compute_cells
from cpsbs.experiments.plan import Subject
from cpsbs.experiments.store import Store
from cpsbs.fingerprint import model_fingerprint
from cpsbs.loading import configuration, dtype_on
from cpsbs.workers import Pool

AS_STORED = "as stored"
"""The dtype of a model whose configuration does not state it; its fingerprint covers it."""


def fill(
    store: Store, cells: Sequence[Cell], make_pool: Callable[[bool], Pool], workers: int
) -> Iterator[Cell]:
    """Compute the cells that are missing, and yield each when it is stored.

    Cells that measure time come last, one at a time.

    Args:
        store: where results are found and stored.
        cells: the cells to compute.
        make_pool: takes whether the cells measure time, and returns the workers.
        workers: the number of workers for cells that do not measure time.
    """
    missing = [cell for cell in cells if not store.has(cell)]
    timed = [cell for cell in missing if cell.kind == "runtime"]
    others = [cell for cell in missing if cell.kind != "runtime"]
    for part, count, is_timed in ((others, workers, False), (timed, 1, True)):
        if part:
            for cell, done in compute_cells(make_pool(is_timed), part, count):
                store.write(cell, done.rows, done.seconds)
                yield cell


def subject_of(subjects: Subjects, devices: tuple[str, ...]) -> Subject:
    """Return what identifies this model and test set.

    Only the configuration of the model is loaded; the files of a folder are read for a fingerprint.

    Raises:
        ValueError: if there is no such model or dtype.
    """
    texts = json.dumps([list(subjects.sources), list(subjects.references)])
    name = subjects.model
    config = configuration(name, subjects.trust_remote_code, subjects.gguf_file)
    stored = getattr(config, "dtype", None) or AS_STORED

    def computed_in(device: str) -> str:
        dtype = dtype_on(torch.device(device), subjects.dtype)
        return str(stored if dtype == "auto" else dtype).removeprefix("torch.")

    on_cpu, on_gpu = computed_in("cpu"), computed_in("cuda")
    device = subjects.device or ("cuda" if torch.cuda.is_available() else "cpu")
    file = "" if subjects.gguf_file is None else f"/{subjects.gguf_file}"
    return Subject(
        model=(Path(name).name if Path(name).is_dir() else name) + file,
        model_fingerprint=model_fingerprint(name + file, config),
        texts_fingerprint=hashlib.sha256(texts.encode()).hexdigest()[:16],
        sentences=len(subjects.sources),
        devices=devices,
        dtype=on_cpu if torch.device(device).type == "cpu" else on_gpu,
        cpu_dtype=on_cpu,
        gpu_dtype=on_gpu,
    )


def seconds_needed(store: Store, cells: Sequence[Cell], worker: Worker) -> float:
    """Return about how long the missing cells take, one after the other.

    The estimate is based on the stored cells of the same kind, or else on two small ones that are
    computed for this purpose and not stored.
    """
    missing = [cell for cell in cells if not store.has(cell)]
    done = [cell for cell in cells if store.has(cell)]
    total = 0.0
    for kind in {cell.kind for cell in missing}:
        mine = [cell for cell in missing if cell.kind == kind]
        known = [(cell.effort, store.seconds(cell)) for cell in done if cell.kind == kind]
        if len(known) < 4:
            trial = sorted(mine, key=lambda cell: cell.effort)
            trial = [trial[0], trial[len(trial) // 2]]
            known += [(cell.effort, worker.compute(cell)[1]) for cell in trial]
        fixed, rate = _line(known)
        total += sum(fixed + rate * cell.effort for cell in mine)
    return total


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit seconds = fixed + rate · effort by least squares, with neither below zero."""
    n = len(points)
    x, y = (sum(values) / n for values in zip(*points, strict=True))
    spread = sum((a - x) ** 2 for a, _ in points)
    rate = sum((a - x) * (b - y) for a, b in points) / spread if spread else 0.0
    rate = min(max(rate, 0.0), y / x)
    return y - rate * x, rate
