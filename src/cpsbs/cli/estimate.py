"""Defines ``cpsbs estimate``: expectations under the model, with their errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from cpsbs.cli.batches import default_batch_size
from cpsbs.cli.draws import Draw, ModelChoice, check_draw, chosen_design, draw_with
from cpsbs.cli.engines import chosen_engine
from cpsbs.cli.inputs import read_references, read_texts
from cpsbs.cli.options import (
    DRAW,
    MOST,
    Address,
    Anneal,
    BatchSize,
    Chat,
    Cores,
    DesignName,
    Device,
    Dtype,
    EngineName,
    Estimator,
    File,
    Function,
    Gguf,
    Int8,
    Json,
    K,
    MaxLength,
    Mean,
    ModelName,
    Nucleus,
    Output,
    ReferenceFile,
    References,
    RemoteCode,
    Seed,
    Skip,
    Temperature,
    Texts,
    Where,
    Workers,
)
from cpsbs.cli.ordered import Record
from cpsbs.cli.running import Job, printer, reporting_errors
from cpsbs.cli.source import Batch, Source
from cpsbs.cli.terminal import visible
from cpsbs.designs import DEFAULT_DESIGN, DESIGNS, Design
from cpsbs.estimation.estimate import estimate
from cpsbs.estimation.functions import Bleu, Entropy, Length
from cpsbs.estimation.inclusion import hindsight_inclusion
from cpsbs.estimation.result import Estimate
from cpsbs.randomness import split_seed
from cpsbs.search.more import Progress
from cpsbs.text import TextModel

TOGETHER = 1024
"""The number of records that are turned into tensors together."""


@dataclass(frozen=True)
class EstimateWork:
    """Estimates the expectation of a function for each text."""

    draw: Draw
    function: Function
    estimator: Estimator
    runs: int
    """The number of runs of hindsight importance sampling."""
    repeats: int
    """The number of independent beams per text."""
    plain: bool
    """Whether the entropy is not Rao–Blackwellised."""
    batch_size: int | None
    """The number of texts to compute at once in hindsight; None for what there is room for."""

    def records(
        self, model: TextModel, batches: Iterable[Batch], progress: Progress
    ) -> Iterator[list[Record]]:
        """Yield the records of each batch, in their order."""
        return (self._estimates(model, batch) for batch in batches)

    def _estimates(self, model: TextModel, batch: Batch) -> list[Record]:
        draw, in_hindsight = self.draw, self.estimator.startswith("hindsight")
        joint = draw.needs_joint and self.repeats == 1 and not in_hindsight
        entropy = self.function is Function.entropy and not self.plain
        several = [
            draw.repeated(r).beams(model, batch, joint=joint, entropy=entropy)
            for r in range(self.repeats)
        ]
        inclusion = None
        if in_hindsight:
            k, max_length = draw.settings.k, draw.settings.max_length
            # Every batch has a random stream of its own, apart from those of the texts.
            stream = split_seed(draw.seed, [-1 - batch.numbers[0]], model.model.device)[0]
            inclusion = hindsight_inclusion(
                model.repeated(batch.prompts),
                several[0],
                self.runs,
                draw.settings.design,
                generator=stream,
                batch_size=self.batch_size or default_batch_size(model, k, max_length),
            )
        result = estimate(
            several if self.repeats > 1 else several[0],
            _function(self.function, self.plain, batch.references or []),
            normalize=self.estimator.endswith("normalized"),
            log_inclusion=inclusion,
            decode=model.decode,
        )
        with_runs = {"runs": self.runs} if in_hindsight else {}
        return [
            {"number": i, "text": text, **entry, **with_runs}
            for i, text, entry in zip(batch.numbers, batch.texts, result.to_dicts(), strict=True)
        ]


def estimate_command(
    function: Annotated[
        Function, typer.Argument(help="Function of a sequence whose expectation is estimated.")
    ],
    texts: Texts = None,
    file: File = None,
    chat: Chat = False,
    skip: Skip = False,
    reference: References = None,
    reference_file: ReferenceFile = None,
    k: K = 10,
    design: DesignName = DEFAULT_DESIGN,
    estimator: Annotated[
        Estimator,
        typer.Option(
            help="How sequences are weighted: by p/π along the path of the search, normalised or "
            "not, or with π from hindsight importance sampling (conditional-poisson only).",
            rich_help_panel=DRAW,
        ),
    ] = Estimator.unbiased,
    runs: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST,
            help="Number M of runs of hindsight importance sampling.",
            rich_help_panel=DRAW,
        ),
    ] = 4,
    repeats: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST,
            help="Number of independent beams per text; their spread gives the error.",
            rich_help_panel=DRAW,
        ),
    ] = 1,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", help="Estimate entropy without Rao–Blackwellisation.", rich_help_panel=DRAW
        ),
    ] = False,
    temperature: Temperature = 1.0,
    anneal: Anneal = None,
    nucleus: Nucleus = None,
    max_length: MaxLength = None,
    seed: Seed = 0,
    model: ModelName = "en-fr",
    device: Device = None,
    dtype: Dtype = None,
    gguf: Gguf = None,
    int8: Int8 = False,
    trust_remote_code: RemoteCode = False,
    batch_size: BatchSize = None,
    engine: Where = EngineName.local,
    address: Address = None,
    workers: Workers = None,
    cores: Cores = None,
    output: Output = None,
    mean: Mean = False,
    json_lines: Json = False,
) -> None:
    """Estimate an expectation under the model for each text, with its error and signature.

    cpsbs estimate entropy "A man rides a bicycle." -k 20

    cpsbs estimate bleu --file english.txt --reference-file french.txt --temperature 0.3 --mean
    """
    with reporting_errors():
        check_draw(k, temperature, nucleus, max_length, seed)
        chosen = chosen_design(design, anneal)
        found = read_texts(texts, file, skip)
        source = Source(found, read_references(reference, reference_file, found), chat, skip)
        in_hindsight = estimator.startswith("hindsight")
        with_references = source.references is not None
        _check_estimate(function, with_references, chosen, in_hindsight, repeats, plain)
        settings: Record = {"command": "estimate", "function": function, "estimator": estimator}
        settings |= {"runs": runs, "repeats": repeats, "plain": plain, "chat": chat}
        collected = _Collected()

        def line(record: Record) -> str:
            return visible(f"{record['number'] + 1}: {record['line']}")

        def print_mean() -> None:
            record = collected.estimate().mean().to_dicts()[0]
            printer(json_lines, lambda shown: visible(shown["line"]))(record)

        choice = ModelChoice(model, device, dtype, trust_remote_code, gguf, int8)
        with closing(chosen_engine(choice, engine, address, workers, cores)) as computing:
            loaded = computing.model
            draw = draw_with(loaded, k, chosen, temperature, nucleus, max_length, seed)
            Job(
                draw,
                computing,
                EstimateWork(draw, function, estimator, runs, repeats, plain, batch_size),
                source,
                continuous_batching=False,
                batch_size=batch_size,
                output=output,
                show=(lambda _: None) if mean else printer(json_lines, line),
                settings=settings,
                captured=lambda record: float(record["captured"]),
                seen=collected.add if mean else None,
                then=print_mean if mean else None,
            ).run()


class _Collected:
    """Estimates of all texts, which take some 100 bytes each."""

    def __init__(self) -> None:
        self._parts: list[Estimate] = []
        self._entries: list[Record] = []

    def add(self, entry: Record) -> None:
        """Add the estimate of one text."""
        self._entries.append(entry)
        if len(self._entries) == TOGETHER:
            self._pack()

    def estimate(self) -> Estimate:
        """Return the estimates of all texts together."""
        self._pack()
        return Estimate.joined(self._parts)

    def _pack(self) -> None:
        if self._entries:
            self._parts.append(Estimate.from_dicts(self._entries))
            self._entries.clear()


def _check_estimate(
    function: Function,
    with_references: bool,
    design: Design,
    in_hindsight: bool,
    repeats: int,
    plain: bool,
) -> None:
    """Refuse options that do not go together, before any work is done."""
    if function is Function.bleu and not with_references:
        raise ValueError(
            "bleu needs a reference for every text; give --reference or --reference-file"
        )
    if not design.estimates:
        able = ", ".join(name for name, other in DESIGNS.items() if other.estimates)
        raise ValueError(f"--design is {design!r}, which cannot estimate; choose one of {able}")
    if in_hindsight and design.name != "conditional-poisson":
        raise ValueError(
            f"--estimator hindsight needs --design conditional-poisson; --design is {design!r}"
        )
    if in_hindsight and repeats > 1:
        raise ValueError(f"--repeats is {repeats}; it must be 1 with --estimator hindsight")
    if plain and function is not Function.entropy:
        raise ValueError(f"--plain applies to entropy only; the function is {function}")


def _function(function: Function, plain: bool, references: list[str]) -> Any:
    """Return the function of a sequence that ``estimate`` takes."""
    if function is Function.bleu:
        return Bleu(references)
    return Length() if function is Function.length else Entropy(rao_blackwell=not plain)
