"""Ready-made functions for ``cpsbs.estimate``.

    cpsbs.estimate(beams, Entropy())
    cpsbs.estimate(beams, Bleu(references, decode))

Each has a name, and ``of_beams(beams, source, decode)``, which gives f of the source's sequences,
[n] or [n, d], in the order of ``beams.tokens(source)``; a class of your own with these two works as
well. ``decode``, from lists of tokens to texts, is what ``estimate`` was given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cpsbs.estimation.estimate import Decode
from cpsbs.estimation.metrics import sentence_bleu
from cpsbs.estimation.scoring import divergence, log_prob
from cpsbs.models.base import SequenceModel
from cpsbs.search.beams import Beams


class Entropy:
    """H(p) = E[−log p(y)], the conditional model entropy, in nats (§5 of the paper).

    Args:
        rao_blackwell: average Σ_t H(p(· | y_<t)) instead of Σ_t −log p(y_t | y_<t). Given the
            prefix, the first is the mean of the second, so that the expectation is the same; and
            the search has it in hand (``entropy=True``). The error is usually smaller, by a factor
            of 1.2 to 5 in docs/estimation.md; not always: where all sequences have the same
            probability the plain form has none (after Amini, Vieira and Cotterell, 2025).
    """

    def __init__(self, rao_blackwell: bool = False) -> None:
        self.rao_blackwell = rao_blackwell
        self.name = "entropy, Rao–Blackwellised" if rao_blackwell else "entropy"

    def of_beams(self, beams: Beams, source: int, decode: Decode | None = None) -> Tensor:
        """F of the source's sequences, [n]."""
        here = beams.present[source]
        if not self.rao_blackwell:
            return -beams.log_prob[source][here]
        if beams.entropy is None:
            raise ValueError("the beams have no entropies of steps; search with entropy=True")
        return beams.entropy[source][here]


class KullbackLeibler:
    """KL(p ‖ q) = E_p[log p(y) − log q(y)] to another model, in nats.

    Args:
        other: makes the model q, for the same sources; called once for each ``Beams``.
        own: makes the model p again. With it, the Rao–Blackwellised form: Σ_t KL of the next
            token's distributions instead of Σ_t of the log-ratio of the token.
        temperature: of q.
    """

    def __init__(
        self,
        other: Callable[[], SequenceModel],
        own: Callable[[], SequenceModel] | None = None,
        temperature: float = 1.0,
    ) -> None:
        for given, argument in ((other, "other"), (own, "own")):
            if given is not None and (hasattr(given, "start") or hasattr(given, "generate")):
                raise ValueError(f"{argument} is a model; it must be a function that makes one")
        self._other, self._own, self._temperature = other, own, temperature
        self.name = f"KL to temperature {temperature}" + (", Rao–Blackwellised" if own else "")
        self._of: Beams | None = None
        self._values = torch.empty(0, device="cpu")

    def of_beams(self, beams: Beams, source: int, decode: Decode | None = None) -> Tensor:
        """F of the source's sequences, [n]."""
        if self._of is not beams:
            self._of, self._values = beams, self._all(beams)
        return self._values[source][beams.present[source]]

    def _all(self, beams: Beams) -> Tensor:
        if self._own is None:
            return beams.log_prob - log_prob(self._other(), beams, self._temperature)
        return divergence(self._own(), self._other(), beams, self._temperature)


class Length:
    """The number of tokens, the one that ends the sequence included."""

    name = "length"

    def of_beams(self, beams: Beams, source: int, decode: Decode | None = None) -> Tensor:
        """F of the source's sequences, [n]."""
        return beams.lengths[source][beams.present[source]].to(torch.float64)


class Bleu:
    """Sentence BLEU against a reference for each source, between 0 and 1 (sacrebleu).

    Args:
        references: one text for each source.
        decode: from lists of tokens to texts, without special tokens:
            ``partial(tokenizer.batch_decode, skip_special_tokens=True)``. It may be given to
            ``estimate`` instead.
    """

    name = "BLEU"

    def __init__(self, references: Sequence[str], decode: Decode | None = None) -> None:
        if isinstance(references, str) or not all(isinstance(r, str) for r in references):
            raise ValueError("references must be a list with one text for each source")
        self._references, self._decode = references, decode
        self._known: dict[tuple[str, str], float] = {}

    def of_beams(self, beams: Beams, source: int, decode: Decode | None = None) -> Tensor:
        """F of the source's sequences, [n]."""
        if len(self._references) != len(beams):
            raise ValueError(
                f"there are {len(self._references)} references for {len(beams)} sources"
            )
        texts = _texts(beams, source, self._decode or decode)
        reference = self._references[source]
        scores = [self._score(text, reference) for text in texts]
        return torch.tensor(scores, dtype=torch.float64, device="cpu")

    def _score(self, text: str, reference: str) -> float:
        key = (text, reference)
        if key not in self._known:
            self._known[key] = sentence_bleu(text, reference)
        return self._known[key]


class Probability:
    """P(y has a property): E of the indicator.

    Args:
        holds: true or false for a list of tokens, or for a text, if ``decode`` is given.
        name: of the property.
        decode: from lists of tokens to texts.
    """

    def __init__(
        self, holds: Callable[[Any], bool], name: str = "property", decode: Decode | None = None
    ) -> None:
        self._holds, self._decode, self.name = holds, decode, name

    def of_beams(self, beams: Beams, source: int, decode: Decode | None = None) -> Tensor:
        """F of the source's sequences, [n]."""
        sequences: Sequence[Any] = beams.tokens(source)
        if self._decode is not None or decode is not None:
            sequences = _texts(beams, source, self._decode or decode)
        values = [float(bool(self._holds(y))) for y in sequences]
        return torch.tensor(values, dtype=torch.float64, device="cpu")


def _texts(beams: Beams, source: int, decode: Decode | None) -> list[str]:
    if decode is None:
        raise ValueError("texts need decode: from lists of tokens to texts, such as batch_decode")
    if not callable(decode) or hasattr(decode, "batch_decode"):
        raise ValueError("decode is a tokenizer; give its batch_decode")
    tokens = beams.tokens(source)
    return decode(tokens) if tokens else []  # a tokenizer may decode nothing to [""]
