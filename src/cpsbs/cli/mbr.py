"""Defines ``cpsbs mbr``: minimum Bayes risk decoding of many texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import tee
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from cpsbs.cli.compression import ending
from cpsbs.cli.decided import (
    CorpusScores,
    decision_records,
    decision_table,
    exported_choice,
)
from cpsbs.cli.draws import Draw, ModelChoice, check_draw
from cpsbs.cli.engines import chosen_engine
from cpsbs.cli.formats import PlainTexts, one_line
from cpsbs.cli.inputs import read_references, read_texts
from cpsbs.cli.options import (
    DRAW,
    MOST,
    RESULT,
    Address,
    BatchSize,
    Chat,
    Cores,
    Device,
    Dtype,
    EngineName,
    File,
    Gguf,
    Int8,
    Json,
    MaxLength,
    ModelName,
    Nucleus,
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
from cpsbs.cli.running import Job, print_json, printer, reporting_errors, wants_json
from cpsbs.cli.source import Batch, Source
from cpsbs.cli.terminal import visible
from cpsbs.decisions.mbr import DEFAULT_ROUNDS
from cpsbs.decisions.mbrs import Choice, write_mbrs
from cpsbs.decisions.plan import (
    DEFAULT_CANDIDATES,
    DEFAULT_SIZE,
    DEFAULT_TEMPERATURE,
    PROBABILITY,
    Plan,
)
from cpsbs.decisions.utilities import Utility, as_utility
from cpsbs.designs import DEFAULT_DESIGN
from cpsbs.search.beams import Beams
from cpsbs.search.more import Progress
from cpsbs.search.settings import SearchSettings
from cpsbs.text import TextModel


@dataclass(frozen=True)
class MbrWork:
    """Decides for each text."""

    draw: Draw
    """How the evidence is drawn."""
    plan: Plan
    utility: str
    settings: Record
    """What is told of a decision besides how the evidence was drawn."""
    with_evidence: bool
    """Whether to list the evidence."""

    def records(
        self, model: TextModel, batches: Iterable[Batch], progress: Progress
    ) -> Iterator[list[Record]]:
        """Yield the records of each batch, in their order."""
        plan, settings, seed = self.plan, self.draw.settings, self.draw.seed
        every, *copies = tee(batches, 1 + len(plan.searches))
        searches = [
            Draw(settings if part is None else part.settings(settings), seed + offset)
            for offset, part in plan.searches
        ]
        beams_each = [
            draw.beams_each(model, copy) for draw, copy in zip(searches, copies, strict=True)
        ]
        for batch, *drawn in zip(every, *beams_each, strict=True):
            yield self._decided(model, batch, drawn)

    def _decided(self, model: TextModel, batch: Batch, drawn: list[Beams]) -> list[Record]:
        prompts = dict(zip(batch.numbers, batch.prompts, strict=True))

        def again(numbers: list[int], settings: SearchSettings, seed_offset: int) -> Beams:
            some = Batch(numbers, [], [prompts[i] for i in numbers])
            return Draw(settings, self.draw.seed + seed_offset).beams(model, some)

        decisions = self.plan.decide(
            drawn,
            batch.numbers,
            again,
            self.draw.settings,
            as_utility(self.utility),
            model.decode,
        )
        told = {**drawn[0].settings, **self.settings}
        entries = decision_records(decisions, self.with_evidence)
        return [
            {"number": i, "text": text, **entry, "settings": told}
            for i, text, entry in zip(batch.numbers, batch.texts, entries, strict=True)
        ]


def mbr_command(
    texts: Texts = None,
    file: File = None,
    chat: Chat = False,
    skip: Skip = False,
    reference: References = None,
    reference_file: ReferenceFile = None,
    candidates: Annotated[
        str,
        typer.Option(
            help="What to choose from, as a sum: beam:16 are the 16 sequences of beam search, "
            "stratified:16 (or another design) 16 that are drawn for this alone, and evidence the "
            "sequences of the evidence.",
            rich_help_panel=DRAW,
        ),
    ] = DEFAULT_CANDIDATES,
    utility: Annotated[
        str,
        typer.Option(
            help="How good a candidate is if another text is right: chrf, bleu, exact (1 if they "
            "are equal) or edit (similarity by edit distance).",
            rich_help_panel=DRAW,
        ),
    ] = "chrf",
    k: Annotated[
        int,
        typer.Option(
            "-k",
            min=1,
            max=MOST,
            help="Number of sequences to draw per text as evidence, which candidates are compared "
            "with.",
            rich_help_panel=DRAW,
        ),
    ] = DEFAULT_SIZE,
    confidence: Annotated[
        float | None,
        typer.Option(
            help="Draw more evidence for texts whose decision is not this sure, such as 0.95.",
            rich_help_panel=DRAW,
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST,
            help="With --confidence, draw evidence for a text at most this many times. Default: "
            f"{DEFAULT_ROUNDS}.",
            rich_help_panel=DRAW,
        ),
    ] = None,
    design: Annotated[
        str,
        typer.Option(
            help="Sampling design of the evidence. Run [bold]cpsbs designs[/] for a list.",
            rich_help_panel=DRAW,
        ),
    ] = DEFAULT_DESIGN,
    p_weighted: Annotated[
        bool,
        typer.Option(
            "--p-weighted",
            help="Weight the evidence by the model's probabilities instead of by the design's "
            "weights. That is biased and gives no error bar, but works for beam search too "
            "(--design top-k), and is good with few sequences.",
            rich_help_panel=DRAW,
        ),
    ] = False,
    temperature: Temperature = DEFAULT_TEMPERATURE,
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
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write results to this file: only the chosen texts, on the lines of their "
            "inputs, if it ends in .txt; Parquet if it ends in .parquet; else JSON lines; "
            "compressed if .gz or .zst follows. If the command is interrupted, run it again to "
            "resume.",
            rich_help_panel=RESULT,
        ),
    ] = None,
    export_mbrs: Annotated[
        Path | None,
        typer.Option(
            "--export-mbrs",
            help="Also write candidates and weighted evidence to this folder, as files for the "
            "package mbrs, and print the mbrs-decode command that decides by them. Line breaks "
            "within texts become spaces. Results then list the evidence too.",
            rich_help_panel=RESULT,
        ),
    ] = None,
    json_lines: Json = False,
) -> None:
    """Choose for each text the candidate that is most like all that the model would say.

    This is minimum Bayes risk decoding. With references, the chosen texts are scored, too.

    cpsbs mbr "The room was too warm."

    cpsbs mbr --file en.txt -k 32 --candidates beam:8+evidence --utility chrf --output fr.txt
    """
    with reporting_errors():
        check_draw(k, temperature, nucleus, max_length, seed)
        _check_options(confidence, rounds, output)
        _check_export(export_mbrs, confidence, output)
        most = rounds or DEFAULT_ROUNDS
        plan = Plan.parse(
            candidates,
            k,
            design=design,
            confidence=confidence,
            rounds=most,
            weights=PROBABILITY if p_weighted else None,
        )
        chosen = _ready(as_utility(utility))
        found = read_texts(texts, file, skip)
        references = read_references(reference, reference_file, found)
        scores = None if references is None else CorpusScores()
        source = Source(found, references, chat, skip, decisive=False)
        own: Record = {"candidates": candidates, "utility": chosen.name}
        own |= {} if confidence is None else {"confidence": confidence, "rounds": most}
        own |= {"weights": PROBABILITY} if p_weighted else {}
        # A file to resume must list the evidence too.
        listed: Record = {} if export_mbrs is None else {"export_mbrs": True}

        exported: list[tuple[str, Choice]] = []

        def collect(record: Record) -> None:
            if scores is not None and source.references is not None:
                scores.add(record["chosen"], source.references[record["number"]])
            if export_mbrs is not None:
                exported.append((one_line(record["text"]), exported_choice(record)))

        def score() -> None:
            as_json = wants_json(json_lines)
            for record in () if scores is None else scores.records():
                if as_json and output is not None:
                    print_json(record)
                else:  # beside results in JSON, which go to standard output
                    lines = Console(stderr=as_json, soft_wrap=True, highlight=False, markup=False)
                    lines.print(record["line"])

        def export() -> None:
            if export_mbrs is None:
                return
            sources, choices = zip(*exported, strict=True)
            files = write_mbrs(export_mbrs, choices, chosen.name, sources)
            told = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)
            told.print(visible(f"Wrote files for mbrs to {export_mbrs}. To decide by them, run"))
            told.print(visible(files.command))

        def finish() -> None:
            score()
            export()

        choice = ModelChoice(model, device, dtype, trust_remote_code, gguf, int8)
        with closing(chosen_engine(choice, engine, address, workers, cores)) as computing:
            length = max_length or computing.model.usual_length
            draw = Draw(plan.evidence_settings(length, temperature, nucleus), seed)
            Job(
                draw,
                computing,
                MbrWork(draw, plan, utility, own, export_mbrs is not None),
                source,
                continuous_batching=confidence is None,
                batch_size=batch_size,
                output=output,
                show=printer(json_lines, decision_table),
                settings={"command": "mbr", "chat": chat, **own, **listed},
                captured=lambda record: record["captured"],
                plain=PlainTexts("chosen", lambda: source.count),
                largest=max([k, *(part.size for part in plan.parts)]),
                seen=None if scores is None and export_mbrs is None else collect,
                then=finish,
            ).run()


def _check_options(confidence: float | None, rounds: int | None, output: Path | None) -> None:
    """Refuse options that are wrong or do not go together, before any work is done."""
    if confidence is not None and not 0 < confidence < 1:
        raise ValueError(f"--confidence is {confidence}; it must be between 0 and 1")
    if rounds is not None and confidence is None:
        raise ValueError(f"--rounds is {rounds}, which needs --confidence; give that too")
    if output is not None and ending(output) == ".csv":
        raise ValueError(
            f"--output is {output}; decisions are written as JSON lines or Parquet, or the chosen "
            "texts alone as .txt"
        )


def _check_export(folder: Path | None, confidence: float | None, output: Path | None) -> None:
    """Refuse an export for mbrs that would lack evidence, before any work is done."""
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--export-mbrs is {folder}, which is a file; it must be a folder")
    if confidence is not None:
        raise ValueError(
            f"--export-mbrs does not go with --confidence {confidence}, because evidence of later "
            "rounds is not kept; leave one of them out, and choose a larger -k instead"
        )
    if output is not None and ending(output) == ".txt":
        raise ValueError(
            f"--output is {output}, which keeps the chosen texts alone; --export-mbrs needs the "
            "evidence too. Choose an --output that ends in .jsonl or .parquet"
        )


def _ready(utility: Utility) -> Utility:
    """Return the utility, if all packages that it needs are there."""
    utility.tables([["a"]], [["a"]], torch.device("cpu"))
    return utility
