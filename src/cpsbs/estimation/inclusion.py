"""Estimates of π(y), the probability that a search keeps the sequence y (§4.2 of the paper).

π(y) is a sum over all paths of the search (eq:monster-inclusion). There are three ways to estimate
it:

- **own path**, ``Beams.log_inclusion``: the product Π_t π_t(y | Y_{t−1}) along the path that was
  taken. Its reciprocal is an unbiased estimate of 1/π(y), given that y was kept.
- **naive Monte Carlo** (eq:mc-naive): the share of M independent searches that keep y. It is
  unbiased for π(y), but useless for sequences that rarely come up: one that never came up has no
  estimate.
- **hindsight importance sampling** (eq:is-good): the mean of Π_t π_t(y | Ỹ_{t−1}) over M searches
  that are forced to keep y, each step drawn from Q given that the prefix of y is picked
  (eq:beam_cp_p). It is unbiased for π(y), and its reciprocal is consistent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cpsbs.conditional_poisson.population import split
from cpsbs.conditional_poisson.sampling import log_inclusion_at
from cpsbs.conditional_poisson.weights import WithForcedItem
from cpsbs.designs import ConditionalPoissonDesign, Design, design_named
from cpsbs.designs.base import DrawingDesign
from cpsbs.designs.conditional_poisson import draw_poisson
from cpsbs.models.base import SequenceModel
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Candidates, Selection
from cpsbs.search.api import search
from cpsbs.search.beams import Beams

Models = Callable[[Tensor], SequenceModel]
"""A function from the numbers [n] of some sources, which may repeat, to a fresh model of them."""


@dataclass(frozen=True)
class Inclusion:
    """Estimates of π(y) for the sequences of beams."""

    log_value: Tensor
    """[B, K] log π(y), to be passed to ``estimate``; NaN where there is no estimate or sequence."""
    standard_error: Tensor
    """[B, K] the standard error of π(y); NaN where it is not known."""
    runs: int
    """M, the number of searches."""
    method: str
    """The name of the method."""
    never: Tensor
    """[B, K] whether the sequence came up in none of the runs."""
    log_runs: Tensor | None = None
    """[B, K, M] log Π_t π_t of each run of hindsight importance sampling; None for Monte Carlo."""

    def __str__(self) -> str:
        missing = int(self.never.sum())
        text = f"π by {self.method}, {self.runs} runs"
        if missing:
            text += f"; {missing} of the sequences never came up and have no estimate"
        return text


def monte_carlo_inclusion(
    models: Models,
    beams: Beams,
    runs: int,
    design: str | Design | None = None,
    *,
    generator: torch.Generator | None = None,
    batch_size: int = 64,
) -> Inclusion:
    """Estimate π(y) by the share of independent searches that keep y (eq:mc-naive).

    Args:
        models: a function from the numbers of some sources, a tensor with one number for each
            search that is run at once, to a model of them: ``lambda i: TransformersModel(model,
            input_ids=ids[i], attention_mask=mask[i])``.
        beams: the beams whose sequences are looked for, by searches with the same settings.
        runs: M, the number of searches for each source.
        design: the design that drew the beams; theirs by default.
        generator: the generator of the random numbers.
        batch_size: the number of searches to run at once.
    """
    chosen = _design_of(beams, design)
    _check(beams, chosen, runs, batch_size)
    if not chosen.distinct:
        raise ValueError(
            f"design is {chosen!r}, which may draw a sequence twice; it must be one without "
            "replacement"
        )
    hits = torch.zeros_like(beams.log_prob)
    places = [dict(_places(beams, b)) for b in range(len(beams))]
    jobs = torch.arange(len(beams), device=hits.device).repeat_interleave(runs)
    for job in torch.split(jobs, batch_size):
        drawn = _search(models(job), beams, chosen, generator)
        for row, b in enumerate(job.tolist()):
            for y in drawn.tokens(row):
                place = places[b].get(tuple(y))
                if place is not None:
                    hits[b, place] += 1
    pi = hits / runs
    never = beams.present & (hits == 0)
    return Inclusion(
        log_value=torch.where(hits > 0, pi.log(), math.nan),
        standard_error=torch.where(hits > 0, monte_carlo_variance(pi, runs).sqrt(), math.nan),
        runs=runs,
        method="Monte Carlo",
        never=never,
    )


def hindsight_inclusion(
    models: Models,
    beams: Beams,
    runs: int,
    design: str | Design | None = None,
    *,
    generator: torch.Generator | None = None,
    batch_size: int = 64,
) -> Inclusion:
    """Estimate π(y) by hindsight importance sampling, from searches forced to keep y (eq:is-good).

    Args:
        models: as for ``monte_carlo_inclusion``.
        beams: beams drawn by conditional Poisson sampling.
        runs: M, the number of searches for each sequence.
        design: the design that drew the beams; theirs by default.
        generator: the generator of the random numbers.
        batch_size: the number of searches to run at once.
    """
    chosen = _design_of(beams, design)
    if not isinstance(chosen, ConditionalPoissonDesign):
        raise ValueError(
            f"design is {chosen!r}; hindsight importance sampling is for conditional-poisson only"
        )
    _check(beams, chosen, runs, batch_size)
    source, place = beams.present.nonzero(as_tuple=True)
    jobs = torch.arange(len(source), device=source.device).repeat_interleave(runs)
    products = []
    for job in torch.split(jobs, batch_size):
        b, i = source[job], place[job]
        forced = Hindsight(chosen, beams.sequences[b, i], beams.lengths[b, i])
        drawn = _search(models(b), beams, forced, generator)
        assert drawn.log_inclusion is not None
        products.append(drawn.log_inclusion.amax(-1))
    log_product = torch.cat(products).view(-1, runs)
    log_runs = beams.log_prob.new_full((*beams.log_prob.shape, runs), math.nan)
    log_runs[source, place] = log_product
    log_value = log_runs.logsumexp(-1) - math.log(runs)
    error = torch.full_like(log_value, math.nan)
    if runs > 1:
        error = log_runs.exp().std(-1) / math.sqrt(runs)
    never = torch.zeros_like(beams.present)
    return Inclusion(log_value, error, runs, "hindsight importance sampling", never, log_runs)


class Hindsight(DrawingDesign):
    """Conditional Poisson sampling given that the prefix of a sequence is picked: the paper's Q̃.

    Each source of the search is forced through one sequence. ``log_inclusion`` of the result is
    Σ_t log π_t of that sequence under Q, and -inf for all others.

    Args:
        design: the design Q.
        sequences: [B, T] the sequence that each source is forced through.
        lengths: [B] their numbers of tokens.
    """

    name = "hindsight"
    power_sums = 4

    def __init__(
        self, design: ConditionalPoissonDesign, sequences: Tensor, lengths: Tensor
    ) -> None:
        self.design, self._sequences, self._lengths = design, sequences, lengths

    def begin(self, k: int, streams: Streams, sources: Tensor) -> Mapping[str, Tensor]:
        """Return the number of the source, the step, and 1 for a prefix that is on the sequence."""
        number = sources[:, None]
        return {"row": number, "step": torch.zeros_like(number), "on": torch.ones_like(number)}

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        """Pick the prefix of the sequence, and K − 1 other candidates."""
        selection = super().select(candidates, k, streams, joint)
        state = candidates.state
        on = (selection.index == self._forced(candidates)) & selection.present
        places = selection.index.shape
        return Selection(
            selection.index,
            selection.present,
            selection.log_inclusion,
            state={
                "row": state["row"][:, :1].expand(places),
                "step": state["step"][:, :1].expand(places) + 1,
                "on": on.to(torch.int64),
            },
        )

    def log_weight(
        self, log_prob: Tensor, log_inclusion: Tensor | None, state: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return Σ_t log π_t of the sequence, and no weights."""
        assert log_inclusion is not None
        return torch.where(state["on"] > 0, log_inclusion, -math.inf), None

    def _forced(self, candidates: Candidates) -> Tensor:
        """Return [B, 1] the candidate that is a prefix of the sequence."""
        row, step = candidates.state["row"][:, 0], candidates.state["step"][:, 0]
        parent = candidates.state["on"].argmax(-1)
        # A sequence that has ended is its own candidate, in the place of token 0.
        ended = step >= self._lengths[row]
        last = self._sequences.shape[-1] - 1
        token = torch.where(ended, 0, self._sequences[row, step.clamp(max=last)])
        return (parent * candidates.shape[-1] + token)[:, None]

    def draw(self, candidates: Candidates, k: int, streams: Streams, joint: bool) -> Selection:
        """Draw from Q̃; ``log_inclusion`` is that of the prefix under Q in every place."""
        weights = self.design.candidate_weights(candidates, k)
        forced = self._forced(candidates)
        row = torch.arange(len(forced), device=forced.device)[:, None]
        with torch.inference_mode():
            population = split(weights, k, "the model's scores")
            y = population.relative(weights.take(row, forced))
            log_pi = log_inclusion_at(population, y).clone()
        forcing = WithForcedItem(weights, forced)
        drawn = draw_poisson(forcing, k, streams, False, candidates.chunks.backend)
        return Selection(drawn.index, drawn.present, log_pi.expand(drawn.index.shape))


