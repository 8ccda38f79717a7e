"""Expectations from beams, with their uncertainty (§4 of the paper, and beyond it).

The estimate of E_p f from a beam Y is the weighted sum

    G = Σ_{y ∈ Y} w(y) f(y) ,      w(y) = p(y) / π(y)                                    (eq:ht)

With π(y) the product of inclusion probabilities along the path that the search took, G is *exactly
unbiased*: P(path) / Π_t π_t is the law of the search that is forced to keep y at every step
(lem:decomposition), which sums to one over the paths, for every y. The paper uses the same number,
which is M = 1 of ``eq:is-good``, but presents it as a consistent estimator only. *Normalised*
estimates divide by Σ w. They are biased, but their error is much smaller where the weights vary
much.

``estimate`` is at the top; ``FunctionValues`` below it calls f.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cpsbs.designs.variance import infinite_freedom
from cpsbs.estimation.arguments import Decode, check_function, checked_beams, decoded
from cpsbs.estimation.bounds import Bounds, certified, check_within, stated_bounds
from cpsbs.estimation.result import Estimate
from cpsbs.estimation.uncertainty import one_beam_variance
from cpsbs.estimation.weights import WeightTables, log_weights_of, warn_of_far_sums
from cpsbs.search.beams import Beams

AGREEMENT = 1e-14
"""A variance of several beams of at most this, relative to the square of the value, is rounding of
beams that agree; log-probabilities are in float32."""


def estimate(
    beams: Beams | Sequence[Beams],
    f: Any,
    *,
    normalize: bool = False,
    log_inclusion: Any = None,
    decode: Decode | None = None,
    bounds: Bounds | None = None,
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
        bounds: (a, b), between which every value of f lies, whether seen or not; -inf and inf are
            allowed, and lists of numbers if f is vector-valued. The result then has bounds that are
            certain, ``Estimate.bounds``. By default what f itself says by an attribute ``bounds``,
            and (0, 1) if f returns true or false.
        name: the name of f in the printed result.

    Raises:
        ValueError: if f fails or lies outside its bounds, naming the sequence; or if the beams
            have no weights and f has no bounds. Beams without weights, such as those of beam
            search, have certain bounds only: the value is NaN.

    Warns:
        WeightWarning: if the sums of the weights are far from one, so that the estimate is not to
            be trusted, normalised or not.
    """
    several = checked_beams(beams)
    check_function(f, len(several[0]))
    log_inclusion = getattr(log_inclusion, "log_value", log_inclusion)
    if log_inclusion is not None and len(several) > 1:
        raise ValueError(
            "log_inclusion belongs to one Beams; it cannot be given with a list of them"
        )
    evaluated = FunctionValues(f, decode, len(several[0]))
    values = torch.stack([evaluated.of_beams(b) for b in several])
    limits = stated_bounds(f, bounds, evaluated.boolean, several[0], values.shape[-1])
    if limits is not None:
        check_within(limits, several, values)
    weighted = log_inclusion is not None or several[0].log_weight is not None
    if weighted or limits is None:
        log_weights = torch.stack([log_weights_of(b, log_inclusion) for b in several])
    else:
        log_weights = torch.full_like(torch.stack([b.log_prob for b in several]), -math.inf)
    # Weights may be too small for a float, so that where only their ratios count they are relative
    # to the largest of the source.
    largest = log_weights.amax((0, 2)).clamp(min=-1e300)
    unit = largest if normalize else torch.zeros_like(largest)
    weights = (log_weights - unit[:, None]).exp()
    total = (weights[..., None] * values).sum(2)
    norm = weights.sum(-1, keepdim=True)
    value = total.mean(0) / norm.mean(0) if normalize else total.mean(0)
    if not weighted:
        value, variance, freedom = value * math.nan, None, infinite_freedom(weights[0])
    elif len(several) > 1:
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
    tables = WeightTables.of(several, log_weights, largest)
    exact = tables.exact(normalize)
    if bool(exact.any()):
        unknown = torch.full_like(value, math.nan) if variance is None else variance
        variance = torch.where(exact.to(value.device)[:, None], 0.0, unknown)
    lower, upper = None, None
    if limits is not None:
        ends = certified(limits, tables.probabilities, evaluated.known, values.shape[-1])
        lower, upper = (torch.where(exact[:, None], value.cpu(), end) for end in ends)
    sums = log_weights.exp().sum(-1).mean(0).cpu()
    if weighted:
        warn_of_far_sums(sums, several[0].design, normalize)

    def shaped(x: Tensor | None) -> Tensor | None:
        return x[:, 0] if x is not None and evaluated.scalar else x

    seeds = [b.settings.get("seed") for b in several]
    weighting = "unbiased weights" if log_inclusion is None else "given inclusion"
    return Estimate(
        value=value[:, 0] if evaluated.scalar else value,
        variance=shaped(variance),
        freedom=freedom,
        exact=exact,
        distinct=tables.distinct,
        effective_size=tables.effective_size,
        captured=tables.captured,
        sum_of_weights=sums,
        function=name or str(getattr(f, "name", getattr(f, "__name__", type(f).__name__))),
        estimator=weighting + (", normalised" if normalize else "") if weighted else "no weights",
        repeats=len(several),
        settings={**several[0].settings, **({"seed": seeds} if len(several) > 1 else {})},
        advice=_advice(several, log_inclusion is not None),
        lower=shaped(lower),
        upper=shaped(upper),
    )


