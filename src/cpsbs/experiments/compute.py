"""Computes the rows of a cell, with one method for each kind of cell."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from cpsbs.designs import Design, design_named
from cpsbs.designs.diverse import Diverse
from cpsbs.estimation.estimate import estimate
from cpsbs.estimation.functions import Bleu, Entropy
from cpsbs.estimation.inclusion import Models, hindsight_inclusion
from cpsbs.estimation.metrics import diversity, sentence_bleu
from cpsbs.estimation.weights import WeightWarning
from cpsbs.experiments.cells import Cell, look_up
from cpsbs.experiments.enumeration import inclusion, tempered
from cpsbs.experiments.plan import CPU
from cpsbs.experiments.store import Row
from cpsbs.extras import silence_transformers
from cpsbs.models.table import TableModel
from cpsbs.search.api import search
from cpsbs.search.beams import Beams
from cpsbs.text import TextModel, load

SEARCHES_AT_ONCE = {"cpu": 64, "cuda": 512}
"""The number of searches of hindsight importance sampling in a batch, by type of device."""


@dataclass(frozen=True)
class Subjects:
    """The model and the test set, which are sent to every worker."""

    model: str
    device: str | None
    dtype: str | None
    trust_remote_code: bool
    sources: Sequence[str]
    references: Sequence[str]
    gguf_file: str | None = None


class Worker:
    """Computes cells; it loads the model once, when a cell first needs it."""

    facts = None
    """Nothing that is known before the model is loaded."""

    def __init__(self, subjects: Subjects, threads: int | None = None) -> None:
        self.subjects = subjects
        silence_transformers()
        if threads is not None:
            torch.set_num_threads(threads)

    @cached_property
    def model(self) -> TextModel:
        """The model, on the device of the subjects."""
        return self._load(self.subjects.device)

    @cached_property
    def _model_on_cpu(self) -> TextModel:
        """The model on a CPU, for times there when everything else is computed on a GPU."""
        return self._load("cpu")

    def _load(self, device: str | None) -> TextModel:
        s = self.subjects
        return load(
            s.model,
            device=device,
            dtype=s.dtype,
            trust_remote_code=s.trust_remote_code,
            gguf_file=s.gguf_file,
        )

    def _by_length(self, count: int) -> list[int]:
        """Return the numbers of so many sentences, evenly spread over the test set, by length."""
        texts = self.subjects.sources
        chosen = [i * len(texts) // count for i in range(count)]
        return sorted(chosen, key=lambda i: (len(texts[i]), i))

    def compute(self, cell: Cell) -> tuple[list[Row], float]:
        """Return the rows of a cell, and how many seconds computing them took.

        Raises:
            ValueError: if the kind of the cell is unknown.
        """
        kinds = {
            "estimates": self._estimates,
            "diversity": self._diversity,
            "runtime": self._runtime,
            "hindsight": self._hindsight,
            "enumerated": self._enumerated,
        }
        start = time.perf_counter()
        with warnings.catch_warnings():
            # Weights that are far from one are among the paper's results.
            warnings.simplefilter("ignore", WeightWarning)
            rows = look_up("kind", cell.kind, kinds)(cell)
        return rows, time.perf_counter() - start

    def _beams(
        self,
        cell: Cell,
        numbers: Sequence[int],
        design: str | Design,
        model: TextModel | None = None,
        **keep: Any,
    ) -> Beams:
        settings = cell.settings
        return (model or self.model).beams(
            [self.subjects.sources[i] for i in numbers],
            settings["k"],
            design,
            max_length=settings["max_length"],
            temperature=settings["temperature"],
            nucleus=settings.get("nucleus"),
            seed=cell.seed,
            **keep,
        )

    def _estimates(self, cell: Cell) -> list[Row]:
        """Estimate the expected BLEU and entropy of a sentence, in independent repeats."""
        settings = cell.settings
        first, last = settings["repeats"]
        count, line = last - first, settings["line"]
        beams = self._beams(cell, [line] * count, settings["design"], entropy=True)
        rows: list[Row] = []
        functions = {
            "BLEU": Bleu([self.subjects.references[line]] * count),
            "entropy": Entropy(),
            "entropy RB": Entropy(rao_blackwell=True),
        }
        for name, f in functions.items():
            for normalized in (False, True):
                result = estimate(beams, f, normalize=normalized, decode=self.model.decode)
                rows += [
                    {
                        "f": name,
                        "normalized": normalized,
                        "repeat": first + i,
                        "value": value,
                        "sum_of_weights": weight,
                    }
                    for i, (value, weight) in enumerate(
                        zip(result.value.tolist(), result.sum_of_weights.tolist(), strict=True)
                    )
                ]
        return rows

    def _diversity(self, cell: Cell) -> list[Row]:
        """Measure how diverse, and how good, the translations of some sentences are."""
        settings = cell.settings
        numbers = self._by_length(settings["of"])[slice(*settings["ranks"])]
        design = settings["design"]
        chosen = Diverse(settings["strength"]) if design == "diverse" else design_named(design)
        beams = self._beams(cell, numbers, chosen)
        rows = []
        for b, (number, texts) in enumerate(zip(numbers, self.model.texts(beams), strict=True)):
            reference = self.subjects.references[number]
            score = {text: sentence_bleu(text, reference) for text in set(texts)}
            scores = [score[text] for text in texts]
            rows.append(
                {
                    "line": number,
                    "diversity": diversity(beams.tokens(b)),
                    "distinct": len(set(map(tuple, beams.tokens(b)))),
                    "min": min(scores),
                    "mean": statistics.fmean(scores),
                    "max": max(scores),
                }
            )
        return rows

    def _runtime(self, cell: Cell) -> list[Row]:
        """Measure how many seconds it takes to decode each sentence by itself."""
        settings = cell.settings
        other_device = settings["device"].startswith(CPU) and self.subjects.device != "cpu"
        model = self._model_on_cpu if other_device else self.model
        rows = []
        self._beams(cell, settings["lines"][:1], settings["design"], model)  # warm-up
        for repeat in range(settings["repeats"]):
            for line in settings["lines"]:
                start = time.perf_counter()
                beams = self._beams(cell, [line], settings["design"], model)
                if beams.log_prob.is_cuda:
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - start
                rows.append({"line": line, "repeat": repeat, "seconds": seconds})
        return rows

    def _hindsight(self, cell: Cell) -> list[Row]:
        """Estimate expected BLEU with π from M hindsight runs, or from the own path (M = 0)."""
        settings = cell.settings
        count = settings["repeats"]
        texts = [self.subjects.sources[settings["line"]]] * count
        beams = self._beams(cell, [settings["line"]] * count, "conditional-poisson")
        f = Bleu([self.subjects.references[settings["line"]]] * count)
        rows: list[Row] = []
        found = _hindsight_by_runs(self.model.repeated(texts), beams, settings["runs"], cell.seed)
        for runs, log_pi in [(0, None), *found]:
            for normalized in (False, True):
                result = estimate(
                    beams,
                    f,
                    normalize=normalized,
                    log_inclusion=log_pi,
                    decode=self.model.decode,
                )
                rows += [
                    {"runs": runs, "normalized": normalized, "repeat": i, "value": value}
                    for i, value in enumerate(result.value.tolist())
                ]
        return rows

    def _enumerated(self, cell: Cell) -> list[Row]:
        """Compute π on a table model: along the own path, in hindsight, and exactly."""
        settings = cell.settings
        k, length = settings["k"], 4
        one = tempered(TableModel.random(4, length, seed=1), settings["temperature"])
        truth = inclusion(one, k, length)

        def models(numbers: torch.Tensor) -> TableModel:
            return TableModel(one.tables * len(numbers), one.eos[0])

        beams = search(
            models(torch.arange(settings["repeats"])),
            k,
            "conditional-poisson",
            max_length=length,
            generator=cell.seed,
        )
        assert beams.log_inclusion is not None
        rows: list[Row] = []
        found = _hindsight_by_runs(models, beams, settings["runs"], cell.seed)
        for runs, log_pi in [(0, beams.log_inclusion), *found]:
            for b in range(len(beams)):
                for i, y in enumerate(beams.tokens(b)):
                    value = math.exp(float(log_pi[b, i]))
                    rows.append(
                        {"runs": runs, "repeat": b, "value": value, "truth": truth[tuple(y)]}
                    )
        return rows


def _hindsight_by_runs(
    models: Models, beams: Beams, most: int, seed: int
) -> list[tuple[int, torch.Tensor]]:
    """Return log π^IS from the first M of ``most`` independent runs, for M = 1, 2, 4, and so on."""
    device = beams.log_prob.device
    found = hindsight_inclusion(
        models,
        beams,
        most,
        generator=torch.Generator(device).manual_seed(seed + 1),
        batch_size=SEARCHES_AT_ONCE[device.type],
    )
    assert found.log_runs is not None
    several = [m for m in range(1, most + 1) if m & (m - 1) == 0]
    return [(m, found.log_runs[..., :m].logsumexp(-1) - math.log(m)) for m in several]
