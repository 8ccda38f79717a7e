"""From a plan to a full store: what is missing is computed, and kept as it comes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cpsbs.experiments.cells import Cell
from cpsbs.experiments.compute import Subjects, Worker
from cpsbs.experiments.engines import Pool, computed
from cpsbs.experiments.plan import Subject
from cpsbs.experiments.store import Store
from cpsbs.text import EMBEDDED, embedded_models


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
    """What tells this model and test set from others."""
    texts = json.dumps([list(subjects.sources), list(subjects.references)])
    name = subjects.model
    folder = EMBEDDED / name if name in embedded_models() else Path(name)
    return Subject(
        model=folder.name if folder.is_dir() else name,
        model_fingerprint=_fingerprint(folder) if folder.is_dir() else f"hub:{name}",
        texts_fingerprint=hashlib.sha256(texts.encode()).hexdigest()[:16],
        sentences=len(subjects.sources),
        devices=devices,
    )


def _fingerprint(folder: Path) -> str:
    """Of the files that make a model what it is."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in (".json", ".safetensors"):
            digest.update(file.name.encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


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
