"""Keeps output safe for the terminal, and turns failures of output into exit statuses.

Texts, names of files and models, and error messages come from elsewhere. ``visible`` keeps them
from controlling the terminal, ``prepare_streams`` makes the streams accept every character, and
``Commands`` turns whatever happens to standard output into an exit status.
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

CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Matches control characters, line separators, overrides of the writing direction, and bytes that
are not text."""

BEYOND_ASCII = re.compile("[^ -~]")

SIZE = re.compile("0*[1-9][0-9]{0,3}")
"""Matches a plausible number of columns or lines of a terminal."""

NARROWEST = 20
"""The smallest width that output is laid out for; a narrower terminal breaks the lines itself."""

NARROWEST_HELP = 60
"""The smallest width that help is laid out for, since its columns would be cut off."""

USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
"""The base class of the exceptions that typer raises for wrong options."""

STYLES = {"error": "bold red", "note": "bold yellow", "stopped": "bold yellow"}


def visible(text: str) -> str:
    r"""Return the text with every character that the terminal would not simply show escaped.

    Control characters, and characters that the terminal's encoding does not have, become escapes
    as in Python: ``\x1b`` becomes four characters.
    """
    shown = CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    encoding = sys.stdout.encoding or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def visible_json(line: str) -> str:
    """Return an equivalent line of JSON without characters that control the terminal.

    Where the terminal's encoding does not have all characters, everything but ASCII is escaped.
    """
    encoding = codecs.lookup(sys.stdout.encoding or "utf-8").name
    escaped = CONTROLS if encoding.startswith("utf") else BEYOND_ASCII
    # JSON has no newline within a line, so that only the last one is kept.
    return escaped.sub(lambda found: json.dumps(found[0])[1:-1], line.rstrip("\n")) + "\n"


def print_message(kind: str, message: str) -> None:
    """Print a line to standard error that begins with its kind, one of ``STYLES``."""
    line = " ".join(message.split())
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text.assemble((f"{kind}:", STYLES[kind]), " ", visible(line)))


def prepare_streams() -> None:
    """Make standard output and error accept every character, and drop invalid terminal sizes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.isatty():
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.isatty():
        sys.stdout.reconfigure(encoding="utf-8")  # as JSON requires, whatever the locale
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):
        if not SIZE.fullmatch(os.environ.get(name, "1")):
            del os.environ[name]
    width = Console().width
    if width < NARROWEST:
        os.environ["COLUMNS"] = str(NARROWEST)
    if width < NARROWEST_HELP:
        os.environ["TERMINAL_WIDTH"] = str(NARROWEST_HELP)  # which typer uses for its help


class Commands(TyperGroup):
    """The group of all commands, which ends the process with a documented exit status."""

    def main(self, *args: Any, **options: Any) -> NoReturn:
        """Run a command, and report wrong options or failing output in one line."""
        prepare_streams()
        options["standalone_mode"] = False  # then typer returns statuses and raises errors
        try:
            status = int(super().main(*args, **options) or 0)
        except SystemExit:  # raised by rich and typer when standard output is closed
            status = 0
        except USAGE_ERROR as error:
            status = _report_usage(error)
        except OSError as error:
            status = _report_output_failure(error)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError as error:
                status = status or _report_output_failure(error)
                # Discard the rest of the buffer, which Python would try to write again at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        sys.exit(status)


def _report_usage(error: Exception) -> int:
    """Report what is wrong with the options, unless typer has shown the help instead."""
    context: Any = getattr(error, "ctx", None)
    message = cast(str, error.format_message())  # type: ignore[attr-defined]
    if message.strip():
        command = context.command_path if context else "cpsbs"
        print_message("error", f"{message.rstrip('.')}. See {command} -h")
    return 2


def _report_output_failure(error: OSError) -> int:
    """Report that standard output failed; a reader that closes its pipe is not a failure."""
    if isinstance(error, BrokenPipeError):
        return 0
    with suppress(OSError):  # if standard error fails too, the status must do
        print_message("error", f"standard output cannot be written: {error.strerror or error}")
    return 1
