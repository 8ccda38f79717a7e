"""``cpsbs reproduce``: the paper's experiments."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from cpsbs.cli.batches import progress_bar
from cpsbs.cli.inputs import read_references, read_texts
from cpsbs.cli.options import INPUT, RESULT, Device, Dtype, ModelName, RemoteCode
from cpsbs.cli.running import errors_told
from cpsbs.experiments.cells import entry_of
from cpsbs.experiments.compute import Subjects, Worker
from cpsbs.experiments.engines import LocalPool, Pool, RayPool
from cpsbs.experiments.plan import CPU, EXPERIMENTS, FULL, QUICK, plan
from cpsbs.experiments.report import write_report
from cpsbs.experiments.running import fill, seconds_needed, subject_of
from cpsbs.experiments.store import Store
from cpsbs.extras import required

WHERE = "Where it runs"


class Engine(StrEnum):
    """Who computes."""

    local = "local"
    ray = "ray"


def reproduce(
    experiments: Annotated[
        list[str] | None,
        typer.Argument(help=f"Some of {', '.join(EXPERIMENTS)}; all if none is named."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Folder for results.", rich_help_panel=RESULT)
    ] = Path("reproduction"),
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Everything once, little of each.", rich_help_panel=RESULT),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say how many cells, and how long.", rich_help_panel=RESULT),
    ] = False,
    draw_only: Annotated[
        bool,
        typer.Option("--draw-only", help="Draw what is there already.", rich_help_panel=RESULT),
    ] = False,
    source: Annotated[
        Path | None, typer.Option(help="Test set, a line each.", rich_help_panel=INPUT)
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Its references.", rich_help_panel=INPUT)
    ] = None,
    test_set: Annotated[
        str, typer.Option(help="Of sacrebleu, if no files are given.", rich_help_panel=INPUT)
    ] = "wmt14/full",
    languages: Annotated[
        str, typer.Option(help="Of the test set.", rich_help_panel=INPUT)
    ] = "en-fr",
    sentences: Annotated[
        int | None,
        typer.Option(min=1, help="For diversity; all if not said.", rich_help_panel=INPUT),
    ] = None,
    model: ModelName = "en-fr",
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: RemoteCode = False,
    engine: Annotated[
        Engine, typer.Option(help="Processes here, or Ray.", rich_help_panel=WHERE)
    ] = Engine.local,
    address: Annotated[
        str | None,
        typer.Option(help="Of a Ray cluster; a local one if not said.", rich_help_panel=WHERE),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="How many; one a processor, or 4 a GPU.", rich_help_panel=WHERE),
    ] = None,
) -> None:
    """The paper's experiments: computed where they are missing, then drawn.

    cpsbs reproduce --quick --source newstest2014.en --reference newstest2014.fr

    cpsbs reproduce diversity --dry-run
    """
    with errors_told():
        names = _named(experiments)
        sources, references = _test_set(source, reference, test_set, languages)
        scale = QUICK if quick else FULL
        if sentences is not None:
            scale = replace(scale, decoding_sentences=sentences)
        if max(scale.lines) >= len(sources):
            raise ValueError(
                f"the test set has {len(sources)} sentences; the experiments need number "
                f"{max(scale.lines)}, counted from 0"
            )
        on = device or ("cuda" if torch.cuda.is_available() else "cpu")
        subjects = Subjects(model, on, dtype, trust_remote_code, sources, references)
        # Time is measured on a CPU too, as in the paper.
        names_of_devices = dict.fromkeys((_device_name(on), _device_name("cpu")))
        subject = subject_of(subjects, tuple(names_of_devices))
        cells = plan(names, scale, subject)
        store = Store(out)
        missing = [cell for cell in cells if not store.has(cell)]
        count = workers or (4 if on.startswith("cuda") else _processors())
        say = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)
        for phrase in store.unusable(cells):
            say.print(f"{phrase}; it {'is left out' if draw_only else 'must be computed again'}.")
        if dry_run:
            seconds = seconds_needed(store, cells, Worker(subjects)) / count
            say.print(
                f"{len(cells):,} cells, {len(missing):,} to compute: about {_duration(seconds)} "
                f"with {count} workers."
            )
            return
        if not draw_only and missing:
            make_pool = partial(_pool, engine, address, subjects, on)
            with progress_bar(wanted=True) as bar:
                hypotheses = bar.add_task("", total=sum(cell.effort for cell in missing))
                for cell in fill(store, cells, make_pool, count):
                    bar.advance(hypotheses, cell.effort)
        complete = [
            name for name in names if all(store.has(cell) for cell in plan([name], scale, subject))
        ]
        if not complete:
            raise ValueError(f"{out} has no complete experiment to draw; leave out --draw-only")
        settings = {"scale": asdict(scale), "subject": asdict(subject)}
        # Baselines and the like of which only a part is there would be drawn as if it were all.
        drawn = plan(complete, scale, subject)
        if "runtime" in complete:
            others = tuple(device for device in store.devices() if device not in subject.devices)
            elsewhere = plan(["runtime"], scale, replace(subject, devices=others))
            for phrase in store.unusable(elsewhere):
                say.print(f"{phrase}; it is left out.")
            drawn += elsewhere
        file = write_report(out, complete, store.rows(drawn), scale, settings)
        left = [name for name in names if name not in complete]
        say.print(f"{file}" + (f" (not complete: {', '.join(left)})" if left else ""))


def _named(experiments: list[str] | None) -> list[str]:
    for name in experiments or []:
        entry_of("experiment", name, EXPERIMENTS)
    return [name for name in EXPERIMENTS if not experiments or name in experiments]


def _test_set(
    source: Path | None, reference: Path | None, name: str, languages: str
) -> tuple[list[str], list[str]]:
    if (source is None) != (reference is None):
        raise ValueError("--source and --reference belong together; give both")
    if source is None or reference is None:
        utils = required("sacrebleu", "metrics").utils
        try:
            source = Path(utils.get_source_file(name, languages))
            reference = Path(utils.get_reference_files(name, languages)[0])
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"sacrebleu could not get {name} {languages} ({type(error).__name__}); give the "
                "lines with --source and --reference"
            ) from error
    texts = read_texts(None, source)
    return texts, read_references(None, reference, len(texts)) or []


def _pool(
    engine: Engine, address: str | None, subjects: Subjects, device: str, workers: int
) -> Pool:
    threads = max(1, _processors() // workers)
    if engine is Engine.local:
        return LocalPool(subjects, threads)
    gpus = 1 / workers if device.startswith("cuda") else 0.0
    return RayPool(subjects, 1, gpus, address)


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(torch.device(device)))
    return f"{CPU}, {_processors()} processors"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
