"""What comes out of a cell: one function for each kind."""

from __future__ import annotations

import math
import statistics
import time
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
from cpsbs.experiments.cells import Cell, entry_of
from cpsbs.experiments.enumeration import inclusion, tempered
from cpsbs.experiments.plan import CPU
from cpsbs.experiments.store import Row
from cpsbs.extras import silence_transformers
from cpsbs.models.table import TableModel
from cpsbs.search.beams import Beams
from cpsbs.search.recursion import search
from cpsbs.text import TextModel, load

SEARCHES_AT_ONCE = {"cpu": 64, "cuda": 512}
"""Of hindsight importance sampling."""


@dataclass(frozen=True)
class Subjects:
    """What a worker needs to know: the model and the test set. It travels to other processes."""

    model: str
    device: str | None
    dtype: str | None
    trust_remote_code: bool
    sources: Sequence[str]
    references: Sequence[str]


class Worker:
    """Computes cells; the model is loaded once, when the first cell needs it."""

    def __init__(self, subjects: Subjects, threads: int | None = None) -> None:
        self.subjects = subjects
        silence_transformers()
        if threads is not None:
            torch.set_num_threads(threads)

    @cached_property
    def model(self) -> TextModel:
        """The model."""
        return self._load(self.subjects.device)

    @cached_property
    def _model_on_cpu(self) -> TextModel:
        """For times on a CPU where all else is computed on a GPU."""
        return self._load("cpu")

    def _load(self, device: str | None) -> TextModel:
        s = self.subjects
        return load(s.model, device=device, dtype=s.dtype, trust_remote_code=s.trust_remote_code)

    def _by_length(self, count: int) -> list[int]:
        """Numbers of so many sentences, spread evenly over the test set, the shortest first."""
        texts = self.subjects.sources
        chosen = [i * len(texts) // count for i in range(count)]
        return sorted(chosen, key=lambda i: (len(texts[i]), i))

    def compute(self, cell: Cell) -> tuple[list[Row], float]:
        """Return the rows of a cell, and how many seconds it took.

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
        rows = entry_of("kind", cell.kind, kinds)(cell)
        return rows, time.perf_counter() - start

    def _beams(
        self,
        cell: Cell,
        numbers: Sequence[int],
        design: str | Design,
        model: TextModel | None = None,
        **keep: Any,
    ) -> Beams:
        made = cell.settings
        return (model or self.model).beams(
            [self.subjects.sources[i] for i in numbers],
            made["k"],
            design,
            max_length=made["max_length"],
            temperature=made["temperature"],
            nucleus=made.get("nucleus"),
            seed=cell.seed,
            **keep,
        )

    def _estimates(self, cell: Cell) -> list[Row]:
        """Expected BLEU and entropy of a sentence, by independent repeats of a search."""
        made = cell.settings
        first, last = made["repeats"]
        count, line = last - first, made["line"]
        beams = self._beams(cell, [line] * count, made["design"], entropy=True)
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
        """How different, and how good, the translations of some sentences are."""
        made = cell.settings
        numbers = self._by_length(made["of"])[slice(*made["ranks"])]
        design = made["design"]
        chosen = Diverse(made["strength"]) if design == "diverse" else design_named(design)
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
        """Seconds to decode a sentence by itself."""
        made = cell.settings
        elsewhere = made["device"].startswith(CPU) and self.subjects.device != "cpu"
        model = self._model_on_cpu if elsewhere else self.model
        rows = []
        self._beams(cell, made["lines"][:1], made["design"], model)  # what is loaded on first use
        for repeat in range(made["repeats"]):
            for line in made["lines"]:
                start = time.perf_counter()
                beams = self._beams(cell, [line], made["design"], model)
                if beams.log_prob.is_cuda:
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - start
                rows.append({"line": line, "repeat": repeat, "seconds": seconds})
        return rows

    def _hindsight(self, cell: Cell) -> list[Row]:
        """Expected BLEU with π by hindsight importance sampling from M runs; M = 0: own path."""
        made = cell.settings
        count = made["repeats"]
        texts = [self.subjects.sources[made["line"]]] * count
        beams = self._beams(cell, [made["line"]] * count, "conditional-poisson")
        f = Bleu([self.subjects.references[made["line"]]] * count)
        rows: list[Row] = []
        found = _hindsight_by_runs(self.model.repeated(texts), beams, made["runs"], cell.seed)
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
        """π of the sequences of beams on a table: own path, hindsight, and the truth."""
        made = cell.settings
        k, length = made["k"], 4
        one = tempered(TableModel.random(4, length, seed=1), made["temperature"])
        truth = inclusion(one, k, length)

        def models(numbers: torch.Tensor) -> TableModel:
            return TableModel(one.tables * len(numbers), one.eos[0])

        beams = search(
            models(torch.arange(made["repeats"])), k, max_length=length, generator=cell.seed
        )
        assert beams.log_inclusion is not None
        rows: list[Row] = []
        found = _hindsight_by_runs(models, beams, made["runs"], cell.seed)
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
    """Log π^IS from the first M of independent runs, for M = 1, 2, 4, … up to ``most``."""
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
