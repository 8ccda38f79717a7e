"""Lists the cells that each experiment needs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cpsbs import __version__
from cpsbs.experiments.cells import Cell, look_up

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
"""The designs whose estimates are compared."""

DECODERS = (
    "conditional-poisson",
    "gumbel-top-k",
    "diverse",
    "independent",
    "arithmetic",
    "stratified",
)
"""The designs whose sets of translations are compared."""

CPU = "CPU"
"""The beginning of a device name that means a CPU; all other devices are GPUs."""


@dataclass(frozen=True)
class Scale:
    """The size of the experiments: sentences, temperatures, sample sizes and repeats."""

    lines: tuple[int, ...] = (1500, 2000, 2500)
    """Sentences to make estimates for, counted from 0 as in the paper's code."""
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
    """The number of sentences to decode for ``diversity``; all if None."""
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
"""A small version of every experiment, whose verdicts are not reliable."""


@dataclass(frozen=True)
class Subject:
    """The model and the test set of the experiments, which fingerprints identify."""

    model: str
    model_fingerprint: str
    texts_fingerprint: str
    sentences: int
    devices: tuple[str, ...]
    """The names of the devices that time is measured on; other results do not depend on them."""
    dtype: str
    """The dtype that the model computes in, except for times."""
    cpu_dtype: str
    """The dtype for times on a CPU."""
    gpu_dtype: str
    """The dtype for times on a GPU."""

    def settings(self, dtype: str | None = None) -> dict[str, Any]:
        """Return the settings of every cell that uses the model, with another dtype if given.

        The device is not among them. A CPU and a GPU round in different ways and draw different
        random numbers, but both estimate the same quantities of the same model, so that a run may
        start on one and continue on the other with the same dtype. Only times depend on the device.
        """
        return {
            "model": self.model,
            "model_fingerprint": self.model_fingerprint,
            "texts_fingerprint": self.texts_fingerprint,
            "dtype": dtype or self.dtype,
            "version": __version__,
        }

    def settings_on(self, device: str) -> dict[str, Any]:
        """Return the settings of a cell that measures time on a device."""
        dtype = self.cpu_dtype if device.startswith(CPU) else self.gpu_dtype
        return self.settings(dtype) | {"device": device}


def plan(experiments: Iterable[str], scale: Scale, subject: Subject) -> list[Cell]:
    """Return every cell that is needed, once; cells that measure time come last.

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
        for cell in look_up("experiment", experiment, makers)(scale, subject):
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
    # Cells of one shape are adjacent, because a worker keeps the buffers of the last few shapes.
    blocks = range(0, count, scale.decoding_block)
    for first, k, design in itertools.product(blocks, scale.decoding_sizes, DECODERS):
        last = min(first + scale.decoding_block, count)
        for temperature in scale.decoding_temperatures:
            settings = {
                # Ranks by length, so that the sentences of a block have similar lengths.
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
                # These are computed on a table model, whatever dtype the real model has.
                "dtype": "float64",
                "version": __version__,
            },
            effort=float(scale.repeats * 2 * scale.hindsight_runs),
        )
        for t in scale.temperatures
    ]
    return [*on_model, *enumerated]
