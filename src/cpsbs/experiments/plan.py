"""Which cells the experiments need."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cpsbs import __version__
from cpsbs.experiments.cells import Cell, entry_of

EXPERIMENTS = {
    "bleu": "estimates of expected BLEU against sample size, normalised",
    "bleu-unnormalized": "the same, not normalised",
    "truncation": "CPSBS with and without truncation to 0.99 of the mass",
    "entropy": "estimates of the conditional model entropy against sample size",
    "rmse": "root mean square errors against a baseline, and the baseline's own variance",
    "diversity": "min, mean and max BLEU against n-gram diversity over the test set",
    "runtime": "decoding time against sample size",
    "hindsight": "inclusion probabilities in hindsight against the own path and the truth",
}

ESTIMATORS = (
    "independent",
    "arithmetic",
    "sum-and-sample",
    "gumbel-top-k",
    "conditional-poisson",
    "calibrated",
    "stratified",
)
"""Designs that estimates are compared of."""

DECODERS = (
    "conditional-poisson",
    "gumbel-top-k",
    "diverse",
    "independent",
    "arithmetic",
    "stratified",
)
"""Designs that sets of translations are compared of."""

CPU = "CPU"
"""How the names of processors that time is measured on begin; other names are of GPUs."""


@dataclass(frozen=True)
class Scale:
    """How much of everything."""

    lines: tuple[int, ...] = (1500, 2000, 2500)
    """Sentences of the test set, counted from 0, as the paper's reference code counts."""
    temperatures: tuple[float, ...] = (0.1, 0.2, 0.3, 0.5)
    sizes: tuple[int, ...] = (1, 2, 5, 10, 15, 20)
    repeats: int = 20
    baseline_runs: int = 50
    baseline_size: int = 200
    baseline_block: int = 10
    max_length: int = 100
    decoding_temperatures: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    decoding_sizes: tuple[int, ...] = (5, 10, 20)
    decoding_sentences: int | None = None
    """Of the test set; all if None."""
    decoding_block: int = 128
    runtime_sizes: tuple[int, ...] = (1, 2, 5, 10, 20, 50)
    runtime_repeats: int = 3
    hindsight_runs: int = 32
    hindsight_size: int = 5


FULL = Scale()
QUICK = Scale(
    temperatures=(0.1, 0.5),
    sizes=(2, 5),
    repeats=4,
    baseline_runs=4,
    baseline_size=40,
    baseline_block=4,
    max_length=60,
    decoding_temperatures=(0.1, 0.5),
    decoding_sizes=(5,),
    decoding_sentences=16,
    decoding_block=16,
    runtime_sizes=(2, 5),
    runtime_repeats=1,
    hindsight_runs=4,
    hindsight_size=3,
)
"""A small honest version: everything once, little of each."""


@dataclass(frozen=True)
class Subject:
    """What the experiments are made on; the fingerprints tell models and test sets apart."""

    model: str
    model_fingerprint: str
    texts_fingerprint: str
    sentences: int
    devices: tuple[str, ...]
    """Names of what time is measured on; other results do not depend on it."""
    dtype: str
    """What the model computes in, but for times."""
    cpu_dtype: str
    """What it computes in where time is measured on a CPU."""
    gpu_dtype: str
    """What it computes in where time is measured on a GPU."""

    def settings(self, dtype: str | None = None) -> dict[str, Any]:
        """Return what every cell depends on that uses the model, in its own dtype or another.

        The device is not among it. A CPU and a GPU round in different ways and draw different
        random numbers, but both estimate the same quantities of the same model, so that a run may
        begin on one and go on on the other, given the same dtype. Only times depend on the device.
        """
        return {
            "model": self.model,
            "model_fingerprint": self.model_fingerprint,
            "texts_fingerprint": self.texts_fingerprint,
            "dtype": dtype or self.dtype,
            "version": __version__,
        }

    def settings_on(self, device: str) -> dict[str, Any]:
        """Return what a cell depends on that measures time on a device."""
        dtype = self.cpu_dtype if device.startswith(CPU) else self.gpu_dtype
        return self.settings(dtype) | {"device": device}


def plan(experiments: Iterable[str], scale: Scale, subject: Subject) -> list[Cell]:
    """Return every cell that is needed, once; those that measure time come last.

    Raises:
        ValueError: if an experiment is unknown.
    """
    makers = {
        "bleu": _estimates,
        "bleu-unnormalized": _estimates,
        "entropy": _estimates,
        "truncation": _truncation,
        "rmse": _errors,
        "diversity": _diversity,
        "runtime": _runtime,
        "hindsight": _hindsight,
    }
    found: dict[str, Cell] = {}
    for experiment in experiments:
        for cell in entry_of("experiment", experiment, makers)(scale, subject):
            found.setdefault(cell.name, cell)
    return sorted(found.values(), key=lambda cell: cell.kind == "runtime")


