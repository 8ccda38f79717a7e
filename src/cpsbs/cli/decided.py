"""Decisions as records, as a table for the terminal, and as a score of all."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.text import Text

from cpsbs.cli.formats import one_line
from cpsbs.cli.ordered import Record
from cpsbs.cli.tables import new_table
from cpsbs.cli.terminal import visible
from cpsbs.decisions.decision import Decisions
from cpsbs.decisions.mbrs import Choice
from cpsbs.estimation.result import with_error
from cpsbs.extras import required

ROWS = 10
"""The largest number of candidates that a table lists."""


def decision_records(decisions: Decisions, with_evidence: bool) -> list[Record]:
    """Return a dictionary for each decision, in which every candidate tells whether it was dropped.

    Args:
        decisions: the decisions.
        with_evidence: whether to list the texts of the evidence, with their weights.
    """
    entries = decisions.to_dicts()
    for decision, entry in zip(decisions, entries, strict=True):
        for candidate, row in zip(decision.candidates, entry["candidates"], strict=True):
            row["certainly_behind"] = candidate.certainly_behind
            row["compared"] = candidate.compared
    if with_evidence:
        evidence = decisions.evidence
        for entry, texts, weights in zip(
            entries, evidence.texts, evidence.text_weights(), strict=True
        ):
            pairs = zip(texts, weights, strict=True)
            entry["evidence"] = [{"text": text, "weight": weight} for text, weight in pairs]
    return entries


def exported_choice(record: Record) -> Choice:
    """Return what mbrs is given of a record."""
    rows, evidence = record["candidates"], record["evidence"]
    return Choice(
        [one_line(row["text"]) for row in rows],
        [row["behind"] for row in rows],
        record["utility"],
        [one_line(row["text"]) for row in evidence],
        [row["weight"] for row in evidence],
    )


class CorpusScores:
    """Computes chrF and BLEU of all texts together, with sacrebleu's signatures.

    Of the texts it keeps sums of sacrebleu's statistics alone, which is how sacrebleu computes the
    score of a corpus.
    """

    def __init__(self) -> None:
        metrics: Any = required("sacrebleu", "metrics").metrics
        self._metrics: list[Any] = [metrics.CHRF(), metrics.BLEU()]
        self._sums: list[list[int]] = [[], []]

    def add(self, text: str, reference: str) -> None:
        """Add a text and its reference."""
        for i, metric in enumerate(self._metrics):
            # As in a file of plain texts, so that the score is the same for all kinds of output.
            (found,) = metric._extract_corpus_statistics([one_line(text)], [[reference]])
            before = self._sums[i] or [0] * len(found)
            self._sums[i] = [a + b for a, b in zip(before, found, strict=True)]

    def records(self) -> list[Record]:
        """Return a record for each metric."""
        found = []
        for metric, sums in zip(self._metrics, self._sums, strict=True):
            score = metric._aggregate_and_compute([sums])
            signature = str(metric.get_signature())
            line = score.format(width=2, signature=signature)
            found.append(
                {"metric": score.name, "score": score.score, "signature": signature, "line": line}
            )
        return found


def decision_table(record: Record) -> Group:
    """Return the best candidates of one text as a table, followed by what is known of all."""
    name = record["settings"]["utility"]
    title = Text(visible(record["text"]))
    table = new_table(f">{name}", ">behind", "certainly", "candidate", title=title)
    rows = record["candidates"]
    for rank, row in enumerate(rows[:ROWS]):
        text = Text(visible(row["text"]), style="bold" if rank == 0 else "")
        if not row["compared"]:
            text.append(" (dropped early)", style="dim")
        behind = "" if rank == 0 else with_error(row["behind"], row["behind_error"])
        mark = "yes" if row["certainly_behind"] else ""
        table.add_row(with_error(row["utility"], row["standard_error"]), behind, mark, text)
    if len(rows) > ROWS:
        table.add_row("", "", "", Text(f"… and {len(rows) - ROWS} worse ones", style="dim"))
    return Group(table, Text(_summary(record)))


def _summary(record: Record) -> str:
    """Return a line on the candidates, the evidence, and how sure the decision is."""
    count, rounds = len(record["candidates"]), record["rounds"]
    captured = record["captured"]
    share = "" if captured is None else f", with {100 * captured:.3g}% of the probability"
    drawn = f"Evidence: {rounds} round{'' if rounds == 1 else 's'}{share}."
    if count == 1:
        return f"The only candidate. {drawn}"
    best = "certainly" if record["certain"] else "not certainly"
    return f"{count} candidates. {drawn} The first one is {best} the best of them."
