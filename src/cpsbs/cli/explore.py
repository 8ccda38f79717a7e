"""Defines ``cpsbs explore``: a page on which a search can be looked at and played with."""

from __future__ import annotations

import secrets
import sys
import webbrowser
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from cpsbs.cli.draws import ModelChoice, check_draw
from cpsbs.cli.inputs import check_utf8, read_prompt
from cpsbs.cli.options import (
    DRAW,
    INPUT,
    RESULT,
    Chat,
    Device,
    Dtype,
    Gguf,
    K,
    MaxLength,
    ModelName,
    Nucleus,
    References,
    RemoteCode,
    Seed,
    Temperature,
)
from cpsbs.cli.running import reporting_errors
from cpsbs.cli.terminal import visible
from cpsbs.designs import DEFAULT_DESIGN, design_named
from cpsbs.explore import page
from cpsbs.explore.explorer import Explorer, together
from cpsbs.explore.record import Record
from cpsbs.explore.scene import Scene
from cpsbs.extras import required
from cpsbs.text import Prompt, demonstration

if TYPE_CHECKING:
    import socket

SERVER = "Server"

REDRAWS = 50
"""The default for the number of beams of each design in an HTML file."""


def explore_command(
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="Input texts. Default: the first demonstration sentences."),
    ] = None,
    chat: Chat = False,
    reference: References = None,
    contains: Annotated[
        str | None,
        typer.Option(
            metavar="PHRASE",
            help="Estimate the probability that an output contains this phrase.",
            rich_help_panel=INPUT,
        ),
    ] = None,
    k: K = 10,
    designs_given: Annotated[
        list[str] | None,
        typer.Option(
            "--design",
            help=f"Design to draw with; repeat it for several. Default: {DEFAULT_DESIGN}.",
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
    trust_remote_code: RemoteCode = False,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the page to this file, with all that it shows, instead of serving it. The "
            "file needs no server and makes no requests.",
            rich_help_panel=RESULT,
        ),
    ] = None,
    redraws: Annotated[
        int,
        typer.Option(
            min=1,
            max=1000,
            help="With --html: how many beams of each design the file holds, with seeds from "
            "--seed on.",
            rich_help_panel=RESULT,
        ),
    ] = REDRAWS,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="With --html: also draw until almost all probability is covered, for the exact "
            "expectation.",
            rich_help_panel=RESULT,
        ),
    ] = False,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. Any address other than loopback requires the token in the "
            "printed URL.",
            rich_help_panel=SERVER,
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            help="Port to listen on. Default: one that is free.",
            rich_help_panel=SERVER,
        ),
    ] = 0,
    no_browser: Annotated[
        bool,
        typer.Option(
            "--no-browser", help="Do not open the page in a browser.", rich_help_panel=SERVER
        ),
    ] = False,
) -> None:
    """Open a page that shows a search as a tree: what was kept, what was dropped, and why.

    cpsbs explore "A man rides a bicycle." -k 10 --temperature 0.5

    cpsbs explore "A man rides a bicycle." --design stratified --design independent --html tree.html
    """
    with reporting_errors("nothing was written" if html else "the page is not served any more"):
        check_draw(k, temperature, nucleus, max_length, seed)
        names = designs_given or [DEFAULT_DESIGN]
        for name in names:
            design_named(name).roots(k)
        if contains is not None and reference:
            raise ValueError("both --contains and --reference are given; give the one f needs")
        pairs = _texts(texts, reference)
        for number, (text, own) in enumerate(pairs):
            check_utf8(text, f"text {number + 1}")
            check_utf8(own, f"reference {number + 1}")
        check_utf8(contains or "", "--contains")
        if html is None:
            required("starlette", "explore")
            required("uvicorn", "explore")
        elif not html.parent.is_dir():
            raise ValueError(f"--html is {html}; {html.parent} is not a folder")
        elif html.is_dir():
            raise ValueError(f"--html is {html}, which is a folder; name a file in it")
        page.html({"mode": "file", "documents": []})  # an error now if the page is not built
        loaded = ModelChoice(model, device, dtype, trust_remote_code, gguf).load()
        explorer = Explorer(loaded, partial(_prompt, chat=chat))
        length = max_length or loaded.usual_length

        def scene(text: str, own: str) -> Scene:
            function, argument = ("contains", contains) if contains else ("bleu", own)
            if not argument:
                function = "entropy"
            return Scene(text, k, temperature, nucleus, length, function, argument or "")

        scenes = [scene(text, own) for text, own in pairs]
        for one in scenes:
            explorer.document(one)  # which refuses a text that the model cannot take
        given = {"gguf_file": gguf, "dtype": dtype, "trust_remote_code": trust_remote_code or None}
        shown = {"model": loaded.name, "seed": seed, "chosen": names}
        shown["load"] = {"name": model} | {name: x for name, x in given.items() if x is not None}
        if html is not None:
            documents = _drawn(explorer, scenes, names, range(seed, seed + redraws), exact)
            _write(html, page.html({"mode": "file", **shown, "documents": documents}))
            size = html.stat().st_size / 1e6
            _messages().print(visible(f"Wrote {html} ({size:.1f} MB)."))
        else:
            begin = {**shown, "scenes": [one.as_record() for one in scenes]}
            _serve(explorer, begin, host, port, not no_browser)


