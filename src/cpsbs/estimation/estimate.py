"""Expectations from beams, with their uncertainty (§4 of the paper, and beyond it).

The estimate of E_p f from a beam Y is the weighted sum

    G = Σ_{y ∈ Y} w(y) f(y) ,      w(y) = p(y) / π(y)                                    (eq:ht)

With π(y) the product of inclusion probabilities along the path that the search took, G is *exactly
unbiased*: P(path) / Π_t π_t is the law of the search that is forced to keep y at every step
(lem:decomposition), which sums to one over the paths, for every y. The paper uses the same number,
which is M = 1 of ``eq:is-good``, but presents it as a consistent estimator only. *Normalised*
estimates divide by Σ w. They are biased, but their error is much smaller where the weights vary
much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cpsbs.designs.variance import infinite_freedom
from cpsbs.estimation.result import Estimate
from cpsbs.estimation.uncertainty import one_beam_variance
from cpsbs.estimation.values import Decode, Known, check_function, function_values
from cpsbs.estimation.weights import log_weights_of, warn_of_far_sums
from cpsbs.search.beams import Beams

Weighted = dict[tuple[int, ...], tuple[float, float]]
"""The relative weight and log p of each distinct sequence of a source, by its tokens."""

AGREEMENT = 1e-14
"""A variance of several beams of at most this, relative to the square of the value, is rounding of
beams that agree; log-probabilities are in float32."""

COMPLETE = 1e-5
"""By how much Σp may differ from one in a beam that holds all sequences: log-probabilities are sums
of up to some hundred float32 numbers."""

SAME = 1e-9
"""By how much Σ |w − p| may differ from zero in a beam whose weights are the probabilities. Where
mass is missing, unbiased weights exceed the probabilities by as much in expectation, so that this
bounds what is missing far more tightly than Σp does."""


def estimate(
    beams: Beams | Sequence[Beams],
    f: Any,
    *,
    normalize: bool = False,
    log_inclusion: Any = None,
    decode: Decode | None = None,
    name: str | None = None,
) -> Estimate:
    """Estimate the expectation E_p f(y) for every source.

    The estimand is the expectation under the distribution p that was searched: the model's, after
    logits processors, temperature and nucleus truncation, and *truncated at* ``max_length``. A
    sequence that has not ended after ``max_length`` tokens is an outcome like any other, with the
    probability of its tokens, so that the probabilities of all outcomes sum to one; f is called on
    these tokens. Whether a sequence has ended is in ``Beams.finished``; if truncated sequences
    must not count, raise ``max_length`` until hardly any are left.

    Args:
        beams: the result of ``search``; or a list of independent ones of the same kind (other
            seeds, the same settings), whose spread gives the standard error.
        f: a function of a sequence, which is given as a list of tokens or, with ``decode``, as a
            text, and returns a number or a vector. It is called once for each different sequence of
            a source. If it has an attribute ``batched`` that is true, it is given a list of
            sequences and returns a number or vector for each. Or a list with such a function for
            each source; or an object of ``cpsbs.functions``, or of the same form.
        normalize: whether to divide by the sum of the weights.
        log_inclusion: [B, K] log π(y) to use instead of the beams' own, or an ``Inclusion``. There
            is no error bar then, because it would have to include the error of π.
        decode: a function from lists of tokens to texts, such as
            ``partial(tokenizer.batch_decode, skip_special_tokens=True)``.
        name: the name of f in the printed result.

    Raises:
        ValueError: if f fails, naming the sequence; or if the beams have no weights.

    Warns:
        WeightWarning: if the sums of the weights are far from one, so that the estimate is not to
            be trusted, normalised or not.
    """
    several = _checked(beams)
    check_function(f, len(several[0]))
    log_inclusion = getattr(log_inclusion, "log_value", log_inclusion)
    if log_inclusion is not None and len(several) > 1:
        raise ValueError(
            "log_inclusion belongs to one Beams; it cannot be given with a list of them"
        )
    log_weights = torch.stack([log_weights_of(b, log_inclusion) for b in several])
    known: list[Known] = [{} for _ in range(len(several[0]))]
    values = torch.stack([function_values(f, b, known, decode) for b in several])
    # Weights may be too small for a float, so that where only their ratios count they are relative
    # to the largest of the source.
    largest = log_weights.amax((0, 2)).clamp(min=-1e300)
    unit = largest if normalize else torch.zeros_like(largest)
    weights = (log_weights - unit[:, None]).exp()
    total = (weights[..., None] * values).sum(2)
    norm = weights.sum(-1, keepdim=True)
    value = total.mean(0) / norm.mean(0) if normalize else total.mean(0)
    if len(several) > 1:
        # The terms of a mean of R beams; of a ratio of means, by linearisation.
        terms = (total - norm * value) / norm.mean(0) if normalize else total
        variance, freedom = _repeated_variance(terms, value)
    elif log_inclusion is not None:
        variance, freedom = None, infinite_freedom(weights[0])
    elif normalize:
        log_norm = unit + norm[0, :, 0].log()
        weight = weights[0] / norm[0]
        centred = (values[0] - value[:, None]) * several[0].present[..., None]
        variance, freedom = one_beam_variance(several[0], weight, centred, log_norm, value)
    else:
        variance, freedom = one_beam_variance(several[0], weights[0], values[0], None, value)
    relative = (log_weights - largest[:, None]).exp()
    factor = relative.sum(-1).reciprocal() if normalize else largest.exp().expand(len(several), -1)
    tables = [
        [_by_sequence(b, w[i], i) for b, w in zip(several, relative, strict=True)]
        for i in range(len(known))
    ]
    factors = factor.T.tolist()
    exact = _on_cpu([all(map(_is_exact, *pair)) for pair in zip(tables, factors, strict=True)])
    if bool(exact.any()):
        unknown = torch.full_like(value, math.nan) if variance is None else variance
        variance = torch.where(exact.to(value.device)[:, None], 0.0, unknown)
    sum_of_weights = log_weights.exp().sum(-1).mean(0).cpu()
    warn_of_far_sums(sum_of_weights, several[0].design, normalize)
    merged = [_merged(of_source) for of_source in tables]
    scalar = all(v.ndim == 0 for table in known for v in table.values())
    seeds = [b.settings.get("seed") for b in several]
    weighting = "unbiased weights" if log_inclusion is None else "given inclusion"
    return Estimate(
        value=value[:, 0] if scalar else value,
        variance=None if variance is None else (variance[:, 0] if scalar else variance),
        freedom=freedom,
        exact=exact,
        distinct=_on_cpu([len(m) for m in merged]),
        effective_size=_on_cpu([_effective_size([w for w, _ in m.values()]) for m in merged]),
        captured=_on_cpu([sum(math.exp(p) for _, p in m.values()) for m in merged]),
        sum_of_weights=sum_of_weights,
        function=name or str(getattr(f, "name", getattr(f, "__name__", type(f).__name__))),
        estimator=weighting + (", normalised" if normalize else ""),
        repeats=len(several),
        settings={**several[0].settings, **({"seed": seeds} if len(several) > 1 else {})},
        advice=_advice(several, log_inclusion is not None),
    )


def _checked(beams: Beams | Sequence[Beams]) -> list[Beams]:
    """Return the beams as a list, if they can be averaged: independent ones of one kind."""
    several = [beams] if isinstance(beams, Beams) else []
    if isinstance(beams, list | tuple):
        several = list(beams)
    if not several or not all(isinstance(b, Beams) for b in several):
        raise ValueError("beams must be Beams, or a list of Beams that is not empty")
    if len({(b.design, b.k, len(b)) for b in several}) > 1:
        raise ValueError("beams of different designs, sizes or numbers of sources cannot be mixed")
    designs: list[Any] = [b.made_by for b in several]
    if None in designs:  # beams from elsewhere have at most the printed design
        designs = [b.settings.get("design") for b in several]
    if any(design != designs[0] for design in designs):
        raise ValueError(
            f"beams made with different settings of design cannot be mixed: {designs}. A design "
            "that is not a frozen dataclass equals only itself: pass one object to all searches"
        )
    for name in ("temperature", "nucleus", "max_length", "model"):
        made = [b.settings.get(name) for b in several]
        if any(value != made[0] for value in made):
            raise ValueError(
                f"beams made with different settings of {name} cannot be mixed: {made}"
            )
    # Beams of several rounds that differ in the seeds of some have one for each round.
    rounds: dict[tuple[int, Any], int] = {}
    for b in several:
        seed = b.settings.get("seed")
        for at, own in enumerate(seed if isinstance(seed, list | tuple) else [seed]):
            if own is not None:
                rounds[at, own] = rounds.get((at, own), 0) + 1
    if max(rounds.values(), default=1) > 1:
        raise ValueError(
            "two of the beams were drawn with the same seed, so they are not independent; search "
            "with different seeds"
        )
    return several


def _repeated_variance(terms: Tensor, value: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return [B, d] the variance of a mean of terms [R, B, d], and [B] its degrees of freedom.

    It is NaN where the terms agree, because that does not tell how often others would differ.
    """
    variance = terms.var(0) / len(terms)
    variance = torch.where(variance > AGREEMENT * value.square(), variance, math.nan)
    return variance, _on_cpu([float(len(terms) - 1)] * len(value))


