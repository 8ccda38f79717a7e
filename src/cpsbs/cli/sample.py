"""Defines ``cpsbs sample``: different sequences for each text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import tee

from cpsbs.cli import tables
from cpsbs.cli.draws import (
    Draw,
    ModelChoice,
    Target,
    captured_mass,
    check_draw,
    chosen_design,
    chosen_target,
    draw_with,
    sample_records,
)
from cpsbs.cli.engines import chosen_engine
from cpsbs.cli.inputs import read_references, read_texts
from cpsbs.cli.options import (
    Address,
    Anneal,
    BatchSize,
    Chat,
    Cores,
    DesignName,
    Device,
    Dtype,
    EngineName,
    File,
    Format,
    Gguf,
    Int8,
    Json,
    K,
    Layout,
    MaxLength,
    ModelName,
    MostSequences,
    Nucleus,
    Output,
    ReferenceFile,
    References,
    RemoteCode,
    Seed,
    Skip,
    Temperature,
    Texts,
    UntilMass,
    Where,
    Workers,
)
from cpsbs.cli.ordered import Record
from cpsbs.cli.running import Job, printer, reporting_errors
from cpsbs.cli.source import Batch, Source
from cpsbs.designs import DEFAULT_DESIGN
from cpsbs.search.more import Progress
from cpsbs.text import TextModel


@dataclass(frozen=True)
class SampleWork:
    """Draws sequences for each text."""

    draw: Draw
    target: Target | None
    """When to stop drawing more; None to draw once."""

    def records(
        self, model: TextModel, batches: Iterable[Batch], progress: Progress
    ) -> Iterator[list[Record]]:
        """Yield the records of each batch, in their order."""
        to_draw, drawn = tee(batches)
        beams_each = self.draw.beams_until(model, to_draw, self.target, progress)
        for batch, beams in zip(drawn, beams_each, strict=True):
            yield sample_records(beams, model, batch)


def sample_command(
    texts: Texts = None,
    file: File = None,
    chat: Chat = False,
    skip: Skip = False,
    reference: References = None,
    reference_file: ReferenceFile = None,
    k: K = 10,
    until_mass: UntilMass = None,
    most: MostSequences = None,
    design: DesignName = DEFAULT_DESIGN,
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
    layout: Format = Layout.wide,
    json_lines: Json = False,
) -> None:
    """Draw K sequences for each text, with their probabilities p and inclusion probabilities π.

    cpsbs sample "A man rides a bicycle." -k 5 --temperature 0.5

    cpsbs sample --file english.txt --output french.jsonl

    cpsbs sample --file english.txt --format long --output french.csv

    cpsbs sample "A man rides a bicycle." --until-mass 0.9 --temperature 0.5
    """
    with reporting_errors():
        check_draw(k, temperature, nucleus, max_length, seed)
        chosen = chosen_design(design, anneal)
        target = chosen_target(until_mass, most, chosen)
        found = read_texts(texts, file, skip)
        source = Source(found, read_references(reference, reference_file, found), chat, skip)
        choice = ModelChoice(model, device, dtype, trust_remote_code, gguf, int8)
        long = layout is Layout.long
        with closing(chosen_engine(choice, engine, address, workers, cores)) as computing:
            loaded = computing.model
            draw = draw_with(loaded, k, chosen, temperature, nucleus, max_length, seed)
            Job(
                draw,
                computing,
                SampleWork(draw, target),
                source,
                continuous_batching=target is None,
                batch_size=batch_size,
                output=output,
                show=printer(json_lines, tables.beam_table, long),
                settings={
                    "command": "sample",
                    "format": layout,
                    "chat": chat,
                    **({} if target is None else target.as_record()),
                },
                captured=captured_mass,
                long=long,
                rounds=target is not None,
            ).run()
