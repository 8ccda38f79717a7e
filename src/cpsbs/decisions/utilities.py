"""Utilities for ``cpsbs.mbr``: how good is a candidate if another text is the right one?

    cpsbs.mbr(beams, utility="chrf", decode=model.decode)
    cpsbs.mbr(beams, utility=my_function, decode=model.decode)

All have one interface, ``Utility``: given the candidates and the evidence of many sources, they
return a table of utilities for each source. chrF and BLEU are those of sacrebleu for one sentence,
between 0 and 1, computed for all pairs at once (``cpsbs.decisions.ngrams``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from cpsbs.decisions.ngrams import Symbols, shared_ngrams
from cpsbs.estimation.metrics import bleu_words
from cpsbs.extras import required

Texts = Sequence[Sequence[str]]
"""The texts of every source."""

PAIRS = 4096
"""The largest number of pairs that a batched function is given at once."""


class Utility(Protocol):
    """The utility u(c, y) of candidates c if y is the right text; larger is better."""

    @property
    def name(self) -> str:
        """The name, for results."""

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Between which numbers every utility lies, if that is known."""

    def tables(self, candidates: Texts, evidence: Texts, device: torch.device) -> list[Tensor]:
        """Return a table [C, E] of the utilities of each source, in float64."""


class _Ngrams:
    """A utility that rests on the n-grams that two texts share."""

    bounds = (0.0, 1.0)
    order: int

    def tables(self, candidates: Texts, evidence: Texts, device: torch.device) -> list[Tensor]:
        """Return a table [C, E] of the utilities of each source."""
        pairs = list(zip(candidates, evidence, strict=True))
        distinct = [list(dict.fromkeys([*own, *others])) for own, others in pairs]
        symbols = self.symbols(distinct)
        places = [{text: i for i, text in enumerate(own)} for own in distinct]
        rows, columns = (_padded(x, places) for x in (candidates, evidence))
        shared = shared_ngrams(symbols, rows, columns, self.order, device).double()
        most = max(map(len, symbols.lengths), default=0)
        length = torch.tensor(
            [own + [0] * (most - len(own)) for own in symbols.lengths],
            dtype=torch.float64,
            device=device,
        )
        a = length.gather(1, rows.to(device))[:, None, :, None]
        b = length.gather(1, columns.to(device))[:, None, None, :]
        found = self.score(shared, a, b).cpu()
        return [table[: len(c), : len(e)] for table, (c, e) in zip(found, pairs, strict=True)]

    def symbols(self, texts: Texts) -> Symbols:
        """Return the texts as sequences of symbols."""
        raise NotImplementedError

    def score(self, shared: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return [S, C, E] the utilities.

        Args:
            shared: [S, order, C, E] the numbers of shared n-grams.
            a: [S, 1, C, 1] the lengths of the candidates, in symbols.
            b: [S, 1, 1, E] the lengths of the evidence.
        """
        raise NotImplementedError

    def _counts(self, length: Tensor) -> Tensor:
        """Return the number of n-grams of every order in texts of this length."""
        n = torch.arange(self.order, dtype=length.dtype, device=length.device)
        return (length - n[:, None, None]).clamp(min=0)


class Chrf(_Ngrams):
    """chrF of a sentence, as sacrebleu computes it: β = 2, characters without white space."""

    name = "chrF"
    order = 6

    def symbols(self, texts: Texts) -> Symbols:
        """Return the characters other than white space."""
        return Symbols.of_characters([["".join(text.split()) for text in own] for own in texts])

    def score(self, shared: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return the F-score of the average precision and the average recall."""
        of_a, of_b = self._counts(a), self._counts(b)
        both = (of_a > 0) & (of_b > 0)
        orders = both.sum(1).clamp(min=1)
        precision = (shared / of_a.clamp(min=1) * both).sum(1) / orders
        recall = (shared / of_b.clamp(min=1) * both).sum(1) / orders
        total = 4 * precision + recall
        return torch.where(total > 0, 5 * precision * recall / total, 0.0).clamp(max=1.0)


class Bleu(_Ngrams):
    """BLEU of a sentence, as sacrebleu computes it: effective order, exponential smoothing, 13a.

    Needs the extra ``metrics``, for the tokenizer.
    """

    name = "BLEU"
    order = 4

    def symbols(self, texts: Texts) -> Symbols:
        """Return the texts as words, as sacrebleu's tokenizer 13a splits them."""
        return Symbols.of_words([[bleu_words(text) for text in own] for own in texts])

    def score(self, shared: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return the geometric mean of the precisions times the brevity penalty."""
        total = self._counts(a).expand_as(shared)
        here = total > 0
        # The n-th precision of zero, counted from one, is smoothed to 1 / (2ⁿ total).
        zeros = ((shared == 0) & here).cumsum(1)
        smoothed = torch.where(shared > 0, shared, 0.5**zeros) / total.clamp(min=1)
        logs = torch.where(here, smoothed.log(), 0.0).sum(1) / here.sum(1).clamp(min=1)
        brevity = torch.where(a < b, 1 - b / a.clamp(min=1), 0.0)[:, 0]
        return torch.where((shared > 0).any(1), (logs + brevity).exp(), 0.0).clamp(max=1.0)


class ExactMatch:
    """1 if the texts are equal apart from white space around them, else 0.

    The decision is then the most probable text: all sequences that spell it count together.
    """

    name = "exact match"
    bounds = (0.0, 1.0)

    def tables(self, candidates: Texts, evidence: Texts, device: torch.device) -> list[Tensor]:
        """Return a table [C, E] of the utilities of each source."""
        found = []
        for own, others in zip(candidates, evidence, strict=True):
            stripped = [text.strip() for text in others]
            rows = [[float(text.strip() == other) for other in stripped] for text in own]
            found.append(_table(rows, len(own), len(others)))
        return found


class EditSimilarity:
    """1 − d/n, where d is the Levenshtein distance of the characters, n the longer text's length.

    Two empty texts have the similarity 1. Needs the extra ``metrics``.
    """

    name = "edit similarity"
    bounds = (0.0, 1.0)

    def tables(self, candidates: Texts, evidence: Texts, device: torch.device) -> list[Tensor]:
        """Return a table [C, E] of the utilities of each source."""
        required("rapidfuzz", "metrics")
        from rapidfuzz import process
        from rapidfuzz.distance import Levenshtein

        found = []
        for own, others in zip(candidates, evidence, strict=True):
            rows = process.cdist(own, others, scorer=Levenshtein.distance).tolist()
            longest = [[max(len(a), len(b), 1) for b in others] for a in own]
            distance = _table(rows, len(own), len(others))
            found.append(1 - distance / _table(longest, len(own), len(others)))
        return found


class Function:
    """A function of your own as a utility.

    It is called once for each distinct pair of a source.

    Args:
        f: a function of a candidate and of the text that is taken to be right. If it has an
            attribute ``batched`` that is true, it is given two lists of equal length, and returns a
            number for each pair; so a neural metric sees thousands of pairs at once.
        name: its name in results; by default that of the function.
        bounds: (a, b), between which every utility lies, if that is known; by default what f
            itself says by an attribute ``bounds``.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        name: str | None = None,
        bounds: tuple[float, float] | None = None,
    ) -> None:
        self._f = f
        self.name = name or str(getattr(f, "name", getattr(f, "__name__", type(f).__name__)))
        self.bounds: tuple[float, float] | None = (
            getattr(f, "bounds", None) if bounds is None else bounds
        )

    def tables(self, candidates: Texts, evidence: Texts, device: torch.device) -> list[Tensor]:
        """Return a table [C, E] of the utilities of each source."""
        pairs = [
            dict.fromkeys((c, y) for c in own for y in others)
            for own, others in zip(candidates, evidence, strict=True)
        ]
        values = self._values(pairs)
        found = []
        for own, others, table in zip(candidates, evidence, pairs, strict=True):
            known = {pair: next(values) for pair in table}
            rows = [[known[c, y] for y in others] for c in own]
            found.append(_table(rows, len(own), len(others)))
        return found

    def _values(self, pairs: Sequence[dict[tuple[str, str], None]]) -> Iterator[float]:
        """Yield the utilities of all pairs of all sources, in their order."""
        if not getattr(self._f, "batched", False):
            for source, own in enumerate(pairs):
                for candidate, text in own:
                    yield self._number(self._called(source, candidate, text), source)
            return
        every = [(source, *pair) for source, own in enumerate(pairs) for pair in own]
        for begin in range(0, len(every), PAIRS):
            some = every[begin : begin + PAIRS]
            first = some[0][0]
            results = list(self._called(first, [c for _, c, _ in some], [y for _, _, y in some]))
            if len(results) != len(some):
                raise ValueError(
                    f"utility is batched and returned {len(results)} numbers for {len(some)} "
                    "pairs; it must return one for each"
                )
            yield from (self._number(r, s) for r, (s, _, _) in zip(results, some, strict=True))

    def _called(self, source: int, candidates: Any, texts: Any) -> Any:
        try:
            return self._f(candidates, texts)
        except Exception as error:
            shown = "" if isinstance(candidates, list) else f" {candidates!r} and {texts!r}"
            raise ValueError(
                f"utility failed on texts of source {source},{shown or ' in a batch'}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _number(self, value: Any, source: int) -> float:
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"utility returned {value!r} for source {source}; it must return a number"
            ) from error


NAMED: dict[str, Callable[[], Utility]] = {
    "chrf": Chrf,
    "bleu": Bleu,
    "exact": ExactMatch,
    "edit": EditSimilarity,
}
"""The utilities that have a name."""


def as_utility(utility: Any) -> Utility:
    """Return the utility that a name or a function stands for."""
    if isinstance(utility, str):
        if utility.lower() not in NAMED:
            raise ValueError(
                f"utility is {utility!r}; it must be one of {', '.join(NAMED)}, or a function of a "
                "candidate and another text"
            )
        return NAMED[utility.lower()]()
    if isinstance(utility, type):
        raise ValueError(
            f"utility is the class {utility.__name__}; pass an object, {utility.__name__}()"
        )
    if hasattr(utility, "tables"):
        found: Utility = utility
        return found
    if not callable(utility):
        raise ValueError(
            f"utility is {utility!r}; it must be one of {', '.join(NAMED)}, or a function of a "
            "candidate and another text"
        )
    return Function(utility)


def _padded(texts: Texts, places: Sequence[dict[str, int]]) -> Tensor:
    """Return [S, n] the places of the texts of every source, filled up with zeros."""
    most = max(map(len, texts), default=0)
    rows = [
        [place[text] for text in own] + [0] * (most - len(own))
        for own, place in zip(texts, places, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").view(len(texts), most)


def _table(rows: Sequence[Sequence[float]], height: int, width: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64, device="cpu").reshape(height, width)


def check_utilities(table: Tensor, utility: Utility, source: int, own: Texts) -> None:
    """Raise a ValueError that names a pair whose utility is not finite, or outside the bounds.

    Args:
        table: [C, E] the utilities of a source.
        utility: the utility.
        source: the number of the source.
        own: the candidates and the evidence of the source.
    """
    low, high = utility.bounds or (-math.inf, math.inf)
    slack = 1e-6 * max(1.0, *(abs(end) for end in (low, high) if math.isfinite(end)), 1.0)
    wrong = ~(table.isfinite() & (table >= low - slack) & (table <= high + slack))
    if bool(wrong.any()):
        i, j = wrong.nonzero()[0].tolist()
        value = float(table[i, j])
        rule = "finite" if not math.isfinite(value) else f"in [{low:g}, {high:g}], by its bounds"
        raise ValueError(
            f"the utility {utility.name} is {value} for source {source}, candidate {own[0][i]!r} "
            f"and {own[1][j]!r}; it must be {rule}"
        )
