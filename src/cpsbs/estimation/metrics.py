"""Metrics of texts: sentence BLEU and chrF, and the diversity of a set of sequences."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

from cpsbs.extras import required


@cache
def _bleu() -> Any:
    """Return sacrebleu's metric; making it takes longer than using it."""
    return required("sacrebleu", "metrics").metrics.BLEU(effective_order=True)


def sentence_bleu(text: str, reference: str) -> float:
    """Return the BLEU of one sentence, between 0 and 1, with the defaults of sacrebleu's own."""
    return min(1.0, float(_bleu().sentence_score(text, [reference]).score) / 100)


def bleu_words(text: str) -> list[str]:
    """Return the words of a text that BLEU counts, by sacrebleu's tokenizer 13a."""
    words: list[str] = _bleu().tokenizer(text.rstrip()).split()
    return words


@cache
def _chrf() -> Any:
    """Return sacrebleu's chrF; making it takes longer than using it."""
    return required("sacrebleu", "metrics").metrics.CHRF()


def sentence_chrf(text: str, reference: str) -> float:
    """Return the chrF of one sentence, between 0 and 1, with the defaults of sacrebleu's own."""
    return min(1.0, float(_chrf().sentence_score(text, [reference]).score) / 100)


def diversity(sequences: Sequence[Sequence[Hashable]]) -> float:
    """Return D = Σ_{n=1…4} (different n-grams) / (n-grams) of the sequences (eq:diversity).

    The paper calls it the average fraction but defines the sum, which this follows: it is between 0
    and 4. Orders of which the sequences have no n-gram count 0.
    """
    total = 0.0
    for n in range(1, 5):
        grams = [tuple(y[i : i + n]) for y in sequences for i in range(len(y) - n + 1)]
        total += len(set(grams)) / len(grams) if grams else 0.0
    return total
