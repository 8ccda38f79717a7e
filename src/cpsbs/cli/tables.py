"""Lays out results as tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

from cpsbs.cli.ordered import Record
from cpsbs.cli.terminal import visible
from cpsbs.estimation.result import with_error

LEAST_TEXT = 12
"""The smallest width, in characters, at which the last column of a table is easy to read."""


class Listing(Table):
    """A plain table, whose rows become lines where the terminal is too narrow for it."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table, or each row on lines of its own."""
        *widths, last = (max(map(cell_len, _cells(column))) for column in self.columns)
        # Every column has a space on both sides, and a divider or an edge.
        needed = sum(widths) + min(last, LEAST_TEXT) + 3 * len(self.columns) + 1
        if needed <= options.max_width:
            yield from super().__rich_console__(console, options)
        else:
            yield from self._lines()

    def _lines(self) -> Iterator[Text]:
        """Yield the numbers of each row with their column names, followed by its text."""
        if self.title:
            yield Text(str(self.title), style="bold")
        names = [str(column.header) for column in self.columns]
        for row in zip(*(column.cells for column in self.columns), strict=True):
            *some, last = (
                Text(f"{name} ").append(_text(cell)) if name else _text(cell)
                for name, cell in zip(names, row, strict=True)
                if str(cell)
            )
            between = "\n" if not names[-1] and str(row[-1]) else "  "
            yield Text(between).join([Text("  ").join(some), last]) if some else last


def _text(cell: RenderableType) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))


def _cells(column: Column) -> list[str]:
    """Return the header and the cells of a column as strings."""
    return [str(column.header), *map(str, column.cells)]


def new_table(*columns: str, title: Text | None = None) -> Listing:
    """Return an empty table with these columns.

    A column whose name begins with ``>`` is aligned to the right; only the last column wraps.
    """
    table = Listing(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        justify: Literal["right", "left"] = "right" if column.startswith(">") else "left"
        last = column == columns[-1]
        table.add_column(visible(column.removeprefix(">")), justify=justify, no_wrap=not last)
    return table


def probability(log_p: float | None) -> str:
    """Return exp(``log_p``) with few digits, or a dash if it is None."""
    if log_p is None:
        return "–"
    p = math.exp(log_p)
    return f"{p:.4f}" if p >= 0.001 else f"{p:.1e}"


def beam_table(record: Record) -> Listing:
    """Return a table of the sequences drawn for one text."""
    scores = record.get("bleu")
    title = Text(visible(record["text"]))
    table = new_table(">p", ">π", *([">BLEU"] if scores else []), "", title=title)
    inclusion = record["log_inclusion"] or [None] * len(record["texts"])
    shown = _readable(record["texts"])
    for i, text in enumerate(shown):
        score = [f"{100 * scores[i]:.1f}"] if scores else []
        if not record["finished"][i]:
            text.append(" … (unfinished)", style="dim")
        numbers = probability(record["log_prob"][i]), probability(inclusion[i])
        table.add_row(*numbers, *score, text)
    return table


def membership_table(records: list[Record], most: int) -> Listing:
    """Return a table of the sequences that any design drew, and of which designs drew them.

    Args:
        records: the records of ``cpsbs compare``, one per design.
        most: the maximal number of sequences to list, the most probable first.
    """
    found: dict[tuple[int, ...], tuple[float, str]] = {}
    for record in records:
        tokens = map(tuple, record["sequences"])
        found |= dict(
            zip(tokens, zip(record["log_prob"], record["texts"], strict=True), strict=True)
        )
    order = sorted(found, key=lambda y: -found[y][0])
    table = Listing(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    for i in range(len(records)):
        table.add_column(f"{i + 1}", justify="center", no_wrap=True)
    table.add_column("p", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    shown = _readable([found[y][1] for y in order])
    for y, text in zip(order[:most], shown, strict=False):
        marks = [_times(record["sequences"].count(list(y))) for record in records]
        table.add_row(*marks, probability(found[y][0]), text)
    remaining = len(order) - most
    if remaining > 0:
        table.add_row(
            *[""] * len(records), "", Text(f"… and {remaining} less probable ones", style="dim")
        )
    return table


def _readable(texts: list[str]) -> list[Text]:
    """Return texts to show; a text that occurs again, in other tokens, is marked."""
    shown = [Text(visible(text)) for text in texts]
    for i, text in enumerate(texts):
        if text in texts[:i]:
            shown[i].append(" (other tokens)", style="dim")
    return shown


def _times(count: int) -> str:
    """Return a mark for a sequence that a design drew that many times."""
    return {0: "", 1: "●"}.get(count, str(count))


def comparison_table(records: list[Record]) -> Listing:
    """Return a table that compares designs, one per row."""
    scored = "bleu" in records[0]
    columns = [">", "design", ">distinct", ">in top-k", ">Σp", ">D"]
    columns += [">BLEU min", ">mean", ">max"] if scored else []
    table = new_table(*columns, ">entropy, nats")
    for i, record in enumerate(records):
        row = [
            str(i + 1),
            record["design"],
            str(record["distinct"]),
            str(record["shared"]),
            f"{record['captured']:.3f}",
            f"{record['diversity']:.2f}",
        ]
        if scored:
            scores = record["bleu"]
            three = (min(scores), sum(scores) / len(scores), max(scores))
            row += [f"{100 * value:.1f}" for value in three]
        entropy = record["entropy"]
        shown = with_error(entropy["value"], entropy["standard_error"]) if entropy else "–"
        table.add_row(*row, shown)
    return table
