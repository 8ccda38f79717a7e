"""What people see on a terminal, and the streams that take it there.

Texts, names of files and models, and error messages come from elsewhere. ``visible`` keeps them
from acting on the terminal, ``prepare`` makes the streams take every character, and ``Commands``
turns whatever happens to standard output into an exit status.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import sys
from contextlib import suppress
from typing import Any, NoReturn, cast

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

ACTING = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, separators of lines, overrides of the direction of writing, and bytes that
are not text."""

BEYOND_ASCII = re.compile("[^ -~]")

SIZE = re.compile("0*[1-9][0-9]{0,3}")
"""A number of columns or lines that a terminal may have."""

NARROWEST = 20
"""The fewest columns that are laid out; a terminal that has fewer breaks the lines itself."""

NARROWEST_HELP = 60
"""The same of the help, whose columns would be cut off."""

USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
"""What typer raises for all that is wrong with options."""

STYLES = {"error": "bold red", "note": "bold yellow", "stopped": "bold yellow"}


def visible(text: str) -> str:
    r"""Return a text in which every character can be shown and none acts on the terminal.

    Characters that would act on it, or that its encoding does not have, become escapes as in
    Python: ``\x1b`` is four characters then.
    """
    shown = ACTING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    encoding = sys.stdout.encoding or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def visible_json(line: str) -> str:
    """Return a line of JSON with the same value, in which no character acts on the terminal.

    Where the terminal's encoding does not have all characters, only ASCII is left.
    """
    encoding = codecs.lookup(sys.stdout.encoding or "utf-8").name
    escaped = ACTING if encoding.startswith("utf") else BEYOND_ASCII
    # In JSON a newline can only be the end of the line.
    return escaped.sub(lambda found: json.dumps(found[0])[1:-1], line.rstrip("\n")) + "\n"


def tell(kind: str, message: str) -> None:
    """Write a line to standard error that begins with its kind, one of ``STYLES``."""
    line = " ".join(message.split())
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text.assemble((f"{kind}:", STYLES[kind]), " ", visible(line)))


def prepare() -> None:
    """Let standard output and error take every character, and forget sizes that are none."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.isatty():
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.isatty():
        sys.stdout.reconfigure(encoding="utf-8")  # as JSON is, whatever the locale
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):
        if not SIZE.fullmatch(os.environ.get(name, "1")):
            del os.environ[name]
    width = Console().width
    if width < NARROWEST:
        os.environ["COLUMNS"] = str(NARROWEST)
    if width < NARROWEST_HELP:
        os.environ["TERMINAL_WIDTH"] = str(NARROWEST_HELP)  # typer's, for its help


class Commands(TyperGroup):
    """The group of all commands, which ends the process with one of the documented statuses."""

    def main(self, *args: Any, **options: Any) -> NoReturn:
        """Run a command; wrong options, and output that cannot be written, are told in a line."""
        prepare()
        options["standalone_mode"] = False  # typer returns statuses, and raises errors
        try:
            status = int(super().main(*args, **options) or 0)
        except SystemExit:  # rich and typer end so when nobody reads standard output any more
            status = 0
        except USAGE_ERROR as error:
            status = _usage_told(error)
        except OSError as error:
            status = _output_failed(error)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError as error:
                status = status or _output_failed(error)
                # Let go of what is left, or Python would try to write it again, and fail.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        sys.exit(status)


def _usage_told(error: Exception) -> int:
    """Tell what is wrong with the options, unless typer has shown the help instead."""
    context: Any = getattr(error, "ctx", None)
    message = cast(str, error.format_message())  # type: ignore[attr-defined]
    if message.strip():
        command = context.command_path if context else "cpsbs"
        tell("error", f"{message.rstrip('.')}. See {command} -h")
    return 2


def _output_failed(error: OSError) -> int:
    """Tell that standard output takes no more; but who closes a pipe has had enough of it."""
    if isinstance(error, BrokenPipeError):
        return 0
    with suppress(OSError):  # if that goes nowhere either, the status says it
        tell("error", f"standard output cannot be written: {error.strerror or error}")
    return 1
