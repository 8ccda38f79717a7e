"""Prepares parallel text for training: a tokenizer, and the words as numbers.

    python -m training.prepare --out FOLDER europarl.tsv.xz tatoeba.tsv.xz

It writes ``tokenizer.json``, ``segmentations.npz`` and the compressed word types of both languages.
"""

from __future__ import annotations

import argparse
import lzma
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from training.text import Pair, cleaned, is_translation, read_pairs, without_repeats
from training.tokenizer import Integers, segmentations, trained, untrained, words_of

SIDES = ("en", "fr")
END_OF_SENTENCE = 0


def main() -> None:
    """Prepare the files that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "files", type=Path, nargs="+", help="files of English TAB French, compressed by xz"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--vocabulary", type=int, default=8000, help="number of tokens")
    parser.add_argument("--dropout", type=float, default=0.1, help="rate of BPE-dropout")
    arguments = parser.parse_args()
    start = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - start:6.0f} s  {what}", flush=True)

    arguments.out.mkdir(parents=True, exist_ok=True)
    with multiprocessing.Pool() as pool:
        raw = [pair for file in arguments.files for pair in read_pairs(file)]
        pairs = pool.imap(_cleaned, raw, chunksize=2000)
        kept = list(without_repeats(filter(is_translation, pairs)))
        say(f"{len(kept):,} of {len(raw):,} pairs kept")
        tokenizer = trained((text for pair in kept for text in pair), arguments.vocabulary)
        tokenizer.save(str(arguments.out / "tokenizer.json"))
        say(f"tokenizer of {tokenizer.get_vocab_size():,} tokens")
        sides = [
            list(pool.imap(partial(words_of, tokenizer), texts, chunksize=2000))
            for texts in zip(*kept, strict=True)
        ]
    counts = Counter(word for side in sides for words in side for word in words)
    by_frequency = dict(counts.most_common())
    np.savez_compressed(
        arguments.out / "segmentations.npz",
        **asdict(segmentations(tokenizer, by_frequency, arguments.dropout)),
    )
    say(f"segmentations of {len(by_frequency):,} word types")
    number = {word: i for i, word in enumerate(by_frequency, start=END_OF_SENTENCE + 1)}
    for name, side in zip(SIDES, sides, strict=True):
        write_array(arguments.out / f"{name}.npy.xz", _numbered(side, number))
        say(f"{name}: {sum(map(len, side)):,} words")


NORMALIZER = untrained().normalizer


def _cleaned(pair: Pair) -> Pair:
    return cleaned(pair, NORMALIZER.normalize_str)


def _numbered(sentences: Iterable[list[str]], number: dict[str, int]) -> Integers:
    """Return the types of all words, with ``END_OF_SENTENCE`` after each sentence."""
    types = (t for words in sentences for t in (*map(number.__getitem__, words), END_OF_SENTENCE))
    return np.fromiter(types, np.uint32)


def write_array(file: Path, array: Integers) -> None:
    """Write an array, well compressed, because it is sent to the machine with the GPU."""
    with lzma.open(file, "wb", preset=4) as out:
        np.save(out, array)


def read_array(file: Path) -> Integers:
    """Return the array that ``write_array`` wrote."""
    with lzma.open(file, "rb") as stored:
        array: Integers = np.load(stored)
    return array


if __name__ == "__main__":
    main()