def monte_carlo_variance(pi: Tensor, runs: int) -> Tensor:
    """Return Var π^MC = (π − π²) / M (eq:mc-var)."""
    return (pi - pi.square()) / runs


def monte_carlo_reciprocal_variance(pi: Tensor, runs: int) -> Tensor:
    """Return the asymptotic variance of 1/π^MC, (1/π³ − 1/π²) / M (prop:estimator-2)."""
    return (pi**-3 - pi**-2) / runs


def hindsight_reciprocal_variance_bound(pi: Tensor, ratio: Tensor, runs: int) -> Tensor:
    """Return the bound of prop:is on the asymptotic variance of 1/π^IS, (r − 1) / (M π²).

    ``ratio`` is r, a bound on Π_t π_t / π over all paths through y.
    """
    return (ratio - 1) / (runs * pi.square())


def _search(
    model: SequenceModel, beams: Beams, design: Design, generator: torch.Generator | None
) -> Beams:
    """Search with the settings that the beams were made with."""
    made = beams.settings
    return search(
        model,
        made["k"],
        design,
        max_length=made["max_length"],
        temperature=made["temperature"],
        nucleus=made["nucleus"],
        generator=generator,
    )


def _places(beams: Beams, source: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Return the sequences of a source, each with its place in the beam."""
    places = beams.present[source].nonzero()[:, 0].tolist()
    return zip(map(tuple, beams.tokens(source)), places, strict=True)


def _design_of(beams: Beams, design: str | Design | None) -> Design:
    """Return the design that is given, or the one that drew the beams."""
    return design_named(design or beams.made_by or beams.design)


def _check(beams: Beams, design: Design, runs: int, batch_size: int) -> None:
    """Raise a ValueError if an argument is out of range or does not fit the beams."""
    if beams.latest is not None:
        raise ValueError(
            "beams were drawn in several rounds, by more or until; inclusion "
            "probabilities can be estimated only for beams of one search"
        )
    made = beams.settings.get("design")
    if made != repr(design):
        raise ValueError(f"design is {design!r}; it must be that of the beams, which is {made}")
    if runs < 1:
        raise ValueError(f"runs is {runs}; it must be at least 1")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
