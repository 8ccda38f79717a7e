"""What to draw for a decision: which candidates, how much evidence, and when to stop.

    Plan.parse("beam:16+evidence", k=32)

Candidates are named as a sum: ``beam:16`` are the 16 sequences of beam search, ``stratified:16``
(or any other design) 16 that are drawn for this role alone, and ``evidence`` are all sequences of
the evidence, which cost nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cpsbs.decisions.decision import Decisions
from cpsbs.decisions.mbr import DEFAULT_ROUNDS, check_adaptive, mbr
from cpsbs.designs import DEFAULT_DESIGN, design_named
from cpsbs.estimation.arguments import Decode
from cpsbs.search.beams import Beams
from cpsbs.search.settings import SearchSettings

BEAM, EVIDENCE = "beam", "evidence"
"""The names of candidates that are not those of a design."""

PROBABILITY = "probability"
"""The name of weights that are the model's probabilities."""

DEFAULT_CANDIDATES = "beam:8+evidence"
"""The default for the candidates."""
DEFAULT_SIZE = 24
"""The default for the number of sequences of the evidence."""
DEFAULT_TEMPERATURE = 0.7
"""The default for the temperature of the evidence. All three were chosen on newstest2013; see
docs/how-to/mbr.md."""

SEED_STEP = 2**32
"""How far the seeds of the draws for one decision are apart: farther than people type."""


class Drawer(Protocol):
    """Draws beams for the sources with these numbers."""

    def __call__(self, numbers: list[int], settings: SearchSettings, seed_offset: int) -> Beams:
        """Return a beam for each source; another offset gives an independent one."""


@dataclass(frozen=True)
class Part:
    """A part of the candidates: so many sequences of a design."""

    name: str
    size: int

    def settings(self, evidence: SearchSettings) -> SearchSettings:
        """Return the settings of the search, given those of the evidence."""
        if self.name != BEAM:
            return replace(evidence, k=self.size, design=design_named(self.name), joint=False)
        # Beam search looks for what is probable under the model itself.
        return SearchSettings(self.size, design_named("top-k"), evidence.max_length)


@dataclass(frozen=True)
class Plan:
    """Candidates, evidence, and when a decision is clear."""

    parts: tuple[Part, ...]
    """The candidates that are drawn besides the evidence."""
    with_evidence: bool
    """Whether the sequences of the evidence are candidates too."""
    k: int
    """The number of sequences of the evidence, of each round."""
    design: str = DEFAULT_DESIGN
    """The design of the evidence."""
    confidence: float | None = None
    """How sure a decision must be; None to draw evidence once."""
    rounds: int = DEFAULT_ROUNDS
    """The largest number of rounds of evidence."""
    weights: str | None = None
    """"probability" to weight the evidence by p instead of by the design's weights."""

    @staticmethod
    def parse(candidates: str = DEFAULT_CANDIDATES, k: int = DEFAULT_SIZE, **more: Any) -> Plan:
        """Return the plan for candidates that are named as a sum, such as ``beam:16+evidence``."""
        parts, with_evidence = [], False
        for word in candidates.split("+"):
            name, colon, number = word.strip().partition(":")
            if name == EVIDENCE and not colon:
                with_evidence = True
                continue
            if name == EVIDENCE or not number.isdecimal() or not 1 <= int(number) <= 1_000_000:
                raise ValueError(
                    f"candidates is {candidates!r}; it must be a sum of parts such as beam:16, "
                    f"stratified:16 and {EVIDENCE}"
                )
            if name != BEAM:
                _check_design(name, candidates)
            parts.append(Part(name, int(number)))
        plan = Plan(tuple(parts), with_evidence, k, **more)
        check_adaptive(plan.confidence, plan.rounds)
        if plan.weights not in (None, PROBABILITY):
            raise ValueError(f"weights is {plan.weights!r}; it must be {PROBABILITY!r} or None")
        if plan.weights is None and not design_named(plan.design).estimates:
            raise ValueError(
                f"design is {plan.design!r}, which has no weights; evidence needs a design that "
                f"has them, such as 'stratified'; or weights={PROBABILITY!r} (--p-weighted), which "
                "is biased"
            )
        if plan.weights is not None and plan.confidence is not None:
            raise ValueError(
                f"confidence is {plan.confidence}, but evidence with weights={PROBABILITY!r} tells "
                "no error; leave one of them out"
            )
        if plan.confidence is not None and not design_named(plan.design).tells_error:
            raise ValueError(
                f"design is {plan.design!r}, a single beam of which gives no error bar; confidence "
                "needs one that does, such as 'stratified'"
            )
        return plan

    @property
    def searches(self) -> list[tuple[int, Part | None]]:
        """The offset of the seed and the part of each search, None standing for the evidence.

        Further rounds of evidence are not among them.
        """
        return [(0, None), *((SEED_STEP * (i + 1), part) for i, part in enumerate(self.parts))]

    def evidence_settings(
        self, max_length: int, temperature: float, nucleus: float | None = None
    ) -> SearchSettings:
        """Return the settings with which evidence is drawn."""
        design = design_named(self.design)
        joint = design.needs_joint and self.k > 1 and self.weights is None
        return SearchSettings(self.k, design, max_length, temperature, nucleus, joint=joint)

    def decide(
        self,
        drawn: Sequence[Beams],
        numbers: list[int],
        draw: Drawer,
        settings: SearchSettings,
        utility: Any,
        decode: Decode,
    ) -> Decisions:
        """Return the decisions for the sources with these numbers.

        Args:
            drawn: the results of ``searches``, the evidence first.
            numbers: the numbers of the sources.
            draw: draws more evidence, if the plan is adaptive.
            settings: the settings of the evidence.
            utility: as for ``mbr``.
            decode: as for ``mbr``.
        """
        evidence, *others = drawn
        # Beam search first: of candidates that are equally good, the first is chosen.
        candidates = [*others, evidence] if self.with_evidence else others
        rounds_begin = len(self.parts)

        def again(sources: list[int], number: int) -> Beams:
            offset = SEED_STEP * (rounds_begin + number)
            return draw([numbers[s] for s in sources], settings, offset)

        return mbr(
            candidates,
            evidence,
            utility,
            decode=decode,
            weights=self.weights,
            confidence=self.confidence,
            draw=again,
            rounds=self.rounds,
        )


def _check_design(name: str, candidates: str) -> None:
    """Raise a ValueError that lists the designs if a part of the candidates names none of them."""
    try:
        design_named(name)
    except ValueError as error:
        raise ValueError(f"candidates is {candidates!r}: {error}") from error
