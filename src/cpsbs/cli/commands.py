"""Defines the commands of ``cpsbs``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from cpsbs import __version__
from cpsbs.cli import tables
from cpsbs.cli.answers import answers_command
from cpsbs.cli.draws import ModelChoice, check_draw, comparison_record, draw_with, sample_records
from cpsbs.cli.estimate import estimate_command
from cpsbs.cli.explore import explore_command
from cpsbs.cli.inputs import check_utf8, refuse_texts
from cpsbs.cli.mbr import mbr_command
from cpsbs.cli.options import (
    DRAW,
    INPUT,
    MOST,
    RESULT,
    Device,
    Dtype,
    Gguf,
    Int8,
    Json,
    K,
    MaxLength,
    ModelName,
    Nucleus,
    RemoteCode,
    Seed,
    Temperature,
)
from cpsbs.cli.reproduce import reproduce
from cpsbs.cli.running import EPILOG, print_json, reporting_errors, wants_json
from cpsbs.cli.sample import sample_command
from cpsbs.cli.source import Batch
from cpsbs.cli.terminal import Commands, visible
from cpsbs.designs import DEFAULT_DESIGN, DESIGNS, design_named
from cpsbs.estimation.estimate import estimate
from cpsbs.estimation.functions import Bleu, Entropy
from cpsbs.text import EMBEDDED, demonstration, embedded_models

app = typer.Typer(
    cls=Commands,
    help="Draw different sequences from a model, without replacement, and estimate expectations "
    "from them.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Handle the options that come before a command."""
    if version:
        with reporting_errors():
            Console().print(__version__, highlight=False)
        raise typer.Exit


app.command("sample", epilog=EPILOG)(sample_command)
app.command("estimate", epilog=EPILOG)(estimate_command)
app.command("answers", epilog=EPILOG)(answers_command)
app.command("mbr", epilog=EPILOG)(mbr_command)
app.command("explore", epilog=EPILOG)(explore_command)


@app.command(epilog=EPILOG)
def compare(
    text: Annotated[str, typer.Argument(help="Input text.")],
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference", "-r", help="Reference to compute BLEU against.", rich_help_panel=INPUT
        ),
    ] = None,
    k: K = 10,
    designs_given: Annotated[
        list[str] | None,
        typer.Option(
            "--design",
            help="Design to compare; repeat it for several. Default: all.",
            rich_help_panel=DRAW,
        ),
    ] = None,
    temperature: Temperature = 1.0,
    nucleus: Nucleus = None,
    max_length: MaxLength = None,
    seed: Seed = 0,
    model: ModelName = "en-fr",
    device: Device = None,
    dtype: Dtype = None,
    gguf: Gguf = None,
    int8: Int8 = False,
    trust_remote_code: RemoteCode = False,
    rows: Annotated[
        int,
        typer.Option(
            min=1, max=MOST, help="Maximal number of sequences to list.", rich_help_panel=RESULT
        ),
    ] = 25,
    json_lines: Json = False,
) -> None:
    """Compare designs on one text: what each draws, how diverse it is, how well it estimates.

    cpsbs compare "A man rides a bicycle." --temperature 0.5 -r "Un homme fait du vélo."
    """
    with reporting_errors():
        check_draw(k, temperature, nucleus, max_length, seed)
        check_utf8(text, "the text")
        check_utf8(reference or "", "--reference")
        chosen = [design_named(name) for name in designs_given or DESIGNS]
        loaded = ModelChoice(model, device, dtype, trust_remote_code, gguf, int8).load()
        best = draw_with(loaded, k, design_named("top-k"), temperature, nucleus, max_length, seed)
        refuse_texts(loaded.unusable([text], best.settings.max_length), "Give another text")
        likely = set(map(tuple, best.beams(loaded, Batch.alone(text)).tokens(0)))
        draws = [best.with_design(design) for design in chosen]
        records = [comparison_record(draw, loaded, text, reference, likely) for draw in draws]
        if wants_json(json_lines):
            for record in records:
                print_json(record)
            return
        console = Console(highlight=False)
        console.print(Text(visible(text), style="bold"), f" (K = {k}, temperature {temperature})")
        console.print(tables.comparison_table(records))
        console.print(tables.membership_table(records, rows))


@app.command(epilog=EPILOG)
def demo(
    number: Annotated[int, typer.Argument(min=1, help="Number of a demonstration sentence.")] = 1,
    k: K = 10,
    temperature: Temperature = 0.5,
    seed: Seed = 0,
) -> None:
    """Translate a sentence with the embedded model, and estimate expectations from the result."""
    with reporting_errors():
        check_draw(k, temperature, None, None, seed)
        sentences = demonstration()
        if number > len(sentences):
            raise ValueError(f"number is {number}; it must be from 1 to {len(sentences)}")
        text, reference = sentences[number - 1]
        batch = Batch.alone(text, reference)
        loaded = ModelChoice("en-fr").load()
        console = Console(highlight=False)
        for name in (DEFAULT_DESIGN, "conditional-poisson"):
            draw = draw_with(loaded, k, design_named(name), temperature, None, None, seed)
            beams = draw.beams(loaded, batch, joint=draw.needs_joint, entropy=True)
            if name == DEFAULT_DESIGN:
                count = f"{k} different translations" if k > 1 else "One translation"
                console.print(f"{count}, drawn by {name}. BLEU is against")
                console.print(f"[italic]{reference}[/]\n")
                record = sample_records(beams, loaded, batch)[0]
                console.print(tables.beam_table(record))
                console.print("Expectations over all translations that the model can make:")
            origin = "" if name == DEFAULT_DESIGN else ", the paper's design"
            console.print(f"\nby {name}{origin}", style="bold")
            for f in (Bleu([reference]), Entropy(rao_blackwell=True)):
                console.print(str(estimate(beams, f, decode=loaded.decode)), markup=False)
        console.print(
            "\nMore: cpsbs sample, estimate, answers, mbr, compare, designs, models; -h tells how."
        )


app.command(epilog=EPILOG)(reproduce)


@app.command()
def designs() -> None:
    """List the sampling designs."""
    table = tables.new_table("design", "distinct", "estimates", "")
    for name, design in DESIGNS.items():
        distinct, estimates = ("yes" if yes else "" for yes in (design.distinct, design.estimates))
        table.add_row(Text(name, style="bold"), distinct, estimates, design.summary)
    with reporting_errors():
        Console(highlight=False, markup=False).print(table)


@app.command()
def models() -> None:
    """List the models that come with the package; others are loaded by folder or hub id."""
    table = tables.new_table("model", ">MB", "")
    for name in embedded_models():
        folder = EMBEDDED / name
        size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
        paragraph = _first_paragraph(folder / "README.md")
        table.add_row(Text(name, style="bold"), f"{size:.1f}", paragraph)
    with reporting_errors():
        Console(highlight=False, markup=False).print(table)


def run() -> None:
    """Run the command that the arguments name."""
    app(prog_name="cpsbs")


def _first_paragraph(card: Path) -> str:
    """Return the first paragraph of a model card, without its title and metadata."""
    if not card.exists():
        return ""
    paragraphs = card.read_text(encoding="utf-8").split("\n\n")
    return next(p for p in paragraphs if not p.startswith(("#", "---"))).strip()
