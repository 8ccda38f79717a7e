"""Options that several commands have, and what they say: typer reads these types."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

MOST = 1_000_000
"""The largest K, length or other count that an option takes: more than any machine has room for,
and few enough that products of them fit into 64 bits."""

INPUT, MODEL, DRAW, RESULT = "Input", "Model", "Draw", "Result"

Texts = Annotated[
    list[str] | None, typer.Argument(help="Texts; none: lines of --file or standard input.")
]
File = Annotated[
    Path | None, typer.Option("--file", "-f", help="Read lines from here.", rich_help_panel=INPUT)
]
Skip = Annotated[
    bool,
    typer.Option(
        "--skip",
        help="Leave out lines that are empty or too long, instead of stopping before any work.",
        rich_help_panel=INPUT,
    ),
]
References = Annotated[
    list[str] | None,
    typer.Option("--reference", "-r", help="For each text, to score with.", rich_help_panel=INPUT),
]
ReferenceFile = Annotated[
    Path | None, typer.Option(help="Read references, a line each.", rich_help_panel=INPUT)
]
K = Annotated[
    int, typer.Option("-k", min=1, max=MOST, help="Sequences for each text.", rich_help_panel=DRAW)
]
DesignName = Annotated[
    str, typer.Option("--design", help="See [bold]cpsbs designs[/].", rich_help_panel=DRAW)
]
Temperature = Annotated[
    float,
    typer.Option(help="Of the model: below 1 it samples likelier sequences.", rich_help_panel=DRAW),
]
Anneal = Annotated[
    float | None,
    typer.Option(
        help="Of conditional-poisson: its weights to the power 1/anneal; towards 0 beam search.",
        rich_help_panel=DRAW,
    ),
]
Nucleus = Annotated[
    float | None,
    typer.Option(help="Keep tokens that make up this mass (0.99).", rich_help_panel=DRAW),
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MOST,
        help="The most new tokens; 128, or what there is room for.",
        rich_help_panel=DRAW,
    ),
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same draw.", rich_help_panel=DRAW)]
ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="An embedded model (cpsbs models), a folder, or an id on the Hugging Face hub; "
        "encoder–decoder, or causal, where a text is the prompt.",
        rich_help_panel=MODEL,
    ),
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, …; a GPU if there is one.", rich_help_panel=MODEL)
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, float16, bfloat16; as stored, and float32 on a CPU, if not said.",
        rich_help_panel=MODEL,
    ),
]
RemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run code of the model.", rich_help_panel=MODEL),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MOST,
        help="Texts decoded at once; if not said, 640 / K, on a GPU 1280 / K.",
        rich_help_panel=MODEL,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="JSON lines, or Parquet (.parquet). After a stop, the same command goes on.",
        rich_help_panel=RESULT,
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json", help="JSON lines; so it is if no terminal looks.", rich_help_panel=RESULT
    ),
]


class Function(StrEnum):
    """What can be estimated."""

    bleu = "bleu"
    entropy = "entropy"
    length = "length"


class Estimator(StrEnum):
    """How to weight the sequences."""

    unbiased = "unbiased"
    normalized = "normalized"
    hindsight = "hindsight"
    hindsight_normalized = "hindsight-normalized"
