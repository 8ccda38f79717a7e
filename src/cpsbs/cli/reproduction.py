"""Carries out ``cpsbs reproduce``: from its options to cells, results and a report."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from rich.console import Console

from cpsbs.cli.batches import progress_bar
from cpsbs.cli.inputs import read_lines
from cpsbs.cli.options import EngineName
from cpsbs.cli.terminal import visible
from cpsbs.experiments.cells import Cell, look_up
from cpsbs.experiments.claims import Claim, claims
from cpsbs.experiments.compute import Subjects, Worker
from cpsbs.experiments.plan import CPU, EXPERIMENTS, FULL, QUICK, Scale, Subject, plan
from cpsbs.experiments.report import QUICK_RUN, write_report
from cpsbs.experiments.running import fill, seconds_needed, subject_of
from cpsbs.experiments.store import Store
from cpsbs.extras import required
from cpsbs.workers import Pool, ProcessPool, RayPool

WORKERS_ON_A_GPU = 4


@dataclass(frozen=True)
class Reproduction:
    """One run of ``cpsbs reproduce``; the fields are its options."""

    experiments: Sequence[str]
    out: Path
    quick: bool
    source: Path | None
    reference: Path | None
    test_set: str
    languages: str
    lines: str | None
    sentences: int | None
    model: str
    device: str | None
    dtype: str | None
    gguf_file: str | None
    trust_remote_code: bool
    engine: EngineName
    address: str | None
    workers: int | None

    def run(self, dry_run: bool = False, plot_only: bool = False) -> None:
        """Compute the cells that are missing, and report on all experiments that are complete.

        Args:
            dry_run: only print how many cells are missing, and how long they take.
            plot_only: compute nothing.
        """
        if not dry_run:
            required("matplotlib", "plots")  # before hours of work, not after them
        names = self._names
        scale, subjects = self._scale, self._subjects
        subject = subject_of(subjects, self._devices)
        cells = plan(names, scale, subject)
        store = Store(self.out)
        missing = [cell for cell in cells if not store.has(cell)]
        for phrase in store.unusable(cells):
            _say(f"{phrase}; it {'is left out' if plot_only else 'must be computed again'}.")
        if dry_run:
            worker = Worker(subjects, self._threads(timed=False))
            seconds = seconds_needed(store, cells, worker) / self._workers
            _say(
                f"{len(cells):,} cells, {len(missing):,} to compute: about {_duration(seconds)} "
                f"with {self._workers} workers."
            )
            return
        if not plot_only and missing:
            self._compute(store, cells, missing)
        complete = [
            name for name in names if all(store.has(cell) for cell in plan([name], scale, subject))
        ]
        if not complete:
            raise ValueError(
                f"{self.out} has no complete experiment to plot; leave out --plot-only"
            )
        incomplete = [name for name in names if name not in complete]
        file, found = self._report(store, complete, subject)
        note = f" (not complete: {', '.join(incomplete)})" if incomplete else ""
        _say(f"{self._verdicts(found)} {file}{note}")

    def _compute(self, store: Store, cells: Sequence[Cell], missing: Sequence[Cell]) -> None:
        with progress_bar(wanted=True) as bar:
            hypotheses = bar.add_task("", total=sum(cell.effort for cell in missing))
            for cell in fill(store, cells, self._pool, self._workers):
                bar.advance(hypotheses, cell.effort)

    def _report(
        self, store: Store, complete: Sequence[str], subject: Subject
    ) -> tuple[Path, list[Claim]]:
        """Write the report, and return its path and the claims in it."""
        # Incomplete experiments are left out: a part of a baseline would look like all of it.
        plotted = plan(complete, self._scale, subject)
        if "runtime" in complete:
            others = tuple(name for name in store.devices() if name not in subject.devices)
            elsewhere = plan(["runtime"], self._scale, replace(subject, devices=others))
            for phrase in store.unusable(elsewhere):
                _say(f"{phrase}; it is left out.")
            plotted += elsewhere
        rows = store.rows(plotted)
        found = claims(complete, rows, self._scale)
        settings = {"scale": asdict(self._scale), "subject": asdict(subject)}
        file = write_report(self.out, complete, rows, self._scale, found, settings, self.quick)
        return file, found

    def _verdicts(self, found: Sequence[Claim]) -> str:
        """Return how many claims hold, as a sentence that says whether this was a quick run."""
        counts = Counter(claim.verdict for claim in found)
        judged = [f"{counts[verdict]} {verdict}" for verdict in ("yes", "partly", "no")]
        label = f" ({QUICK_RUN})" if self.quick else ""
        return f"Claims that hold{label}: {', '.join(judged)}. See"

    @cached_property
    def _names(self) -> list[str]:
        """The experiments to run, in the order in which they are reported."""
        for name in self.experiments:
            look_up("experiment", name, EXPERIMENTS)
        return [name for name in EXPERIMENTS if not self.experiments or name in self.experiments]

    @cached_property
    def _scale(self) -> Scale:
        scale = QUICK if self.quick else FULL
        if self.sentences is not None:
            scale = replace(scale, decoding_sentences=self.sentences)
        if self.lines is not None:
            scale = replace(scale, lines=_numbers(self.lines))
        count = len(self._subjects.sources)
        if max(scale.lines) >= count:
            given = "--lines asks for" if self.lines else "by default the experiments use"
            raise ValueError(
                f"the test set has {count} sentences, but {given} number {max(scale.lines)}, "
                f"counted from 0; choose others with --lines, from 0 to {count - 1}"
            )
        return scale

    @cached_property
    def _subjects(self) -> Subjects:
        sources, references = self._texts()
        return Subjects(
            self.model,
            self._device,
            self.dtype,
            self.trust_remote_code,
            sources,
            references,
            self.gguf_file,
        )

    def _texts(self) -> tuple[list[str], list[str]]:
        """Return the sentences of the test set, and their references."""
        source, reference = self.source, self.reference
        if (source is None) != (reference is None):
            raise ValueError("--source and --reference belong together; give both")
        if source is None or reference is None:
            utils = required("sacrebleu", "metrics").utils
            try:
                source = Path(utils.get_source_file(self.test_set, self.languages))
                reference = Path(utils.get_reference_files(self.test_set, self.languages)[0])
            except (Exception, SystemExit) as error:
                raise ValueError(
                    f"sacrebleu could not get --test-set {self.test_set} --languages "
                    f"{self.languages} ({type(error).__name__}); give --source and --reference"
                ) from error
        texts, references = (
            [str(line) for line in read_lines(file, option)]
            for file, option in ((source, "--source"), (reference, "--reference"))
        )
        if not texts or len(texts) != len(references):
            raise ValueError(
                f"there are {len(references)} references for {len(texts)} texts; give one per text"
            )
        return texts, references

    @property
    def _device(self) -> str:
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def _devices(self) -> tuple[str, ...]:
        """The names of the devices that time is measured on: a CPU always, as in the paper."""
        threads, processors = self._threads(timed=True), _processors()
        note = "" if threads == processors else f", {threads} threads"
        on_cpu = f"{CPU}, {processors} processors{note}"
        if not self._device.startswith("cuda"):
            return (on_cpu,)
        return (str(torch.cuda.get_device_name(torch.device(self._device))), on_cpu)

    @property
    def _workers(self) -> int:
        if self.workers is not None:
            return self.workers
        if self._device.startswith("cuda"):
            return WORKERS_ON_A_GPU
        return max(1, _processors() // self._threads(timed=False))

    def _threads(self, timed: bool) -> int:
        """Return the number of threads of a worker, which the number of workers must not change.

        The number of threads changes the order in which sums are computed, hence their last digits.
        """
        first, *_ = re.findall(r"[1-9]\d*", os.environ.get("OMP_NUM_THREADS", "")) or [None]
        if first is not None:
            return int(first)
        return _processors() if timed else 1

    def _pool(self, timed: bool) -> Pool:
        """Return workers; time is measured on this machine, whose name stands in the results."""
        threads = self._threads(timed)
        make = partial(Worker, self._subjects, threads)
        if self.engine is EngineName.local or timed:
            return ProcessPool(make)
        gpus = 1 / self._workers if self._device.startswith("cuda") else 0.0
        return RayPool(make, threads, gpus, self.address)


def _numbers(lines: str) -> tuple[int, ...]:
    """Return the numbers in the value of ``--lines``."""
    if not re.fullmatch(r"\s*\d{1,9}\s*(,\s*\d{1,9}\s*)*", lines):
        raise ValueError(
            f"--lines is {lines!r}; it must be numbers of sentences, counted from 0, separated by "
            "commas, such as 7,42,100"
        )
    return tuple(dict.fromkeys(int(number) for number in lines.split(",")))


def _say(message: str) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)
    console.print(visible(message))


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
