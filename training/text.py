"""Reads and cleans parallel text, and drops pairs that are not translations of each other."""

from __future__ import annotations

import lzma
import re
from collections.abc import Callable, Iterator
from pathlib import Path

SPEAKER = re.compile(r"^(?:\([A-Z]{2}\) )?[^.!?]{3,110}? ?\. ?- (?=[A-ZÀ-Ý(\"])")
"""Matches the name of a speaker in records of parliament: *Draftsman of the opinion of the
Committee . - Mr President, …*"""

MARK = re.compile(r"^(?:\([A-Z]{2}\) ?|- )")
"""Matches the code of the language that was spoken, or a dash, before the first word."""

QUOTE_FOR_APOSTROPHE = re.compile(r'(?<=\w)"(?=\w)')

Pair = tuple[str, str]


def read_pairs(file: Path) -> Iterator[Pair]:
    """Yield English and French from a file of tab-separated lines that is compressed by xz."""
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            english, french = line.rstrip("\n").split("\t")[:2]
            yield english, french


def cleaned(pair: Pair, normalize: Callable[[str], str]) -> Pair:
    """Return the normalised sentences without speakers and language codes."""
    english, french = (MARK.sub("", SPEAKER.sub("", normalize(text))) for text in pair)
    return english, QUOTE_FOR_APOSTROPHE.sub("'", french)


def is_translation(pair: Pair) -> bool:
    """Return whether a pair is two different texts, mostly of letters, of similar length."""
    english, french = pair
    if not english or not french or english == french:
        return False
    mostly_letters = all(sum(map(str.isalpha, text)) > len(text) / 2 for text in pair)
    long, short = max(map(len, pair)), min(map(len, pair))
    return mostly_letters and (long < 2.5 * short or long - short < 20)


def without_repeats(pairs: Iterator[Pair]) -> Iterator[Pair]:
    """Yield every pair once."""
    seen = set()
    for pair in pairs:
        if pair not in seen:
            seen.add(pair)
            yield pair
