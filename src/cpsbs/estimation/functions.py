"""Ready-made functions for ``cpsbs.estimate``.

    cpsbs.estimate(beams, Entropy())
    cpsbs.estimate(beams, Bleu(references, decode))

Each has a ``name`` and a method ``of_beams(beams, source, decode)`` that returns f of the source's
sequences, [n] or [n, d], in the order of ``beams.tokens(source)``; a class of your own with these
two works as well. ``decode`` is the function from lists of tokens to texts that ``estimate`` was
given, or None. An attribute ``bounds``, (a, b) or a function of the beams that returns it, says
between which numbers every value lies; ``Estimate.bounds`` follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cpsbs.estimation.arguments import Decode
from cpsbs.estimation.forcing import token_scores
from cpsbs.estimation.metrics import sentence_bleu, sentence_chrf
from cpsbs.models.base import SequenceModel
from cpsbs.search.beams import Beams


class Entropy:
    """The entropy H(p) = E[−log p(y)] of the model given the source, in nats (§5 of the paper).

    Args:
        rao_blackwell: whether to average Σ_t H(p(· | y_<t)) instead of Σ_t −log p(y_t | y_<t).
            Given the prefix, the first is the mean of the second, so that the expectation is the
            same; the search keeps the first with ``entropy=True``. The error is usually smaller, by
            a factor of 1.2 to 5 in docs/estimation.md, but not always: where all sequences have the
            same probability, the plain form has no error (after Amini, Vieira and Cotterell, 2025).
    """

    bounds = (0.0, math.inf)

    def __init__(self, rao_blackwell: bool = False) -> None:
        self.rao_blackwell = rao_blackwell
        self.name = "entropy, Rao–Blackwellised" if rao_blackwell else "entropy"

    def of_beams(self, beams: Beams, source: int, decode: Decode | None = None) -> Tensor:
        """Return [n] f of the source's sequences."""
        here = beams.present[source]
        if not self.rao_blackwell:
            return -beams.log_prob[source][here]
        if beams.entropy is None:
            raise ValueError("the beams have no step entropies; search with entropy=True")
        return beams.entropy[source][here]


class KullbackLeibler:
    """The divergence KL(p ‖ q) = E_p[log p(y) − log q(y)] from another model q, in nats.

    Args:
        other: a function without arguments that makes the model q for the same sources; it is
            called once for each ``Beams``.
        own: a function that makes the searched model p again. If it is given, the estimate is
            Rao–Blackwellised: it averages Σ_t KL(p(· | y_<t) ‖ q(· | y_<t)) instead of
            Σ_t log p(y_t | y_<t)/q(y_t | y_<t).
        temperature: the temperature of q.
    """

    def __init__(
        self,
        other: Callable[[], SequenceModel],
        own: Callable[[], SequenceModel] | None = None,
        temperature: float = 1.0,
    ) -> None:
        for given, argument in ((other, "other"), (own, "own")):
            if given is not None and (hasattr(given, "start") or hasattr(given, "generate")):
                raise ValueError(
                    f"{argument} is a model; it must be a function without arguments that makes "
                    "one, because a model holds the state of one search"
                )
        self._other, self._own, self._temperature = other, own, temperature
        self.bounds = (0.0, math.inf) if own else None  # of a single log-ratio nothing is known
        self.name = f"KL to temperature {temperature}" + (", Rao–Blackwellised" if own else "")
        self._of: Beams | None = None
        self._values = torch.empty(0, device="cpu")

    def of_beams(self, beams: Beams, source: int, decode: Decode | None = None) -> Tensor:
        """Return [n] f of the source's sequences."""
        if self._of is not beams:
            self._of, self._values = beams, self._all(beams)
        return self._values[source][beams.present[source]]

    @torch.no_grad()
    def _all(self, beams: Beams) -> Tensor:
        if self._own is None:
            plain = {**beams.settings, "temperature": self._temperature, "nucleus": None}
            others = token_scores(self._other(), replace(beams, settings=plain))
            return beams.log_prob - others.log_prob.sum(-1)
        found = token_scores(
            self._own(), beams, other=self._other(), other_temperature=self._temperature
        )
        assert found.divergence is not None
        return found.divergence.sum(-1)


