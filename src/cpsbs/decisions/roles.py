"""The two roles of minimum Bayes risk decoding: reads candidates and evidence, and checks them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from cpsbs.decisions.expected import BeamEvidence, Evidence, WeightedTexts
from cpsbs.estimation.arguments import Decode
from cpsbs.estimation.weights import warn_of_far_sums
from cpsbs.search.beams import Beams

NO_WEIGHTS = (
    "draw the evidence with a design that has them, such as 'stratified', or pass "
    "weights='probability' to weight by the model's probabilities, which is biased"
)
"""What to do about evidence that has no weights."""


def candidate_texts(given: Any, decode: Decode | None) -> list[list[str]]:
    """Return the distinct candidates of every source, in their order."""
    several = _beams_in(given)
    if several:
        if len({len(beams) for beams in several}) > 1:
            raise ValueError(
                f"candidates have different numbers of sources: {[len(b) for b in several]}"
            )
        drawn = [_decoded(beams, decode, "candidates") for beams in several]
        texts = [[text for own in source for text in own] for source in zip(*drawn, strict=True)]
    else:
        texts = _texts(given, "candidates")
    for source, own in enumerate(texts):
        if not own:
            raise ValueError(f"source {source} has no candidates; it must have at least one")
    return [list(dict.fromkeys(own)) for own in texts]


def evidence_of(
    given: Any, decode: Decode | None, weights: Any, normalize: bool, sources: int
) -> Evidence:
    """Return the evidence with its weights, for this number of sources."""
    several = _beams_in(given)
    if len(several) > 1:
        raise ValueError(
            "evidence is a list of Beams; give one Beams (a larger k is better evidence than "
            "several beams), and say which of them it is if the candidates are joined"
        )
    texts = [] if several else _texts(given, "evidence")
    count = len(several[0]) if several else len(texts)
    if count != sources:
        raise ValueError(
            f"there are {sources} sources with candidates and {count} with evidence; there must "
            "be as many"
        )
    if not several:
        _refuse_empty(texts)
        return WeightedTexts(texts, None if weights is None else _weights(weights, texts))
    beams = several[0].to("cpu")
    texts = _decoded(beams, decode, "evidence")
    _refuse_empty(texts)
    if weights is None:
        if beams.log_weight is None:
            raise ValueError(f"the evidence, drawn by {beams.design}, has no weights; {NO_WEIGHTS}")
        warn_of_far_sums(beams.log_weight.exp().sum(-1), beams.design, normalize)
        return BeamEvidence(beams, texts, normalize)
    if not isinstance(weights, str):
        return WeightedTexts(texts, _weights(weights, texts))
    if weights != "probability":
        raise ValueError(
            f"weights is {weights!r}; it must be 'probability' or a list of numbers for each source"
        )
    # Relative to the largest, because probabilities may be too small for a float.
    relative = (beams.log_prob - beams.log_prob.amax(-1, keepdim=True)).double().exp()
    rows = zip(relative, beams.present, strict=True)
    return WeightedTexts(texts, [own[here].tolist() for own, here in rows])


def _beams_in(given: Any) -> list[Beams]:
    """Return what is given as a list of Beams; empty if it is something else."""
    if isinstance(given, Beams):
        return [given]
    if isinstance(given, list | tuple) and given and all(isinstance(b, Beams) for b in given):
        return list(given)
    return []


def _decoded(beams: Beams, decode: Decode | None, role: str) -> list[list[str]]:
    if decode is None:
        raise ValueError(
            f"{role} are Beams; texts need decode, a function from lists of tokens to texts such "
            "as TextModel.decode"
        )
    return beams.to("cpu").decode(decode)


def _texts(given: Any, role: str) -> list[list[str]]:
    """Return the texts of every source, checked."""
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise ValueError(
            f"{role} is {given!r:.80}; it must be Beams, or a list with a list of texts for each "
            "source"
        )
    for source, own in enumerate(given):
        if isinstance(own, str) or not isinstance(own, Sequence):
            raise ValueError(
                f"{role} of source {source} are {own!r:.80}; they must be a list of texts"
            )
        for text in own:
            if not isinstance(text, str):
                raise ValueError(
                    f"{role} of source {source} have {text!r:.80}; every one must be a text"
                )
    return [list(own) for own in given]


def _refuse_empty(texts: list[list[str]]) -> None:
    for source, own in enumerate(texts):
        if not own:
            raise ValueError(f"source {source} has no evidence; it must have at least one text")


def _weights(given: Any, texts: list[list[str]]) -> list[list[float]]:
    """Return the weights of every text, checked."""
    wrong = f"weights is {given!r:.80}; it must have a list of numbers for each source"
    if isinstance(given, str) or not hasattr(given, "__len__") or len(given) != len(texts):
        raise ValueError(wrong)
    try:
        rows = [[float(w) for w in own] for own in given]
    except (TypeError, ValueError) as error:
        raise ValueError(wrong) from error
    for source, (own, named) in enumerate(zip(rows, texts, strict=True)):
        if len(own) != len(named):
            raise ValueError(
                f"source {source} has {len(own)} weights for {len(named)} texts; there must be "
                "one for each"
            )
        if not all(math.isfinite(w) and w >= 0 for w in own) or not sum(own) > 0:
            raise ValueError(
                f"the weights of source {source} are {own!r:.80}; they must be finite, at least 0, "
                "and not all 0"
            )
    return rows