def _repeated_variance(terms: Tensor, value: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return [B, d] the variance of a mean of terms [R, B, d], and [B] its degrees of freedom.

    It is NaN where the terms agree, because that does not tell how often others would differ.
    """
    variance = terms.var(0) / len(terms)
    variance = torch.where(variance > AGREEMENT * value.square(), variance, math.nan)
    return variance, torch.full((len(value),), float(len(terms) - 1), device="cpu")


def _advice(several: Sequence[Beams], given: bool) -> str:
    """Return what to do to get an error bar where the beams do not tell their error."""
    if given or len(several) > 1:
        return ""
    (beams,) = several
    if beams.log_weight is None:
        return "search with a design that has weights, such as 'stratified'"
    by_joint = beams.made_by is not None and beams.made_by.needs_joint and beams.k > 1
    if by_joint and beams.joint_log_inclusion is None:
        return "search with joint=True"
    return "estimate from a list of independent beams"


Known = dict[tuple[int, ...], Tensor]
"""The values of f that are known for the sequences of a source, by their tokens."""


class FunctionValues:
    """Calls f once for each distinct sequence of a source, and checks what it returns.

    Args:
        f: what ``estimate`` was given: a function, an object of ``cpsbs.functions``, or a list with
            one for each source.
        decode: a function from lists of tokens to texts; None if f takes tokens.
        sources: the number of sources.
    """

    def __init__(self, f: Any, decode: Decode | None, sources: int) -> None:
        self._f, self._decode = f, decode
        self.known: list[Known] = [{} for _ in range(sources)]
        """The values so far, for each source."""
        self._booleans, self._others = 0, 0

    @property
    def boolean(self) -> bool:
        """Whether f is a plain function that has returned nothing but true and false."""
        return self._booleans > 0 and self._others == 0

    @property
    def scalar(self) -> bool:
        """Whether all values so far are numbers rather than vectors."""
        return all(v.ndim == 0 for table in self.known for v in table.values())

    def of_beams(self, beams: Beams) -> Tensor:
        """Return [B, K, d] f of every sequence, zero in empty places."""
        rows: list[list[Tensor]] = []
        for b, table in enumerate(self.known):
            tokens = [tuple(y) for y in beams.tokens(b)]
            g = self._f[b] if isinstance(self._f, list | tuple) else self._f
            if hasattr(g, "of_beams"):
                self._others += 1
                found = g.of_beams(beams, b, self._decode).to(torch.float64)
                table.update(zip(tokens, found, strict=True))
            else:
                new = [y for y in dict.fromkeys(tokens) if y not in table]
                table.update(zip(new, self._called(g, new, b), strict=True))
            rows.append([_checked(table[y], y, b) for y in tokens])
        sizes = {v.numel() for row in rows for v in row}
        if len(sizes) > 1:
            raise ValueError(
                f"f returned vectors of different lengths, {sorted(sizes)}; all must have the same"
            )
        out = beams.log_prob.new_zeros((*beams.log_prob.shape, *(sizes or {1})))
        for b, row in enumerate(rows):
            if row:
                out[b, beams.present[b]] = torch.stack([v.reshape(-1) for v in row]).to(out)
        return out

    def _called(self, f: Any, sequences: list[tuple[int, ...]], source: int) -> list[Tensor]:
        """Return f of each of the sequences of a source, as float64 tensors."""
        tokens, decode = [list(y) for y in sequences], self._decode
        if not tokens:  # a tokenizer may decode an empty list to one empty text
            return []
        arguments: Sequence[Any] = tokens
        if decode is not None:
            arguments = decoded(tokens, source, decode)
        batched = getattr(f, "batched", False)
        results: list[Any] = []
        for i, argument in enumerate([list(arguments)] if batched else arguments):
            try:
                results.append(f(argument))
            except Exception as error:
                which = "sequences" if batched else f"sequence {tokens[i]}"
                hint = "" if decode else " (it was given tokens; for texts, pass decode)"
                raise ValueError(
                    f"f failed on the {which} of source {source}: {type(error).__name__}: "
                    f"{error}{hint}"
                ) from error
        if batched:
            results = list(results[0])
            if len(results) != len(arguments):
                raise ValueError(
                    f"f is batched and returned {len(results)} values for {len(arguments)} "
                    "sequences; it must return one for each"
                )
        booleans = sum(type(r).__name__ in ("bool", "bool_") for r in results)  # numpy's too
        self._booleans += booleans
        self._others += len(results) - booleans
        try:
            return [torch.as_tensor(r, dtype=torch.float64, device="cpu") for r in results]
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"f must return numbers or vectors of numbers; it returned {results[0]!r}"
            ) from error


def _checked(value: Tensor, sequence: tuple[int, ...], source: int) -> Tensor:
    """Return the value if it is a finite number or vector."""
    if value.ndim > 1:
        raise ValueError(
            f"f returned the shape {list(value.shape)}; it must return a number or a vector"
        )
    if not bool(value.isfinite().all()):
        raise ValueError(
            f"f is {value.tolist()} on the sequence {list(sequence)} of source {source}; "
            "it must be finite"
        )
    return value
