"""The commands of ``cpsbs``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import tee
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from cpsbs import __version__
from cpsbs.cli import tables
from cpsbs.cli.batches import usual_size
from cpsbs.cli.draws import check_draw, chosen_design, compared, drawing, quiet_load, sampled
from cpsbs.cli.inputs import check_utf8, read_references, read_texts, refuse
from cpsbs.cli.options import (
    DRAW,
    INPUT,
    MOST,
    RESULT,
    Anneal,
    BatchSize,
    DesignName,
    Device,
    Dtype,
    Estimator,
    File,
    Function,
    Json,
    K,
    MaxLength,
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
)
from cpsbs.cli.outputs import Record
from cpsbs.cli.reproduce import reproduce
from cpsbs.cli.running import EPILOG, Task, errors_told, for_programs, print_json, shown
from cpsbs.cli.terminal import Commands, visible
from cpsbs.designs import DESIGNS, Design, design_named
from cpsbs.estimation.estimate import estimate
from cpsbs.estimation.functions import Bleu, Entropy, Length
from cpsbs.estimation.inclusion import hindsight_inclusion
from cpsbs.randomness import split_seed
from cpsbs.text import EMBEDDED, demonstration, embedded_models

app = typer.Typer(
    cls=Commands,
    help="Draw different sequences from a model, without replacement, and estimate with them.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """What concerns all commands."""
    if version:
        with errors_told():
            Console().print(__version__, highlight=False)
        raise typer.Exit


@app.command(epilog=EPILOG)
def sample(
    texts: Texts = None,
    file: File = None,
    skip: Skip = False,
    reference: References = None,
    reference_file: ReferenceFile = None,
    k: K = 10,
    design: DesignName = "conditional-poisson",
    temperature: Temperature = 1.0,
    anneal: Anneal = None,
    nucleus: Nucleus = None,
    max_length: MaxLength = None,
    seed: Seed = 0,
    model: ModelName = "en-fr",
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: RemoteCode = False,
    batch_size: BatchSize = None,
    output: Output = None,
    json_lines: Json = False,
) -> None:
    """Draw K sequences for each text, with their probabilities p and inclusion probabilities π.

    cpsbs sample "A man rides a bicycle." -k 5 --temperature 0.5

    cpsbs sample --file english.txt --output french.jsonl
    """
    with errors_told():
        check_draw(k, temperature, nucleus, max_length, seed)
        chosen = chosen_design(design, anneal)
        found = read_texts(texts, file)
        references = read_references(reference, reference_file, len(found))
        loaded = quiet_load(model, device, dtype, trust_remote_code)
        draw = drawing(loaded, k, chosen, temperature, nucleus, max_length, seed)
        size = batch_size or usual_size(loaded.model.device, k)

        def work(batches: Iterable[list[int]]) -> Iterator[list[Record]]:
            to_draw, to_tell = tee(batches)
            drawn = draw.beams_each(loaded, found, to_draw)
            for numbers, beams in zip(to_tell, drawn, strict=True):
                yield sampled(beams, loaded, found, numbers, references)

        show, more = shown(json_lines, tables.beam), {"command": "sample"}
        Task(draw, loaded, found, references, work, True, size, skip, output, show, more).run()


@app.command("estimate", epilog=EPILOG)
def estimate_command(
    function: Annotated[Function, typer.Argument(help="Of a sequence; its mean is estimated.")],
    texts: Texts = None,
    file: File = None,
    skip: Skip = False,
    reference: References = None,
    reference_file: ReferenceFile = None,
    k: K = 10,
    design: DesignName = "stratified",
    estimator: Annotated[
        Estimator,
        typer.Option(
            help="Weights p/π along the search's own path, normalised or not; or with π by "
            "hindsight importance sampling (conditional-poisson only).",
            rich_help_panel=DRAW,
        ),
    ] = Estimator.unbiased,
    runs: Annotated[
        int,
        typer.Option(
            min=1, max=MOST, help="M, of hindsight importance sampling.", rich_help_panel=DRAW
        ),
    ] = 4,
    repeats: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST,
            help="Independent beams; their spread is the error.",
            rich_help_panel=DRAW,
        ),
    ] = 1,
    plain: Annotated[
        bool,
        typer.Option("--plain", help="Entropy without Rao–Blackwell.", rich_help_panel=DRAW),
    ] = False,
    temperature: Temperature = 1.0,
    anneal: Anneal = None,
    nucleus: Nucleus = None,
    max_length: MaxLength = None,
    seed: Seed = 0,
    model: ModelName = "en-fr",
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: RemoteCode = False,
    batch_size: BatchSize = None,
    output: Output = None,
    json_lines: Json = False,
) -> None:
    """Estimate an expectation under the model for each text: a line with its error and signature.

    cpsbs estimate entropy "A man rides a bicycle." -k 20

    cpsbs estimate bleu --file english.txt --reference-file french.txt --temperature 0.3
    """
    with errors_told():
        check_draw(k, temperature, nucleus, max_length, seed)
        chosen = chosen_design(design, anneal)
        found = read_texts(texts, file)
        references = read_references(reference, reference_file, len(found))
        in_hindsight = estimator.startswith("hindsight")
        _check_estimate(function, references, chosen, in_hindsight, repeats, plain)
        loaded = quiet_load(model, device, dtype, trust_remote_code)
        draw = drawing(loaded, k, chosen, temperature, nucleus, max_length, seed)
        size = batch_size or usual_size(loaded.model.device, k)

        def estimates(numbers: list[int]) -> list[Record]:
            joint = draw.tells_by_joint and repeats == 1 and not in_hindsight
            entropy = function is Function.entropy and not plain
            several = [
                draw.again(r).beams(loaded, found, numbers, joint=joint, entropy=entropy)
                for r in range(repeats)
            ]
            inclusion = None
            if in_hindsight:
                # A stream for every batch, apart from those of the texts.
                stream = split_seed(seed, [-1 - numbers[0]], loaded.model.device)[0]
                inclusion = hindsight_inclusion(
                    loaded.repeated([found[i] for i in numbers]),
                    several[0],
                    runs,
                    draw.design,
                    generator=stream,
                    batch_size=size,
                )
            result = estimate(
                several if repeats > 1 else several[0],
                _function(function, plain, [references[i] for i in numbers] if references else []),
                normalize=estimator.endswith("normalized"),
                log_inclusion=inclusion,
                decode=loaded.decode,
            )
            with_runs = {"runs": runs} if in_hindsight else {}
            return [
                {"number": i, "text": found[i], **entry, **with_runs}
                for i, entry in zip(numbers, result.to_dicts(), strict=True)
            ]

        more: Record = {"command": "estimate", "function": function, "estimator": estimator}
        more |= {"runs": runs, "repeats": repeats, "plain": plain}
        show = shown(
            json_lines, lambda record: visible(f"{record['number'] + 1}: {record['line']}")
        )
        work = partial(map, estimates)
        Task(draw, loaded, found, references, work, False, size, skip, output, show, more).run()


def _check_estimate(
    function: Function,
    references: list[str] | None,
    design: Design,
    in_hindsight: bool,
    repeats: int,
    plain: bool,
) -> None:
    """Refuse what does not go together, before any work is done."""
    if function is Function.bleu and references is None:
        raise ValueError("bleu needs --reference, or --reference-file, for every text")
    if not design.estimates:
        able = ", ".join(name for name, other in DESIGNS.items() if other.estimates)
        raise ValueError(f"--design is {design!r}, which cannot estimate; allowed are {able}")
    if in_hindsight and design.name != "conditional-poisson":
        raise ValueError(f"hindsight is for conditional-poisson; --design is {design!r}")
    if in_hindsight and repeats > 1:
        raise ValueError(f"--repeats is {repeats}; hindsight estimates are of one beam")
    if plain and function is not Function.entropy:
        raise ValueError(f"--plain is for entropy, not for {function}")


@app.command(epilog=EPILOG)
def compare(
    text: Annotated[str, typer.Argument(help="One text.")],
    reference: Annotated[
        str | None, typer.Option("--reference", "-r", help="To score with.", rich_help_panel=INPUT)
    ] = None,
    k: K = 10,
    designs_given: Annotated[
        list[str] | None,
        typer.Option("--design", help="Some, instead of all.", rich_help_panel=DRAW),
    ] = None,
    temperature: Temperature = 1.0,
    nucleus: Nucleus = None,
    max_length: MaxLength = None,
    seed: Seed = 0,
    model: ModelName = "en-fr",
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: RemoteCode = False,
    rows: Annotated[
        int, typer.Option(min=1, max=MOST, help="Sequences to list.", rich_help_panel=RESULT)
    ] = 25,
    json_lines: Json = False,
) -> None:
    """Every design on one text: what each draws, how different it is, how well it estimates.

    cpsbs compare "A man rides a bicycle." --temperature 0.5 -r "Un homme fait du vélo."
    """
    with errors_told():
        check_draw(k, temperature, nucleus, max_length, seed)
        check_utf8(text, "the text")
        check_utf8(reference or "", "--reference")
        chosen = [design_named(name) for name in designs_given or DESIGNS]
        loaded = quiet_load(model, device, dtype, trust_remote_code)
        best = drawing(loaded, k, design_named("top-k"), temperature, nucleus, max_length, seed)
        refuse(loaded.unusable([text], best.max_length), "")
        likely = set(map(tuple, best.beams(loaded, [text], [0]).tokens(0)))
        draws = [replace(best, design=design) for design in chosen]
        records = [compared(draw, loaded, text, reference, likely) for draw in draws]
        if for_programs(json_lines):
            for record in records:
                print_json(record)
            return
        console = Console(highlight=False)
        console.print(Text(visible(text), style="bold"), f" (K = {k}, temperature {temperature})")
        console.print(tables.comparison(records))
        console.print(tables.membership(records, rows))


@app.command(epilog=EPILOG)
def demo(
    number: Annotated[int, typer.Argument(min=1, help="Of a demonstration sentence.")] = 1,
    k: K = 10,
    temperature: Temperature = 0.5,
    seed: Seed = 0,
) -> None:
    """The main job on the embedded model: different translations, and what they say of all."""
    with errors_told():
        check_draw(k, temperature, None, None, seed)
        sentences = demonstration()
        if number > len(sentences):
            raise ValueError(f"there are {len(sentences)} sentences; number {number} is not one")
        text, reference = sentences[number - 1]
        loaded = quiet_load("en-fr", None, None, False)
        console = Console(highlight=False)
        for name in ("conditional-poisson", "stratified"):
            draw = drawing(loaded, k, design_named(name), temperature, None, None, seed)
            beams = draw.beams(loaded, [text], [0], joint=draw.tells_by_joint, entropy=True)
            if name == "conditional-poisson":
                count = f"{k} different translations" if k > 1 else "One translation"
                console.print(f"{count}, drawn by {name}. BLEU is against")
                console.print(f"[italic]{reference}[/]\n")
                console.print(tables.beam(sampled(beams, loaded, [text], [0], [reference])[0]))
                console.print("Expectations over all translations that the model can make:")
            console.print(f"\nby {name}", style="bold")
            for f in (Bleu([reference]), Entropy(rao_blackwell=True)):
                console.print(str(estimate(beams, f, decode=loaded.decode)), markup=False)
        console.print("\nMore: cpsbs sample, estimate, compare, designs, models; -h tells how.")


app.command(epilog=EPILOG)(reproduce)


@app.command()
def designs() -> None:
    """What can be put into the search."""
    table = tables.plain("design", "distinct", "estimates", "")
    for name, design in DESIGNS.items():
        distinct, estimates = ("yes" if yes else "" for yes in (design.distinct, design.estimates))
        table.add_row(Text(name, style="bold"), distinct, estimates, design.summary)
    with errors_told():
        Console(highlight=False, markup=False).print(table)


@app.command()
def models() -> None:
    """The models that come with the package; any other is loaded by folder or hub id."""
    table = tables.plain("model", ">MB", "")
    for name in embedded_models():
        folder = EMBEDDED / name
        size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
        paragraph = _first_paragraph(folder / "README.md")
        table.add_row(Text(name, style="bold"), f"{size:.1f}", paragraph)
    with errors_told():
        Console(highlight=False, markup=False).print(table)


def run() -> None:
    """Run the command that the arguments name."""
    app(prog_name="cpsbs")


def _function(function: Function, plain: bool, references: list[str]) -> Any:
    if function is Function.bleu:
        return Bleu(references)
    return Length() if function is Function.length else Entropy(rao_blackwell=not plain)


def _first_paragraph(card: Path) -> str:
    """Of a model card, behind its title."""
    if not card.exists():
        return ""
    paragraphs = card.read_text(encoding="utf-8").split("\n\n")
    return next(p for p in paragraphs if not p.startswith(("#", "---"))).strip()
