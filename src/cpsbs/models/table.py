"""A model given by an explicit table, small enough that all of its sequences can be enumerated."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Prefix = tuple[int, ...]
"""The tokens of a prefix or of a sequence."""


class TableModel:
    """A model whose next-token probabilities are listed for every prefix.

    Args:
        table: a mapping from prefixes, which are tuples of tokens, to the probabilities [V] of the
            next token; or a list of such tables, one for each source. Every prefix that can come up
            and does not end with ``eos`` must be in the table.
        eos: the token that ends a sequence.
    """

    def __init__(
        self,
        table: Mapping[Prefix, Sequence[float]] | Sequence[Mapping[Prefix, Sequence[float]]],
        eos: int,
    ) -> None:
        self.tables = [table] if isinstance(table, Mapping) else list(table)
        self.sources = len(self.tables)
        lengths = {len(p) for t in self.tables for p in t.values()}
        if len(lengths) != 1:
            raise ValueError(
                f"table has rows of lengths {sorted(lengths)}; all must have the same length V"
            )
        (self.vocab_size,) = lengths
        if not 0 <= eos < self.vocab_size:
            raise ValueError(f"eos is {eos}; it must be in 0 to V - 1 = {self.vocab_size - 1}")
        self.eos: tuple[int, ...] = (eos,)
        self.pad, self.device = eos, torch.device("cpu")
        self._rows: list[tuple[int, Prefix]] = []

    @classmethod
    def random(
        cls,
        vocab_size: int,
        length: int,
        eos: int = 0,
        sources: int = 1,
        seed: int = 0,
    ) -> TableModel:
        """Return a model with random distributions after every prefix shorter than ``length``."""
        generator = torch.Generator().manual_seed(seed)
        words = [v for v in range(vocab_size) if v != eos]

        def table() -> dict[Prefix, list[float]]:
            prefixes = (p for n in range(length) for p in itertools.product(words, repeat=n))
            return {
                p: torch.randn(vocab_size, generator=generator, device="cpu")
                .double()
                .softmax(-1)
                .tolist()
                for p in prefixes
            }

        return cls([table() for _ in range(sources)], eos)

    def start(self) -> Tensor:
        """Return the log-probabilities after the empty prefix."""
        self._rows = [(source, ()) for source in range(self.sources)]
        return self._scores()

    def advance(self, parent: Tensor, token: Tensor) -> Tensor:
        """Return the log-probabilities after these prefixes."""
        self._rows = [
            (self._rows[p][0], (*self._rows[p][1], t))
            for p, t in zip(parent.tolist(), token.tolist(), strict=True)
        ]
        return self._scores()

    def sequences(self, max_length: int, source: int = 0) -> dict[Prefix, float]:
        """Return every sequence of at most ``max_length`` tokens with its probability.

        A sequence that has not ended by then is an outcome like any other, as in the search.
        """
        done: dict[Prefix, float] = {}
        open_: dict[Prefix, float] = {(): 1.0}
        for length in range(1, max_length + 1):
            extended: dict[Prefix, float] = {}
            for prefix, p in open_.items():
                for token, q in enumerate(self.tables[source][prefix]):
                    ended = token in self.eos or length == max_length
                    (done if ended else extended)[(*prefix, token)] = p * q
            open_ = extended
        return {y: p for y, p in done.items() if p > 0}

    def _scores(self) -> Tensor:
        """Return the log-probabilities after the current prefixes."""
        try:
            p = [self.tables[source][prefix] for source, prefix in self._rows]
        except KeyError as error:
            raise ValueError(
                f"table has no row for the prefix {error.args[0]}, which has come up; add it"
            ) from None
        scores = torch.tensor(p, dtype=torch.float64, device="cpu")
        return scores.view(-1, self.vocab_size).log()
