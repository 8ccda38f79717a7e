"""Trains the tokenizer, a joint byte-pair encoding of both languages, and segments words at random.

A text is normalised and split into words, and every word is split into tokens by itself. So a
training corpus is a list of word types, and BPE-dropout (Provilkov, Emelianenko and Voita 2020)
needs a few random segmentations of every type, not of every occurrence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
PAD_ID, END_ID, UNKNOWN_ID = 0, 1, 2

Integers = NDArray[np.integer[Any]]


def untrained() -> Tokenizer:
    """Return the tokenizer with its normaliser and its rules for words, but without tokens.

    Quotes and dashes of every kind become ASCII, and every digit and punctuation mark is a word. An
    apostrophe ends the word before it: *l'* and *don'* are words.
    """
    replace, split = normalizers.Replace, pre_tokenizers.Split
    tokenizer = Tokenizer(BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            replace(Regex("[’‘ʼ´`]"), "'"),
            replace(Regex("« ?| ?»|[“”„]"), '"'),
            replace(Regex("[–—‑‒−]"), "-"),
            replace(Regex(r"[\s\u200b\u00ad\ufeff]+"), " "),
            normalizers.Strip(),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(),
            split(Regex(r"▁?\d"), "isolated"),
            split(Regex(r"▁?[^\w\s▁']"), "isolated"),
            split(Regex("'"), "merged_with_previous"),
        ]
    )
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def trained(texts: Iterator[str], size: int) -> Tokenizer:
    """Return a tokenizer of ``size`` tokens, trained on the texts."""
    tokenizer = untrained()
    tokenizer.train_from_iterator(
        texts,
        BpeTrainer(
            vocab_size=size,
            special_tokens=[PAD, END, UNKNOWN],
            limit_alphabet=300,
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, END_ID)]
    )
    return tokenizer


def words_of(tokenizer: Tokenizer, text: str) -> list[str]:
    """Return the words of a normalised text, which are segmented one by one."""
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@dataclass(frozen=True)
class Segmentations:
    """A few segmentations of every word type into tokens, the usual one first.

    Type 0 is the end of a sentence.
    """

    ways: Integers
    """[types] the number of segmentations of each type."""
    lengths: Integers
    """[Σ ways] the number of tokens of each segmentation."""
    tokens: Integers
    """[Σ lengths] the tokens of all segmentations."""


def segmentations(tokenizer: Tokenizer, counts: dict[str, int], dropout: float) -> Segmentations:
    """Return the usual segmentation of each type and random ones, more for frequent types."""
    model = tokenizer.model
    usual = [_ids(model, word) for word in counts]
    model.dropout = dropout
    found = [[[END_ID]]]
    for (word, count), first in zip(counts.items(), usual, strict=True):
        more = min(max(count // 10, 4), 64) if len(word) > 1 else 1
        found.append([first, *(_ids(model, word) for _ in range(more - 1))])
    model.dropout = None
    flat = [way for ways in found for way in ways]
    return Segmentations(
        np.array([len(ways) for ways in found], np.int32),
        np.array([len(way) for way in flat], np.int32),
        np.array([token for way in flat for token in way], np.int32),
    )


def _ids(model: Any, word: str) -> list[int]:
    return [token.id for token in model.tokenize(word)] or [UNKNOWN_ID]
