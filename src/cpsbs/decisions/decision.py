"""The result of ``mbr``: the chosen text of every source, and how the candidates compare."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cpsbs.decisions.expected import Evidence
from cpsbs.decisions.mbrs import Choice, MbrsFiles, write_mbrs
from cpsbs.estimation.result import with_error
from cpsbs.extras import required

if TYPE_CHECKING:
    import pandas

COLUMNS = [
    "source",
    "rank",
    "text",
    "utility",
    "standard_error",
    "lower",
    "upper",
    "behind",
    "behind_error",
]
"""The keys of ``Decisions.to_rows``."""


@dataclass(frozen=True)
class Candidate:
    """A candidate of a source, and what it is expected to be worth."""

    text: str
    utility: float
    """The estimate of its expected utility."""
    standard_error: float | None
    """Its standard error; None if it is not known."""
    lower: float
    """The expected utility is certainly at least this; -inf if nothing is certain."""
    upper: float
    """The expected utility is certainly at most this; inf if nothing is certain."""
    behind: float
    """By how much the chosen candidate leads this one."""
    behind_error: float | None
    """The standard error of that lead, paired: both rest on the same evidence."""
    certainly_behind: bool
    """Whether the chosen candidate is certainly better than this one."""
    compared: bool
    """False if it was dropped before the last round of evidence, because it was clearly behind."""


@dataclass(frozen=True)
class Decision:
    """The decision for one source."""

    source: int
    """The number of the source."""
    candidates: tuple[Candidate, ...]
    """All distinct candidates, the chosen one first, then by expected utility."""
    captured: float | None
    """The probability of the sequences of the evidence, of its first round; None if not known."""
    rounds: int
    """How many beams of evidence were drawn for this source."""

    @property
    def text(self) -> str:
        """The text of the candidate that was chosen."""
        return self.candidates[0].text

    @property
    def utility(self) -> float:
        """The expected utility of the chosen text."""
        return self.candidates[0].utility

    @property
    def standard_error(self) -> float | None:
        """The standard error of that utility; None if it is not known."""
        return self.candidates[0].standard_error

    @property
    def runner_up(self) -> Candidate | None:
        """The second best candidate, whose ``behind`` is the lead; None if there is no other."""
        return self.candidates[1] if len(self.candidates) > 1 else None

    @property
    def certain(self) -> bool:
        """Whether the chosen candidate is certainly the best of the candidates."""
        return all(c.certainly_behind for c in self.candidates[1:])

    def renumbered(self, source: int) -> Decision:
        """Return the same decision as that of another source."""
        return replace(self, source=source)

    def __str__(self) -> str:
        value = with_error(self.utility, self.standard_error)
        second = self.runner_up
        if second is None:
            return f"{self.text!r}: {value}, the only candidate"
        lead = with_error(second.behind, second.behind_error)
        sure = "certainly the best" if self.certain else "ahead of the runner-up by " + lead
        return f"{self.text!r}: {value}, {sure} ({len(self.candidates)} candidates)"


class Decisions(Sequence[Decision]):
    """The decisions for all sources; ``decisions[b]`` is that of source b."""

    def __init__(
        self,
        sources: tuple[Decision, ...],
        utility: str,
        evidence: Evidence,
        candidates: list[list[str]],
    ) -> None:
        self._sources = sources
        self.utility = utility
        """The name of the utility."""
        self.evidence = evidence
        """The evidence of the first round, with its weights."""
        self.candidates = candidates
        """The distinct candidates of every source, in the order in which they were given."""

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, source: Any) -> Any:
        return self._sources[source]

    def __str__(self) -> str:
        lines = [str(own) for own in self._sources]
        if len(self) == 1:
            return f"E[{self.utility}] of {lines[0]}"
        return "\n".join(f"[{i}] E[{self.utility}] of {line}" for i, line in enumerate(lines))

    __repr__ = __str__

    @property
    def texts(self) -> list[str]:
        """The text that was chosen for each source."""
        return [own.text for own in self._sources]

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a dictionary for each candidate of each source, with the keys of ``COLUMNS``.

        Candidates come by expected utility, the chosen one with rank 0. ``behind`` is how far the
        chosen one is ahead.
        """
        return [
            {"source": own.source, "rank": rank, **_plain(candidate)}
            for own in self._sources
            for rank, candidate in enumerate(own.candidates)
        ]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return a dictionary of plain values for each source."""
        return [
            {
                "chosen": own.text,
                "utility": own.utility,
                "standard_error": own.standard_error,
                "lead": None if own.runner_up is None else own.runner_up.behind,
                "lead_error": None if own.runner_up is None else own.runner_up.behind_error,
                "certain": own.certain,
                "captured": own.captured,
                "rounds": own.rounds,
                "candidates": [_plain(candidate) for candidate in own.candidates],
            }
            for own in self._sources
        ]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a ``pandas.DataFrame`` with a row for each candidate, as in ``to_rows``.

        Needs the extra ``pandas``.
        """
        frame: pandas.DataFrame = required("pandas", "pandas").DataFrame(
            self.to_rows(), columns=COLUMNS
        )
        return frame

    def to_mbrs(
        self, folder: str | os.PathLike[str], sources: Sequence[str] | None = None
    ) -> MbrsFiles:
        """Write candidates and evidence as files for ``mbrs-decode``, and return where they are.

        With the same utility, chrF or BLEU, ``mbrs`` then makes the same decisions; it has other
        metrics besides, such as COMET. The log-probabilities of its references are the logarithms
        of our weights. See ``cpsbs.decisions.mbrs`` for what is written.

        Args:
            folder: where to write ``hypotheses.txt``, ``references.txt`` and
                ``reference_lprobs.txt``. It is created if it is not there, and files with these
                names are replaced.
            sources: the source texts, which some metrics need; written as ``sources.txt``.

        Raises:
            ValueError: if a text has a line break inside or is not valid Unicode, or if a source
                has more than one round of evidence.
        """
        for own in self._sources:
            if own.rounds > 1:
                raise ValueError(
                    f"source {own.source} was decided by {own.rounds} rounds of evidence, of which "
                    "only the first is kept, so that mbrs could decide otherwise; call mbr without "
                    "confidence, with a larger k instead"
                )
        weights = self.evidence.text_weights()
        choices = [
            Choice(
                [c.text for c in own.candidates],
                [c.behind for c in own.candidates],
                own.utility,
                self.evidence.texts[b],
                weights[b],
            )
            for b, own in enumerate(self._sources)
        ]
        return write_mbrs(folder, choices, self.utility, sources)


def _plain(candidate: Candidate) -> dict[str, Any]:
    """Return a candidate as plain values; an infinite bound is None."""
    return {
        "text": candidate.text,
        "utility": candidate.utility,
        "standard_error": candidate.standard_error,
        "lower": candidate.lower if math.isfinite(candidate.lower) else None,
        "upper": candidate.upper if math.isfinite(candidate.upper) else None,
        "behind": candidate.behind,
        "behind_error": candidate.behind_error,
    }
