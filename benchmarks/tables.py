"""Results as Markdown tables, in print and in the pages that show them."""

from __future__ import annotations

import re
from collections.abc import Mapping


def table(rows: list[dict[str, object]]) -> str:
    """Rows as a Markdown table."""
    names = list(rows[0])
    cells = [[_cell(row[name]) for name in names] for row in rows]
    lines = ["| " + " | ".join(names) + " |", "|" + "---:|" * len(names)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in cells])


def into_readme(text: str, results: Mapping[str, object]) -> str:
    """The README with these results in place of the tables behind ``<!-- table: NAME -->``.

    Tables that the results know nothing of stay as they are.
    """

    def replacement(found: re.Match[str]) -> str:
        if found[1] not in results:
            return found[0]
        rows = results[found[1]]
        assert isinstance(rows, list)
        return f"<!-- table: {found[1]} -->\n{table(rows)}\n"

    return re.sub(r"<!-- table: (\w+) -->\n(?:\|.*\n)*", replacement, text)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
