"""Run the code blocks of a page, and compare or replace the output that the page shows.

    python -m tests.docs.pages README.md docs/tutorial.md   # put in what the code prints today

A page is one session: its ``python`` blocks share a namespace and a working directory, in which
``english.txt`` and ``french.txt`` lie. Of ``sh`` blocks, the commands that start with ``cpsbs`` run
in this process, as on a terminal of 80 columns, or as in a pipe if there is one; ``cpsbs
reproduce``, which would take minutes, ``cpsbs explore``, which would not end, and commands and
``python`` blocks that need a cluster, are only parsed; slow tests run such blocks.
A ``text`` block that follows is the expected output. Models that do not come with the package are
replaced by a tiny one with a chat template, so that blocks that show the output of such a model
have a title and are not compared.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer

import cpsbs.text
from cpsbs.cli.commands import app
from cpsbs.loading import embedded_models, pretrained
from cpsbs.text import demonstration
from tests.models.folders import tiny_folder

BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE
)
NUMBER = re.compile(r"\d[\d,]*\.\d+(?:e[-+]\d+)?")
TOLERANCE = 2e-2
"""By how much a printed number may differ: another processor rounds in another way."""
SENTENCES = 4
"""How many of the demonstration sentences ``english.txt`` has."""


ON_A_CLUSTER = 'title="On a Ray cluster"'
"""The title of a block of Python that needs a cluster."""


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    info: str
    """What stands behind the opening backticks: the language, and perhaps a title."""
    code: str
    start: int
    """Where the code begins in the page."""
    end: int
    indent: str
    """The spaces before each of its lines, as in a list."""
    follows: bool
    """Whether only blank lines separate it from the block before."""


def blocks(text: str) -> list[Block]:
    """Return the code blocks of a page, without their indentation."""
    found: list[Block] = []
    last = 0
    for match in BLOCK.finditer(text):
        follows = bool(found) and not text[last : match.start()].strip()
        code = re.sub(f"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
        place = (*match.span("code"), match["indent"])
        found.append(Block(match["info"].strip(), code, *place, follows))
        last = match.end()
    return found


def outputs(text: str) -> Iterator[tuple[Block, str]]:
    """Run a page; yield each block that shows an output, with what was printed."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in blocks(text):
        language = block.info.split(" ")[0]
        if language == "python":
            printed = _run_python(block, names)
        elif language == "sh":
            printed = "".join(_run_command(line) for line in _commands(block.code))
        elif block.info == "text" and block.follows:
            yield block, printed


def difference(printed: str, expected: str) -> str | None:
    """Return what differs, if words differ or numbers differ by more than the tolerance."""
    both = [" ".join(text.split()) for text in (printed, expected)]
    if NUMBER.sub("#", both[0]) != NUMBER.sub("#", both[1]):
        return f"printed:\n{printed}\nthe page shows:\n{expected}"
    for ours, theirs in zip(*map(NUMBER.findall, both), strict=True):
        a, b = (float(x.replace(",", "")) for x in (ours, theirs))
        last_place = 0.0 if "e" in ours else 10.0 ** -len(ours.split(".")[1])
        if abs(a - b) > max(TOLERANCE * abs(b), 1.001 * last_place):
            return f"printed {ours}, the page shows {theirs}, in\n{printed}"
    return None


@contextlib.contextmanager
def session(folder: Path) -> Iterator[None]:
    """Provide a working directory with files, and models for every name."""
    pairs = demonstration()[:SENTENCES]
    for name, lines in zip(("english.txt", "french.txt"), zip(*pairs, strict=True), strict=True):
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    chat = '[{"role": "user", "content": "the dog sees"}]\n'
    (folder / "questions.jsonl").write_text(chat * 2)
    with (
        contextlib.chdir(folder),
        patch.object(cpsbs.text, "pretrained", _stand_in),
        patch.dict(os.environ, {"TERM": "dumb", "COLUMNS": "80"}),
    ):
        yield


def _stand_in(
    name: Any, device: Any, dtype: Any, trust: bool, gguf: Any = None, quantize: Any = None
) -> Any:
    """Load an embedded model or a folder as usual, and a tiny model in the place of all others."""
    device = None if str(device).startswith("cuda") else device  # the tests need no GPU
    if gguf is None and (str(name) in embedded_models() or Path(name).is_dir()):
        return pretrained(name, device, dtype, trust, quantize=quantize)
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = pretrained(tiny_folder(Path(folder), "llama"), device, dtype, trust)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return model, tokenizer


def _run_python(block: Block, names: dict[str, Any]) -> str:
    printed, code = io.StringIO(), compile(block.code, "a code block of the page", "exec")
    if ON_A_CLUSTER in block.info:
        return ""
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


def _commands(code: str) -> list[str]:
    """Return the command lines of a block that run ``cpsbs``."""
    joined = code.replace("\\\n", " ").splitlines()
    return [line for line in joined if re.match(r"(cat \S+ \| )?cpsbs ", line)]


class _Terminal(io.StringIO):
    """A stream that passes for a terminal."""

    def isatty(self) -> bool:
        return True


def _run_command(line: str) -> str:
    """Run one command line, and return what it writes to standard output."""
    words = shlex.split(line, comments=True)
    piped = Path(words[1]).read_bytes() if words[0] == "cat" else b""
    words = words[words.index("cpsbs") + 1 :]
    into_pipe = "|" in words
    words = words[: words.index("|")] if into_pipe else words
    if words[0] in ("reproduce", "explore") or "--engine" in words:
        commands: Any = typer.main.get_command(app)
        commands.commands[words[0]].make_context(f"cpsbs {words[0]}", words[1:])
        return ""
    out = io.StringIO() if into_pipe else _Terminal()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()) as told,
        patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped))),
        pytest.raises(SystemExit) as stop,
    ):
        app(words, prog_name="cpsbs")
    assert stop.value.code == 0, f"{line}: {told.getvalue()}"
    return out.getvalue()


def updated(text: str) -> str:
    """Return the page with what its code prints today in the place of the shown outputs."""
    for block, printed in reversed(list(outputs(text))):
        lines = (line.rstrip() for line in printed.strip("\n").splitlines())
        new = textwrap.indent("".join(f"{line}\n" for line in lines), block.indent)
        text = text[: block.start] + new + text[block.end :]
    return text


def main() -> None:
    """Rewrite the pages that are named on the command line."""
    for name in sys.argv[1:]:
        page = Path(name).resolve()
        with tempfile.TemporaryDirectory() as folder, session(Path(folder)):
            page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