class Length:
    """The number of tokens in a sequence, including the one that ends it."""

    name = "length"

    def bounds(self, beams: Beams) -> tuple[float, float] | None:
        """Return (1, the maximal length of the search), if that is known."""
        longest = beams.settings.get("max_length")
        return None if longest is None else (1.0, float(longest))

    def of_beams(self, beams: Beams, source: int, decode: Decode | None = None) -> Tensor:
        """Return [n] f of the source's sequences."""
        return beams.lengths[source][beams.present[source]].to(torch.float64)


class Bleu:
    """Sentence BLEU against one reference for each source, between 0 and 1, by sacrebleu.

    Args:
        references: one text for each source.
        decode: a function from lists of tokens to texts without special tokens, such as
            ``partial(tokenizer.batch_decode, skip_special_tokens=True)``. It may be given to
            ``estimate`` instead.
    """

    name = "BLEU"
    bounds = (0.0, 1.0)
    _metric = staticmethod(sentence_bleu)

    def __init__(self, references: Sequence[str], decode: Decode | None = None) -> None:
        if isinstance(references, str) or not all(isinstance(r, str) for r in references):
            raise ValueError("references must be a list with one text for each source")
        self._references, self._decode = references, decode
        self._known: dict[tuple[str, str], float] = {}

    def of_beams(self, beams: Beams, source: int, decode: Decode | None = None) -> Tensor:
        """Return [n] f of the source's sequences."""
        if len(self._references) != len(beams):
            raise ValueError(
                f"there are {len(self._references)} references for {len(beams)} sources; there "
                "must be one for each"
            )
        texts = _texts(beams, source, self._decode or decode)
        reference = self._references[source]
        scores = [self._score(text, reference) for text in texts]
        return torch.tensor(scores, dtype=torch.float64, device="cpu")

    def _score(self, text: str, reference: str) -> float:
        key = (text, reference)
        if key not in self._known:
            self._known[key] = self._metric(text, reference)
        return self._known[key]


class Chrf(Bleu):
    """Sentence chrF against one reference for each source, between 0 and 1, by sacrebleu.

    The arguments are those of ``Bleu``.
    """

    name = "chrF"
    _metric = staticmethod(sentence_chrf)


class Probability:
    """The probability that a sequence has a property: the expectation of its indicator.

    Args:
        holds: a function that says whether a list of tokens has the property; or a text, if
            ``decode`` is given here or to ``estimate``.
        name: the name of the property.
        decode: a function from lists of tokens to texts.
    """

    bounds = (0.0, 1.0)

    def __init__(
        self, holds: Callable[[Any], bool], name: str = "property", decode: Decode | None = None
    ) -> None:
        self._holds, self._decode, self.name = holds, decode, name

    def of_beams(self, beams: Beams, source: int, decode: Decode | None = None) -> Tensor:
        """Return [n] f of the source's sequences."""
        sequences: Sequence[Any] = beams.tokens(source)
        if self._decode is not None or decode is not None:
            sequences = _texts(beams, source, self._decode or decode)
        values = [float(bool(self._holds(y))) for y in sequences]
        return torch.tensor(values, dtype=torch.float64, device="cpu")


def _texts(beams: Beams, source: int, decode: Decode | None) -> list[str]:
    """Return the texts of a source's sequences."""
    if decode is None:
        raise ValueError(
            "texts need decode, a function from lists of tokens to texts such as a tokenizer's "
            "batch_decode"
        )
    if not callable(decode) or hasattr(decode, "batch_decode"):
        raise ValueError("decode is a tokenizer; pass its method batch_decode")
    tokens = beams.tokens(source)
    return decode(tokens) if tokens else []  # a tokenizer may decode an empty list to [""]
