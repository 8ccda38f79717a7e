"""Options that several commands share, with their help texts; typer reads these types."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

MOST = 1_000_000
"""The largest K, length or other count that an option accepts: more than any machine has memory
for, and few enough that products of them fit into 64 bits."""

INPUT, MODEL, DRAW, RESULT = "Input", "Model", "Draw", "Result"
WHERE = "Where it runs"

Texts = Annotated[
    list[str] | None,
    typer.Argument(help="Input texts. Default: read --file or standard input, one text per line."),
]
File = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        help="File with one input text per line, also .gz or .zst.",
        rich_help_panel=INPUT,
    ),
]
Skip = Annotated[
    bool,
    typer.Option(
        "--skip",
        help="Skip lines that are empty, too long or not text, and report them. Default: stop "
        "at the first such line, and keep the results that are complete by then.",
        rich_help_panel=INPUT,
    ),
]
References = Annotated[
    list[str] | None,
    typer.Option(
        "--reference",
        "-r",
        help="Reference to compute BLEU against. Repeat it, once per text.",
        rich_help_panel=INPUT,
    ),
]
ReferenceFile = Annotated[
    Path | None,
    typer.Option(help="File with one reference per line, also .gz or .zst.", rich_help_panel=INPUT),
]
K = Annotated[
    int,
    typer.Option(
        "-k", min=1, max=MOST, help="Number of sequences to draw per text.", rich_help_panel=DRAW
    ),
]
UntilMass = Annotated[
    float | None,
    typer.Option(
        "--until-mass",
        metavar="MASS",
        help="Draw -k different sequences at a time until their total probability reaches MASS, "
        "then once more, so that the weights stay unbiased.",
        rich_help_panel=DRAW,
    ),
]
MostSequences = Annotated[
    int | None,
    typer.Option(
        "--most",
        min=1,
        max=MOST,
        help="With --until-mass, draw at most this many sequences per text. Default: 1000.",
        rich_help_panel=DRAW,
    ),
]
DesignName = Annotated[
    str,
    typer.Option(
        "--design",
        help="Sampling design. Run [bold]cpsbs designs[/] for a list.",
        rich_help_panel=DRAW,
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        help="Temperature of the model; below 1, likely sequences become likelier. For good "
        "sentences of a translation model, try 0.5.",
        rich_help_panel=DRAW,
    ),
]
Anneal = Annotated[
    float | None,
    typer.Option(
        help="For conditional-poisson: raise its weights to the power 1/ANNEAL; 0 is beam search.",
        rich_help_panel=DRAW,
    ),
]
Nucleus = Annotated[
    float | None,
    typer.Option(
        help="Keep only the likeliest tokens that make up this probability mass, such as 0.99.",
        rich_help_panel=DRAW,
    ),
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MOST,
        help="Maximal number of new tokens. Default: 128, or what the model has room for.",
        rich_help_panel=DRAW,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        help="Seed of the random numbers; the same seed gives the same sequences.",
        rich_help_panel=DRAW,
    ),
]
ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="Embedded model (run [bold]cpsbs models[/] for a list), folder, or id on the Hugging "
        "Face hub. Encoder–decoder, or causal with the text as its prompt.",
        rich_help_panel=MODEL,
    ),
]
Gguf = Annotated[
    str | None,
    typer.Option(
        "--gguf",
        metavar="FILE",
        help="GGUF file in the model's folder or repository to load instead of safetensors.",
        rich_help_panel=MODEL,
    ),
]
Int8 = Annotated[
    bool,
    typer.Option(
        "--int8",
        help="Round the weights of linear layers to eight bits: faster on a CPU, a little coarser.",
        rich_help_panel=MODEL,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="Device to compute on: cpu, cuda, … Default: a GPU if there is one.",
        rich_help_panel=MODEL,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, float16, bfloat16, float64 or auto (as stored). Default: float32 on a CPU, "
        "auto on a GPU.",
        rich_help_panel=MODEL,
    ),
]
RemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run code that the model brings. Only for models that you trust.",
        rich_help_panel=MODEL,
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MOST,
        help="Number of texts to decode at once. Default: 320 / K in each core of a CPU; on a GPU "
        "5120 / K, or what fits.",
        rich_help_panel=MODEL,
    ),
]


class EngineName(StrEnum):
    """The ways to compute many things at once."""

    local = "local"
    ray = "ray"


Where = Annotated[
    EngineName,
    typer.Option(
        "--engine",
        help="Compute on this machine, or on a Ray cluster. Results are the same.",
        rich_help_panel=WHERE,
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        help="Address of a Ray cluster; auto on one of its nodes. Default: start one on this "
        "machine.",
        rich_help_panel=WHERE,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        max=MOST,
        help="Number of workers on the cluster, each with a copy of the model. Default: one per "
        "GPU, or without GPUs as many as there are cores.",
        rich_help_panel=WHERE,
    ),
]
Cores = Annotated[
    int | None,
    typer.Option(
        "--cores",
        min=1,
        max=MOST,
        help="Number of cores of each worker; another number can change the last digits of "
        "results. Default: 1.",
        rich_help_panel=WHERE,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Write results to this file: JSON lines, or Parquet if it ends in .parquet (with "
        "--format long also .csv), compressed if .gz or .zst follows. If the command is "
        "interrupted, run it again to resume.",
        rich_help_panel=RESULT,
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print JSON lines. This is the default when standard output is not a terminal.",
        rich_help_panel=RESULT,
    ),
]


class Layout(StrEnum):
    """What a row of the results is."""

    wide = "wide"
    long = "long"


Format = Annotated[
    Layout,
    typer.Option(
        "--format",
        help="wide: one JSON object for each text. long: one row for each sequence, with source, "
        "rank, text, tokens, p, pi, weight, length and finished, and in files a fingerprint of the "
        "command (job).",
        rich_help_panel=RESULT,
    ),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="Send each text as a user message through the model's chat template. A text that is a "
        'JSON list of messages, [{"role": "user", "content": "…"}], or an object with such a list '
        'as "messages", is a whole conversation.',
        rich_help_panel=INPUT,
    ),
]
Mean = Annotated[
    bool,
    typer.Option(
        "--mean",
        help="Print the mean over all texts, with its error, instead of a line for each text.",
        rich_help_panel=RESULT,
    ),
]


class Function(StrEnum):
    """The functions whose expectation ``cpsbs estimate`` estimates."""

    bleu = "bleu"
    entropy = "entropy"
    length = "length"


class Estimator(StrEnum):
    """The ways to weight the sequences of an estimate."""

    unbiased = "unbiased"
    normalized = "normalized"
    hindsight = "hindsight"
    hindsight_normalized = "hindsight-normalized"