def _by_sequence(beams: Beams, weight: Tensor, source: int) -> Weighted:
    """Return the weights [K] of a source's beam by sequence; those of repeats are added up."""
    here = beams.present[source]
    table: Weighted = {}
    rows = (beams.tokens(source), weight[here].tolist(), beams.log_prob[source][here].tolist())
    for y, w, log_p in zip(*rows, strict=True):
        before = table.get(tuple(y), (0.0, log_p))[0]
        table[tuple(y)] = (before + w, log_p)
    return table


def _merged(tables: Sequence[Weighted]) -> Weighted:
    """Return the sums of the weights over several beams of a source."""
    merged: Weighted = {}
    for table in tables:
        for y, (w, log_p) in table.items():
            merged[y] = (merged.get(y, (0.0, log_p))[0] + w, log_p)
    return merged


def _is_exact(table: Weighted, factor: float) -> bool:
    """Return whether a beam holds all sequences and weights each by its probability.

    The weights in the table are to be multiplied by ``factor``.
    """
    pairs = [(w * factor, math.exp(log_p)) for w, log_p in table.values()]
    captured = sum(p for _, p in pairs)
    return abs(captured - 1) <= COMPLETE and sum(abs(w - p) for w, p in pairs) <= SAME


def _effective_size(weights: Sequence[float]) -> float:
    """Return (Σ w)² / Σ w²."""
    square = sum(w * w for w in weights)
    return sum(weights) ** 2 / square if square > 0 else 0.0


def _advice(several: Sequence[Beams], given: bool) -> str:
    """Return what to do to get an error bar where the beams do not tell their error."""
    if given or len(several) > 1:
        return ""
    (beams,) = several
    by_joint = beams.made_by is not None and beams.made_by.needs_joint and beams.k > 1
    if by_joint and beams.joint_log_inclusion is None:
        return "search with joint=True"
    return "estimate from a list of independent beams"


def _on_cpu(values: Sequence[float]) -> Tensor:
    """Return [n] the numbers as a tensor on the CPU, whatever torch's default device is."""
    return torch.tensor(values, device="cpu")
