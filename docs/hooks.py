"""Write what the site has beyond its pages, when it is built.

These are the reference of the command line, from the commands themselves, and the example page of
``cpsbs explore``.
"""

from __future__ import annotations

import html
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from mkdocs.structure.files import File
from typer.models import ArgumentInfo

from cpsbs.cli.commands import app

sys.path.insert(0, str(Path(__file__).parent))
from example_page import example_page

MARK = re.compile(r"<!-- command: (\w+) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the help of a command in the place of every ``<!-- command: NAME -->``."""
    return MARK.sub(lambda found: command_help(found[1]), markdown)


def on_files(files: Any, config: Any) -> Any:
    """Add the example page of ``cpsbs explore``, if the page has been built."""
    try:
        content = example_page()
    except ImportError as error:
        content = f"<!doctype html><title>cpsbs explore</title><p>{html.escape(str(error))}"
    files.append(File.generated(config, "explore/example.html", content=content))
    return files


@dataclass(frozen=True)
class Parameter:
    """An argument or an option of a command, as its function declares it."""

    name: str
    kind: Any
    """The Python type of its value."""
    info: Any
    """typer's declaration."""
    default: object

    @property
    def is_argument(self) -> bool:
        """Whether it is given by its place on the command line."""
        return isinstance(self.info, ArgumentInfo)

    @property
    def usage(self) -> str:
        """What stands for it in a command line."""
        if self.is_argument:
            many = "…" if str(self.kind).startswith("list") else ""
            shown = f"{self.name.upper()}{many}"
            return shown if self.default is inspect.Parameter.empty else f"[{shown}]"
        # In an annotation typer takes the first flag for a default.
        named = [x for x in (self.info.default, *(self.info.param_decls or ())) if _is_flag(x)]
        flags = ", ".join(f"`{flag}`" for flag in named or [f"--{self.name.replace('_', '-')}"])
        return flags if self.kind is bool else f"{flags} {self._value}"

    @property
    def row(self) -> str:
        """A row of a table: how it is written, what it does, and its default."""
        text = re.sub(r"\[bold\](.*?)\[/\]", r"`\1`", self.info.help or "").replace("|", "\\|")
        if self.is_argument and isinstance(self.kind, type) and issubclass(self.kind, Enum):
            text += f" One of {', '.join(f'`{choice.value}`' for choice in self.kind)}."
        default = getattr(self.default, "value", self.default)
        shown = all(default is not x for x in (None, False, inspect.Parameter.empty))
        return f"| {self.usage} | {text} | {f'`{default}`' if shown else ''} |"

    @property
    def _value(self) -> str:
        if isinstance(self.kind, type) and issubclass(self.kind, Enum):
            return " \\| ".join(f"`{choice.value}`" for choice in self.kind)
        names = {int: "INTEGER", float: "NUMBER", str: "TEXT"}
        return str(self.info.metavar or names.get(self.kind, "TEXT" if self._many else "FILE"))

    @property
    def _many(self) -> bool:
        return str(self.kind).startswith("list")


def _is_flag(value: object) -> bool:
    return isinstance(value, str) and value.startswith("-")


def command_help(name: str) -> str:
    """Return what a command does, and tables of its arguments and options, as Markdown."""
    function = commands()[name]
    given = parameters(function)
    arguments = [p for p in given if p.is_argument]
    options = [p for p in given if not p.is_argument and not p.info.hidden]
    usage = ["cpsbs", name, *(p.usage for p in arguments), *(["[OPTIONS]"] if options else [])]
    summary, *examples = (inspect.getdoc(function) or "").split("\n\n")
    lines = [summary, "", "```text", " ".join(usage), *examples, "```", ""]
    if arguments:
        lines += ["| argument | | default |", "|---|---|---|", *(p.row for p in arguments), ""]
    for panel in dict.fromkeys(p.info.rich_help_panel for p in options):
        title = panel or "Options"
        own = [p.row for p in options if p.info.rich_help_panel == panel]
        lines += [f"| {title} | | default |", "|---|---|---|", *own, ""]
    return "\n".join(lines)


def commands() -> dict[str, Callable[..., object]]:
    """Return the functions behind the commands, by name."""
    known = [(info.name, info.callback) for info in app.registered_commands]
    return {name or function.__name__: function for name, function in known if function}


def parameters(function: Callable[..., object]) -> list[Parameter]:
    """Return the parameters of a command in their order."""
    hints = get_type_hints(function, include_extras=True)
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        annotated, info = get_args(hints[name])
        kinds = [kind for kind in get_args(annotated) or (annotated,) if kind is not NoneType]
        kind = annotated if str(annotated).startswith("list") else kinds[0]
        found.append(Parameter(name, kind, info, parameter.default))
    return found
