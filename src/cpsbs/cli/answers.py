"""Defines ``cpsbs answers``: how sure the model is of each answer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Group
from rich.text import Text

from cpsbs.cli.compression import ending
from cpsbs.cli.draws import (
    Draw,
    ModelChoice,
    Target,
    check_draw,
    chosen_design,
    chosen_target,
    draw_with,
)
from cpsbs.cli.engines import chosen_engine
from cpsbs.cli.inputs import check_utf8, read_texts
from cpsbs.cli.options import (
    RESULT,
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
    Gguf,
    Int8,
    Json,
    K,
    MaxLength,
    ModelName,
    MostSequences,
    Nucleus,
    Output,
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
from cpsbs.cli.tables import new_table
from cpsbs.cli.terminal import visible
from cpsbs.decisions.answers import answers
from cpsbs.decisions.keys import key_named
from cpsbs.designs import DEFAULT_DESIGN
from cpsbs.estimation.result import with_error
from cpsbs.search.more import Progress
from cpsbs.text import TextModel

BAR = 20
"""The width of a bar that stands for a probability of one, in characters."""


@dataclass(frozen=True)
class AnswersWork:
    """Estimates how probable each answer is."""

    draw: Draw
    target: Target | None
    """When to stop drawing more; None to draw once."""
    key: str
    """What counts as the same answer."""

    def records(
        self, model: TextModel, batches: Iterable[Batch], progress: Progress
    ) -> Iterator[list[Record]]:
        """Yield the records of each batch, in their order."""
        key, joint = key_named(self.key), self.draw.needs_joint
        for batch in batches:
            beams = next(self.draw.beams_until(model, [batch], self.target, progress, joint=joint))
            entries = answers(beams, key, decode=model.decode).to_dicts()
            yield [
                {"number": i, "text": text, **_plain(entry)}
                for i, text, entry in zip(batch.numbers, batch.texts, entries, strict=True)
            ]


def answers_command(
    texts: Texts = None,
    file: File = None,
    chat: Chat = False,
    skip: Skip = False,
    key: Annotated[
        str,
        typer.Option(
            "--key",
            help="What counts as the same answer: text (the whole of it), first-line, number (the "
            "last one), choice:ABCD (or choice:yes,no), regex:EXPRESSION (its first group), "
            "json:FIELD, or meaning:0.8 (texts whose embeddings have at least this cosine; needs "
            "the extra meaning).",
            rich_help_panel=RESULT,
        ),
    ] = "text",
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
    json_lines: Json = False,
) -> None:
    """Show how probable each answer of the model is, with its error and bounds that are certain.

    cpsbs answers "What is the capital of France?" -m FOLDER --chat --key first-line

    cpsbs answers --file questions.txt --chat --key choice:ABCD -m FOLDER --output answers.jsonl
    """
    with reporting_errors():
        check_draw(k, temperature, nucleus, max_length, seed)
        check_utf8(key, "--key")
        if output is not None and ending(output) == ".csv":
            raise ValueError(f"--output is {output}; answers are written as JSON lines or Parquet")
        chosen = chosen_design(design, anneal)
        key_named(key)  # so that an unknown one is refused early
        target = chosen_target(until_mass, most, chosen)
        source = Source(read_texts(texts, file, skip), chat=chat, skip=skip)
        choice = ModelChoice(model, device, dtype, trust_remote_code, gguf, int8)
        with closing(chosen_engine(choice, engine, address, workers, cores)) as computing:
            loaded = computing.model
            draw = draw_with(loaded, k, chosen, temperature, nucleus, max_length, seed)
            Job(
                draw,
                computing,
                AnswersWork(draw, target, key),
                source,
                continuous_batching=False,
                batch_size=batch_size,
                output=output,
                show=printer(json_lines, answer_table),
                settings={
                    "command": "answers",
                    "key": key,
                    "chat": chat,
                    **({} if target is None else target.as_record()),
                },
                captured=lambda record: 1 - float(record["unseen"]),
                rounds=target is not None,
            ).run()


def _plain(entry: Record) -> Record:
    """Return the entry with answers as texts, so that a column has one type whatever the key."""
    rows = [
        row | {"answer": None if row["answer"] is None else str(row["answer"])}
        for row in entry["answers"]
    ]
    return entry | {"answers": rows}


def answer_table(record: Record) -> Group:
    """Return the answers to one text as a table, followed by what is known of all of them."""
    weighted = any(row["probability"] is not None for row in record["answers"])
    table = new_table(
        *(["", ">P"] if weighted else []),
        ">certainly",
        "answer",
        title=Text(visible(record["text"])),
    )
    for row in record["answers"]:
        shown = [] if not weighted else [_bar(row["probability"]), _probability(row)]
        bounds = f"{_floor(row['lower'])} to {_ceil(row['upper'])}"
        answer = row["answer"]
        text = Text("(none)", style="dim") if answer is None else Text(visible(answer))
        if len(row["texts"]) > 1:
            text.append(f" ({len(row['texts'])} ways)", style="dim")
        table.add_row(*shown, bounds, text)
    return Group(table, Text(_summary(record)))


def _bar(probability: float) -> str:
    """Return a bar as long as the probability, of hash signs where the terminal has no blocks."""
    block = "█" if visible("█") == "█" else "#"
    return block * round(BAR * min(1.0, max(0.0, probability)))


def _probability(row: Record) -> str:
    return with_error(row["probability"], row["standard_error"])


def _floor(value: float) -> str:
    """Return a lower bound with four decimals."""
    return f"{math.floor(round(value * 1e4, 3)) / 1e4:.4f}"


def _ceil(value: float) -> str:
    """Return an upper bound with four decimals."""
    return f"{math.ceil(round(value * 1e4, 3)) / 1e4:.4f}"


def _summary(record: Record) -> str:
    """Return a line on the entropy, and on how sure the best answer is."""
    low, high = record["entropy_bounds"]
    until = "" if high is None else f" and at most {high:.3g}"
    value = "" if record["entropy"] is None else f" {record['entropy']:.3g} nats (plug-in),"
    best = "certainly" if record["certain"] else "not certainly"
    return (
        f"Entropy over answers:{value} certainly at least {low:.3g}{until}. "
        f"{100 * record['unseen']:.3g}% of the probability lies in sequences that were not found. "
        f"The first answer is {best} the most probable one."
    )