def _estimates(scale: Scale, subject: Subject) -> list[Cell]:
    return [
        _estimates_cell(scale, subject, line, temperature, k, design)
        for line in scale.lines
        for temperature in scale.temperatures
        for k in scale.sizes
        for design in ESTIMATORS
    ]


def _truncation(scale: Scale, subject: Subject) -> list[Cell]:
    return [
        _estimates_cell(scale, subject, line, temperature, k, "conditional-poisson", nucleus)
        for line in scale.lines
        for temperature in scale.temperatures
        for k in scale.sizes
        for nucleus in (None, 0.99)
    ]


def _errors(scale: Scale, subject: Subject) -> list[Cell]:
    return _estimates(scale, subject) + _baseline(scale, subject)


def _baseline(scale: Scale, subject: Subject) -> list[Cell]:
    block = scale.baseline_block
    return [
        Cell(
            "estimates",
            subject.settings()
            | {
                "line": line,
                "temperature": temperature,
                "k": scale.baseline_size,
                "design": "independent",
                "nucleus": None,
                "max_length": scale.max_length,
                "repeats": [first, min(first + block, scale.baseline_runs)],
            },
            effort=float(block * scale.baseline_size),
        )
        for line in scale.lines
        for temperature in scale.temperatures
        for first in range(0, scale.baseline_runs, block)
    ]


def _estimates_cell(
    scale: Scale,
    subject: Subject,
    line: int,
    temperature: float,
    k: int,
    design: str,
    nucleus: float | None = None,
) -> Cell:
    settings = {
        "line": line,
        "temperature": temperature,
        "k": k,
        "design": design,
        "nucleus": nucleus,
        "max_length": scale.max_length,
        "repeats": [0, scale.repeats],
    }
    return Cell("estimates", subject.settings() | settings, effort=float(scale.repeats * k))


def _diversity(scale: Scale, subject: Subject) -> list[Cell]:
    count = min(scale.decoding_sentences or subject.sentences, subject.sentences)
    cells = []
    # Cells of one shape stand together: a worker keeps what it has prepared for the last few.
    blocks = range(0, count, scale.decoding_block)
    for first, k, design in itertools.product(blocks, scale.decoding_sizes, DECODERS):
        last = min(first + scale.decoding_block, count)
        for temperature in scale.decoding_temperatures:
            settings = {
                # In order of length, so that a block's sentences are alike.
                "ranks": [first, last],
                "of": count,
                "k": k,
                "design": design,
                # Diverse beam search has a strength instead of a temperature.
                "temperature": 1.0 if design == "diverse" else temperature,
                "strength": temperature if design == "diverse" else None,
                "max_length": scale.max_length,
            }
            effort = float((last - first) * k)
            cells.append(Cell("diversity", subject.settings() | settings, effort))
    return cells


def _runtime(scale: Scale, subject: Subject) -> list[Cell]:
    return [
        Cell(
            "runtime",
            subject.settings_on(device)
            | {
                "lines": list(scale.lines),
                "k": k,
                "design": design,
                "temperature": 0.3,
                "max_length": scale.max_length,
                "repeats": scale.runtime_repeats,
            },
            effort=float(len(scale.lines) * k * scale.runtime_repeats),
        )
        for device in subject.devices
        for k in scale.runtime_sizes
        for design in (*ESTIMATORS, "top-k", "diverse")
    ]


def _hindsight(scale: Scale, subject: Subject) -> list[Cell]:
    on_model = [
        Cell(
            "hindsight",
            subject.settings()
            | {
                "line": line,
                "temperature": temperature,
                "k": scale.hindsight_size,
                "max_length": scale.max_length,
                "repeats": scale.repeats,
                "runs": scale.hindsight_runs,
            },
            effort=float(scale.repeats * scale.hindsight_size**2 * scale.hindsight_runs),
        )
        for line in scale.lines
        for temperature in scale.temperatures
    ]
    enumerated: Sequence[Cell] = [
        Cell(
            "enumerated",
            {
                "k": 2,
                "temperature": t,
                "repeats": scale.repeats,
                "runs": scale.hindsight_runs,
                # A table in place of the model, whatever that computes in.
                "dtype": "float64",
                "version": __version__,
            },
            effort=float(scale.repeats * 2 * scale.hindsight_runs),
        )
        for t in scale.temperatures
    ]
    return [*on_model, *enumerated]
