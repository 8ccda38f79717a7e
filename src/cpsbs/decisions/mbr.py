"""Minimum Bayes risk decoding: the candidate with the largest expected utility under the model.

Beam search returns the most probable sequence, which may stand alone; what is close to much of what
the model says is often better. With a utility u(c, y), how good c is if y is the right one, choose

    c* = argmax_c U(c) ,      U(c) = E_p u(c, y) ≈ Σ_{y ∈ Y} w(y) u(c, y) .

*Candidates* and *evidence* are two roles. Candidates may come from anywhere, such as beam search,
because they are only compared; the evidence Y stands for the model, and needs weights. With the
weights of a design without replacement U(c) is estimated without bias, no two evaluations are
spent on the same sequence, and the error of U(c) and of the lead over the runner-up is known. (A
candidate that is itself part of the evidence is overrated by (w(c) − p(c)) u(c, c), because it is
there only when it was drawn: at most the order of 1/K, and nothing where its inclusion is certain.
Later rounds of ``confidence`` are free of that.) The
errors of two candidates rest on the same evidence, so that the error of their difference, which is
*paired*, is much smaller than those of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cpsbs.decisions.decision import Candidate, Decision, Decisions
from cpsbs.decisions.expected import BeamEvidence, Evidence, Means
from cpsbs.decisions.roles import candidate_texts, evidence_of
from cpsbs.decisions.utilities import Utility, as_utility, check_utilities
from cpsbs.estimation.arguments import Decode
from cpsbs.search.beams import Beams

DrawMore = Callable[[list[int], int], Beams]
"""Draws evidence for the sources with these numbers, in the round of this number (1, 2, …): an
independent beam for each."""

DEFAULT_ROUNDS = 8
"""The default for the largest number of beams of evidence for a source."""


def mbr(
    candidates: Any,
    evidence: Any = None,
    utility: Any = "chrf",
    *,
    decode: Decode | None = None,
    weights: Any = None,
    normalize: bool = False,
    confidence: float | None = None,
    draw: DrawMore | None = None,
    rounds: int = DEFAULT_ROUNDS,
    device: torch.device | str | None = None,
) -> Decisions:
    """Choose for every source the candidate with the largest expected utility.

    With ``confidence``, sources whose decision is not clear get more evidence, round by round. A
    candidate is dropped as soon as the best one leads it clearly, and a source is done when no
    rival is left. The chance that a dropped candidate is better than the one that it was dropped
    for is at most 1 − confidence, for all rivals and rounds together (by Bonferroni's inequality,
    and as far as the error bars are right). Looking again and again makes the *expected utilities*
    of sources that stopped early a little too far apart: a lead is more likely to be called clear
    when it happens to be overestimated.

    Args:
        candidates: ``Beams`` of any design, a list of such ``Beams`` whose candidates are joined,
            or a list with the texts of each source.
        evidence: ``Beams`` with weights; or a list with texts of each source, independent samples
            unless ``weights`` says otherwise. By default the candidates in their second role.
        utility: "chrf", "bleu", "exact", "edit", an object of ``cpsbs.utilities``, or a function of
            a candidate and another text.
        decode: a function from lists of tokens to texts, such as ``TextModel.decode``. Needed for
            ``Beams``.
        weights: for evidence in texts, a list with the weights of the texts of each source. For
            ``Beams``, "probability" weights every sequence by its probability under the model
            instead of by the design's weights. That is biased, works for beam search too, and tells
            no error.
        normalize: whether to divide by the sum of the weights, which changes no decision.
        confidence: how sure a decision must be, such as 0.95. Needs ``draw``.
        draw: a function that draws more evidence; ``TextModel.mbr`` brings its own.
        rounds: the largest number of beams of evidence for a source, with ``confidence``.
        device: where to compare n-grams; by default where the evidence is.

    Raises:
        ValueError: if a source has no candidates or no evidence, if evidence has no weights, or if
            a utility is not finite, naming the source.

    Warns:
        WeightWarning: as ``estimate``.
    """
    chosen = as_utility(utility)
    check_adaptive(confidence, rounds)
    given = candidates if evidence is None else evidence
    where = torch.device(device or _device_of(given))
    texts = candidate_texts(candidates, decode)
    found = evidence_of(given, decode, weights, normalize, len(texts))
    if confidence is not None and (draw is None or not isinstance(found, BeamEvidence)):
        raise ValueError(
            "confidence needs evidence that can be drawn again: Beams with weights, and draw, a "
            "function that draws more of them; or use TextModel.mbr"
        )
    values = _values(chosen, texts, found, where)
    alive = torch.tensor(
        [[i < len(own) for i in range(values.shape[-1])] for own in texts], device="cpu"
    )
    if confidence is None or draw is None:
        first = Standing.of([(found, values)], alive, chosen.bounds)
        return Decisions(_decisions(texts, first), chosen.name, found, texts)

    def scored(sources: list[int], number: int, left: Tensor) -> tuple[Evidence, Tensor]:
        more = evidence_of(draw(sources, number), decode, None, normalize, len(sources))
        own = [
            [c for i, c in enumerate(texts[s]) if a[i]]
            for s, a in zip(sources, left.tolist(), strict=True)
        ]
        return more, _spread(_values(chosen, own, more, where), left)

    standings = _settle((found, values), alive, chosen.bounds, confidence, rounds, scored)
    decisions = [
        _decisions([texts[s]], standing)[0].renumbered(s) for s, standing in enumerate(standings)
    ]
    return Decisions(tuple(decisions), chosen.name, found, texts)


class Standing:
    """How the candidates of some sources compare on all evidence so far.

    Args:
        utility: the means of the utilities [B, C].
        lead: the means of the leads of the best candidate over each [B, C].
        best: [B] the best candidate.
        alive: [B, C] which candidates are still compared.
        lower: [B, C] certain lower bounds of the utilities.
        upper: [B, C] certain upper bounds of the utilities.
        lead_lower: [B, C] certain lower bounds of the leads.
        tied: [B, C] whether a candidate has the utilities of the best one on all of the evidence.
        captured: [B] the probability of the evidence of the first round.
        rounds: the number of rounds.
    """

    def __init__(
        self,
        utility: Means,
        lead: Means,
        best: Tensor,
        alive: Tensor,
        lower: Tensor,
        upper: Tensor,
        lead_lower: Tensor,
        tied: Tensor,
        captured: Tensor,
        rounds: int,
    ) -> None:
        self.utility, self.lead, self.best, self.alive = utility, lead, best, alive
        self.lower, self.upper, self.lead_lower, self.tied = lower, upper, lead_lower, tied
        self.captured, self.rounds = captured, rounds

    @staticmethod
    def of(
        evidence: Sequence[tuple[Evidence, Tensor]],
        alive: Tensor,
        bounds: tuple[float, float] | None,
    ) -> Standing:
        """Return how candidates compare on independent evidence with utilities [B, K, C]."""
        utility = _pooled([own.means(values) for own, values in evidence])
        best = torch.where(alive, utility.value, -math.inf).argmax(-1)
        leads = [
            (own, values.gather(2, best[:, None, None].expand(*values.shape[:2], 1)) - values)
            for own, values in evidence
        ]
        lead = _pooled([own.means(values) for own, values in leads])
        low, high = bounds or (-math.inf, math.inf)
        ends = [own.bounds(values, low, high) for own, values in evidence]
        # A lead lies between the difference of the bounds and its opposite.
        span = high - low
        least = [own.bounds(values, -span, span)[0] for own, values in leads]
        return Standing(
            utility,
            lead,
            best,
            alive,
            _tightest([end[0] for end in ends], 1),
            _tightest([end[1] for end in ends], -1),
            _tightest(least, 1),
            torch.stack([(values == 0).all(1) for _, values in leads]).all(0),
            evidence[0][0].captured,
            len(evidence),
        )

    def trailing(self, risk: Tensor) -> Tensor:
        """Return [B, C] which candidates the best one leads clearly, or cannot be told from it.

        A candidate with the same utilities, such as one that differs in its spaces, would never
        fall behind, whatever the evidence.

        Args:
            risk: [B] the chance that a lead may be called clear although there is none.
        """
        clear = torch.zeros_like(self.alive)
        for one in set(risk.tolist()):
            lead = self.lead.value - self.lead.half_width(1 - one) > 0
            clear = torch.where((risk == one)[:, None], lead, clear)
        own = torch.zeros_like(self.alive).scatter_(1, self.best[:, None], True)
        return (clear | self.tied | (self.lead_lower > 0)) & self.alive & ~own

    def some(self, places: list[int]) -> Standing:
        """Return the standing of some of the sources."""

        def of(means: Means) -> Means:
            return Means(means.value[places], means.variance[places], means.freedom[places])

        return Standing(
            of(self.utility),
            of(self.lead),
            self.best[places],
            self.alive[places],
            self.lower[places],
            self.upper[places],
            self.lead_lower[places],
            self.tied[places],
            self.captured[places],
            self.rounds,
        )


def _pooled(means: Sequence[Means]) -> Means:
    """Return the mean of independent means, with degrees of freedom after Welch–Satterthwaite.

    A candidate that has been dropped is NaN from then on: its mean is that of the rounds before.
    """
    if len(means) == 1:
        return means[0]
    value = torch.stack([m.value for m in means])
    scored = ~value.isnan()
    variance = torch.where(scored, torch.stack([m.variance for m in means]), 0.0)
    freedom = torch.stack([m.freedom.to(variance) for m in means])
    total, count = variance.sum(0), scored.sum(0)
    own = total.square() / (variance.square() / freedom).sum(0)
    own = torch.where(own.isnan(), math.inf, own).clamp(min=1)
    return Means(value.nanmean(0), total / count.square(), own)


def _tightest(ends: Sequence[Tensor], sign: int) -> Tensor:
    """Return the largest of several lower bounds, or with sign −1 the smallest of upper ones."""
    known = torch.stack([sign * end for end in ends]).nan_to_num(-math.inf, math.inf, -math.inf)
    return sign * known.amax(0)


Scored = Callable[[list[int], int, Tensor], tuple[Evidence, Tensor]]
"""Draws evidence for the sources, in the round of a number, and scores the candidates that are left
[B, C]; returns the evidence and the utilities [B, K, C]."""


def _settle(
    first: tuple[Evidence, Tensor],
    alive: Tensor,
    bounds: tuple[float, float] | None,
    confidence: float,
    rounds: int,
    scored: Scored,
) -> list[Standing]:
    """Return the standing of each source when its decision is clear, or its rounds are used up."""
    risk = (1 - confidence) / (rounds * (alive.sum(-1) - 1).clamp(min=1).double())
    active, evidence = list(range(len(alive))), [first]
    settled: dict[int, Standing] = {}
    while True:
        standing = Standing.of(evidence, alive, bounds)
        left = alive & ~standing.trailing(risk)
        clear = left.sum(-1) <= 1
        last = len(evidence) == rounds
        for i, source in enumerate(active):
            if last or bool(clear[i]):
                settled[source] = standing.some([i])
        places = [] if last else (~clear).nonzero()[:, 0].tolist()
        if not places:
            return [settled[source] for source in sorted(settled)]
        active, alive, risk = [active[i] for i in places], left[places], risk[places]
        evidence = [
            (own.some(places), values[places])
            for own, values in evidence
            if isinstance(own, BeamEvidence)
        ]
        evidence.append(scored(active, len(evidence), alive))


def _values(
    utility: Utility, candidates: list[list[str]], evidence: Evidence, device: torch.device
) -> Tensor:
    """Return [B, K, C] the utilities of all candidates for all of the evidence."""
    tables = utility.tables(candidates, evidence.texts, device)
    height, width = max(map(len, candidates)), max(map(len, evidence.texts))
    whole = torch.zeros((len(tables), height, width), dtype=torch.float64, device="cpu")
    for source, table in enumerate(tables):
        own = candidates[source], evidence.texts[source]
        if table.shape != (len(own[0]), len(own[1])):
            raise ValueError(
                f"the utility {utility.name} returned the shape {list(table.shape)} for source "
                f"{source}; it must be [candidates, evidence] = {[len(x) for x in own]}"
            )
        check_utilities(table, utility, source, own)
        whole[source, : len(own[0]), : len(own[1])] = table
    return evidence.columns(whole)


def _spread(values: Tensor, alive: Tensor) -> Tensor:
    """Return [B, K, C] utilities of the candidates that are left in their places, else NaN."""
    shape = (*values.shape[:2], alive.shape[1])
    place = alive.cumsum(-1).sub(1).clamp(min=0)[:, None, :].expand(shape)
    return torch.where(alive[:, None, :], values.gather(2, place), math.nan)


def _device_of(given: Any) -> torch.device:
    first = given[0] if isinstance(given, list | tuple) and given else given
    return first.sequences.device if isinstance(first, Beams) else torch.device("cpu")


def check_adaptive(confidence: float | None, rounds: int) -> None:
    """Raise a ValueError if evidence cannot be drawn so often, or decisions cannot be so sure."""
    if confidence is not None and not (isinstance(confidence, int | float) and 0 < confidence < 1):
        raise ValueError(f"confidence is {confidence!r}; it must be a number between 0 and 1")
    if not isinstance(rounds, int) or rounds < 1:
        raise ValueError(f"rounds is {rounds!r}; it must be a whole number, at least 1")


def _decisions(texts: list[list[str]], standing: Standing) -> tuple[Decision, ...]:
    """Return the decisions of all sources, the candidates of each by expected utility."""
    utility, lead = standing.utility, standing.lead
    errors = (means.variance.sqrt().tolist() for means in (utility, lead))
    of_utility, of_lead = errors
    value, ahead = utility.value.tolist(), lead.value.tolist()
    low, high, least = (x.tolist() for x in (standing.lower, standing.upper, standing.lead_lower))
    captured, alive = standing.captured.tolist(), standing.alive.tolist()
    found = []
    for b, own in enumerate(texts):
        best = int(standing.best[b])
        rows = [
            Candidate(
                text=text,
                utility=value[b][i],
                standard_error=_known(of_utility[b][i]),
                lower=low[b][i],
                upper=high[b][i],
                behind=0.0 if i == best else ahead[b][i],
                behind_error=0.0 if i == best else _known(of_lead[b][i]),
                certainly_behind=i != best and least[b][i] > 0,
                compared=alive[b][i],
            )
            for i, text in enumerate(own)
        ]
        first = rows.pop(best)  # by rounding, an equally good one may be behind by less than zero
        rows.sort(key=lambda row: (not row.compared, row.behind))
        found.append(Decision(b, (first, *rows), _known(captured[b]), standing.rounds))
    return tuple(found)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
