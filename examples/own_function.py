"""Estimate the expectation of a function of your own, with an error bar.

    python examples/own_function.py

Any Python function of a sequence will do; it is called once for each different sequence. The models
here are tables with 19,531 sequences, so that the exact values are known too.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

import cpsbs


def repeats(tokens: list[int]) -> float:
    """Return how often a token follows itself."""
    return float(sum(a == b for a, b in pairwise(tokens)))


class LogProbability:
    """A function that reads more than the tokens: it is given the beams themselves."""

    name = "log p"

    def of_beams(self, beams: cpsbs.Beams, source: int, decode: object = None) -> Tensor:
        """Return f of the source's sequences, [n]."""
        return beams.log_prob[source][beams.present[source]]


def main() -> None:
    """Print estimates beside the exact values."""
    model = cpsbs.TableModel.random(vocab_size=6, length=6, seed=0)
    beams = cpsbs.search(model, 40, "stratified", max_length=6, generator=1)
    exact = model.sequences(6)
    p = torch.tensor(list(exact.values()), dtype=torch.float64)

    found = cpsbs.estimate(beams, repeats)
    low, high = found.interval(0.95)
    print(found)
    print(f"95% interval: {float(low):.3f} to {float(high):.3f}")
    print(f"exactly {sum(q * repeats(list(y)) for y, q in exact.items()):.3f}\n")

    print(cpsbs.estimate(beams, LogProbability()))
    print(f"exactly {float((p * p.log()).sum()):.3f}\n")

    # The mean over many sources, such as the sentences of a test set.
    corpus = cpsbs.TableModel.random(vocab_size=6, length=6, sources=12, seed=1)
    beams = cpsbs.search(corpus, 20, "stratified", max_length=6, generator=1)
    print(cpsbs.estimate(beams, repeats).mean())
    each = (corpus.sequences(6, source).items() for source in range(12))
    print(f"exactly {sum(q * repeats(list(y)) for s in each for y, q in s) / 12:.3f}\n")

    # Every design has an error bar if there are several independent beams.
    several = [cpsbs.search(model, 10, "arithmetic", max_length=6, generator=i) for i in range(8)]
    print(cpsbs.estimate(several, repeats))


if __name__ == "__main__":
    main()
