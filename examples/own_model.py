"""Search a model of your own that is not a transformers model.

    python examples/own_model.py

A model is a class with five attributes and two methods. This one is a GRU that spells words. It is
trained for a second, checked by ``cpsbs.check_model``, and searched. The K words of one beam then
give an estimate of the expected length of a word that the model spells.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import cpsbs
from cpsbs.functions import Length

LETTERS = "$abcdefghijklmnopqrstuvwxyz"  # the first one ends a word
WORDS = "bee beetle bug ant antler apple ape cat cattle dog dogma eel egg fig fish fly gnat goat"
SIZE = 48


class Speller(nn.Module):
    """A GRU over letters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), SIZE)
        self.cell = nn.GRUCell(SIZE, SIZE)
        self.head = nn.Linear(SIZE, len(LETTERS))

    def forward(self, letter: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores [rows, V] of the next letter, and the hidden states [rows, SIZE]."""
        hidden = self.cell(self.embedding(letter), hidden)
        return self.head(hidden), hidden


class SpellerModel:
    """The speller as the search asks for it, with one hidden state for each row."""

    sources, vocab_size, eos, pad = 1, len(LETTERS), 0, 0
    device = torch.device("cpu")

    def __init__(self, speller: Speller) -> None:
        self.speller = speller

    def start(self) -> Tensor:
        """Return the scores [sources, V] of the first letter, with one row for each source."""
        first = torch.zeros(self.sources, dtype=torch.int64)
        return self._scores(first, torch.zeros(self.sources, SIZE))

    def advance(self, parent: Tensor, token: Tensor) -> Tensor:
        """Return the scores [rows, V] of the next letter; row i continues the row parent[i]."""
        return self._scores(token, self.hidden[parent])

    def _scores(self, letter: Tensor, hidden: Tensor) -> Tensor:
        scores: Tensor
        scores, self.hidden = self.speller(letter, hidden)
        return scores


def train(speller: Speller) -> None:
    """Train the speller on the words."""
    words = [[LETTERS.index(x) for x in word] for word in WORDS.split()]
    longest = max(map(len, words)) + 1
    padded = torch.tensor([[0, *word] + [0] * (longest - len(word)) for word in words])
    optimizer = torch.optim.Adam(speller.parameters(), lr=0.01)
    for _ in range(100):
        hidden, loss = torch.zeros(len(words), SIZE), torch.zeros(())
        for letter, following in zip(padded.T, padded.T[1:], strict=False):
            scores, hidden = speller(letter, hidden)
            loss = loss + nn.functional.cross_entropy(scores, following)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def main() -> None:
    """Train the model, check it, search it, and estimate an expectation."""
    torch.manual_seed(0)
    speller = Speller()
    train(speller)
    model = SpellerModel(speller)
    cpsbs.check_model(model)
    beams = cpsbs.search(model, 8, "stratified", max_length=12, generator=0)
    for tokens, log_p in zip(beams.tokens(0), beams.log_prob[0].tolist(), strict=True):
        print(f"{math.exp(log_p):.4f} {''.join(LETTERS[x] for x in tokens)}")
    print(cpsbs.estimate(beams, Length()))


if __name__ == "__main__":
    main()
