"""Rows of prefixes, and the steps that lead from one layout of rows to another.

``check_model`` asks a model for the same prefixes in several layouts of rows, because a search
drops, reorders and repeats rows. A layout is a list of rows, source by source; nothing here calls
the model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

Row = tuple[int, tuple[int, ...]]
"""The source of a row, and its prefix."""

Extensions = list[tuple[int, int]]
"""For each new row, the previous row that it extends, and the token by which it extends it."""


def first_rows(sources: int) -> list[Row]:
    """Return the rows after ``start``: the empty prefix of each source."""
    return [(source, ()) for source in range(sources)]


def extended(rows: Sequence[Row], step: Extensions) -> list[Row]:
    """Return the rows after a step."""
    return [(rows[parent][0], (*rows[parent][1], token)) for parent, token in step]


def as_tensors(step: Extensions, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the parents [rows] and the tokens [rows] of a step."""
    parent, token = zip(*step, strict=True)
    return torch.tensor(parent, device=device), torch.tensor(token, device=device)


def different_rows(sources: int, steps: list[Extensions]) -> list[list[Row]]:
    """Return the different rows after each of the steps, in order."""
    rows, layouts = first_rows(sources), list[list[Row]]()
    for step in steps:
        rows = extended(rows, step)
        layouts.append(sorted(set(rows)))
    return layouts


def shuffled(layouts: list[list[Row]], k: int, choices: random.Random) -> list[list[Row]]:
    """Return the same rows in random order inside a source, which gets K rows by repeating some."""
    mixed = []
    for layout in layouts:
        rows: list[Row] = []
        for _, group in groupby(layout, key=lambda row: row[0]):
            own = list(group)
            own += choices.choices(own, k=k - len(own))
            choices.shuffle(own)
            rows += own
        mixed.append(rows)
    return mixed


def single_rows(layouts: list[list[Row]]) -> Iterator[list[list[Row]]]:
    """Yield layouts of one row: for each source, one prefix that goes on as far as any does."""
    deepest = {row[0]: row for layout in layouts for row in layout}
    for source, prefix in deepest.values():
        yield [[(source, prefix[:t])] for t in range(1, len(prefix) + 1)]


def steps_through(
    layouts: list[list[Row]], sources: int, choices: random.Random
) -> list[Extensions]:
    """Return steps from the first rows through these layouts."""
    rows, steps = first_rows(sources), list[Extensions]()
    for layout in layouts:
        steps.append([extension_to(row, rows, choices) for row in layout])
        rows = layout
    return steps


def extension_to(row: Row, rows: Sequence[Row | None], choices: random.Random) -> tuple[int, int]:
    """Return a random one of the rows whose extension is this row, and the token."""
    source, prefix = row
    same = [i for i, other in enumerate(rows) if other == (source, prefix[:-1])]
    return choices.choice(same), prefix[-1]