def _texts(texts: list[str] | None, references: list[str] | None) -> list[tuple[str, str]]:
    """Return each text with its reference, which may be empty."""
    if not texts:
        if references:
            raise ValueError("--reference is given without a text; give the text too")
        return demonstration()[:3]
    if references and len(references) != len(texts):
        raise ValueError(
            f"there are {len(references)} references for {len(texts)} texts; give one per text"
        )
    return list(zip(texts, references or [""] * len(texts), strict=True))


def _prompt(text: str, chat: bool) -> Prompt:
    return read_prompt(0, text, chat)


def _drawn(
    explorer: Explorer, scenes: list[Scene], designs: list[str], seeds: range, exact: bool
) -> list[Record]:
    """Return a document for each scene, with all runs that the file holds."""
    documents = []
    if not sys.stderr.isatty():  # where the progress bar is not shown
        count = len(scenes) * len(designs) * len(seeds)
        _messages().print(f"Drawing {count:,} beams.")
    with Progress(console=_messages(), transient=True) as progress:
        task = progress.add_task("Drawing", total=len(scenes) * len(designs) * len(seeds))
        for scene in scenes:
            document = explorer.document(scene)
            for design in designs:
                explorer.draw(document, design, seeds[0])
                progress.advance(task)
                each = together(scene)
                for first in range(1, len(seeds), each):
                    some = list(seeds[first : first + each])
                    explorer.redraw(document, design, some)
                    progress.advance(task, len(some))
            if exact:
                explorer.exact(document)
            documents.append(document.as_record())
    return documents


def _write(file: Path, content: str) -> None:
    """Write a file whole, or leave the old one as it is."""
    partial_file = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        partial_file.write_text(content, encoding="utf-8")
        partial_file.replace(file)
    finally:
        partial_file.unlink(missing_ok=True)


def _serve(explorer: Explorer, shown: dict[str, Any], host: str, port: int, browser: bool) -> None:
    """Serve the page until the user stops it."""
    from cpsbs.explore.server import (
        LOOPBACK,
        PageServer,
        application,
        bound_socket,
        is_loopback,
    )

    local = is_loopback(host)
    token = None if local else secrets.token_urlsafe(16)
    anywhere = host in ("0.0.0.0", "::")
    hosts = None if anywhere else frozenset({*LOOPBACK, host.lower()})
    with bound_socket(host, port) as bound:
        address = _address(bound, host, token)
        server = PageServer(application(explorer, shown, hosts, token))
        messages = _messages()
        messages.print(visible(f"{explorer.model!r}"))
        messages.print(f"Serving {address} (Ctrl-C to stop)")
        if browser:
            webbrowser.open(address)
        server.run(sockets=[bound])


def _address(bound: socket.socket, host: str, token: str | None) -> str:
    """Return the address of the page."""
    name = "127.0.0.1" if host == "0.0.0.0" else "::1" if host == "::" else host
    shown = f"[{name}]" if ":" in name else name
    query = "" if token is None else f"?token={token}"
    return f"http://{shown}:{bound.getsockname()[1]}/{query}"


def _messages() -> Console:
    return Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)
