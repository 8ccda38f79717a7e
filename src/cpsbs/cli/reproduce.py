"""Defines ``cpsbs reproduce``, the command that runs the paper's experiments.

Only running the command imports ``cpsbs.experiments``; other commands start without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cpsbs.cli.options import (
    INPUT,
    RESULT,
    WHERE,
    Address,
    Device,
    Dtype,
    EngineName,
    Gguf,
    ModelName,
    RemoteCode,
    Where,
)
from cpsbs.cli.running import reporting_errors

NAMES = "bleu, bleu-unnormalized, truncation, entropy, rmse, diversity, runtime, hindsight"


def reproduce(
    experiments: Annotated[
        list[str] | None,
        typer.Argument(help=f"Experiments to run: {NAMES}. Default: all."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Folder for results.", rich_help_panel=RESULT)
    ] = Path("reproduction"),
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Run a small version of every experiment, whose verdicts are not reliable.",
            rich_help_panel=RESULT,
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only print how many cells there are, and how long they take.",
            rich_help_panel=RESULT,
        ),
    ] = False,
    plot_only: Annotated[
        bool,
        typer.Option(
            "--plot-only",
            help="Compute nothing; report on the results that are there.",
            rich_help_panel=RESULT,
        ),
    ] = False,
    draw_only: Annotated[
        bool, typer.Option("--draw-only", help="Old name of --plot-only.", hidden=True)
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option(help="Test set: file with one sentence per line.", rich_help_panel=INPUT),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(help="File with one reference per line of --source.", rich_help_panel=INPUT),
    ] = None,
    test_set: Annotated[
        str,
        typer.Option(
            help="Test set of sacrebleu, downloaded unless --source is given.",
            rich_help_panel=INPUT,
        ),
    ] = "wmt14/full",
    languages: Annotated[
        str,
        typer.Option(help="Source and target language of --test-set.", rich_help_panel=INPUT),
    ] = "en-fr",
    lines: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,…",
            help="Sentences of the test set to make estimates for, counted from 0 as in the "
            "paper. Default: 1500,2000,2500.",
            rich_help_panel=INPUT,
        ),
    ] = None,
    sentences: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of sentences to decode for diversity. Default: all; with --quick, 16.",
            rich_help_panel=INPUT,
        ),
    ] = None,
    model: ModelName = "en-fr",
    device: Device = None,
    dtype: Dtype = None,
    gguf: Gguf = None,
    trust_remote_code: RemoteCode = False,
    engine: Where = EngineName.local,
    address: Address = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of workers. Default: 4 on a GPU, else one per processor. Set "
            "OMP_NUM_THREADS for workers of more than one thread.",
            rich_help_panel=WHERE,
        ),
    ] = None,
) -> None:
    """Run the paper's experiments: compute what is missing, then write figures and a report.

    cpsbs reproduce --quick --source newstest2014.en --reference newstest2014.fr

    cpsbs reproduce bleu rmse --source my.en --reference my.fr --lines 7,42,100

    cpsbs reproduce diversity --dry-run
    """
    with reporting_errors():
        from cpsbs.cli.reproduction import Reproduction

        Reproduction(
            experiments=experiments or [],
            out=out,
            quick=quick,
            source=source,
            reference=reference,
            test_set=test_set,
            languages=languages,
            lines=lines,
            sentences=sentences,
            model=model,
            device=device,
            dtype=dtype,
            gguf_file=gguf,
            trust_remote_code=trust_remote_code,
            engine=engine,
            address=address,
            workers=workers,
        ).run(dry_run, plot_only or draw_only)
