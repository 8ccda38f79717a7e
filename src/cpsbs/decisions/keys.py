"""Keys: which sequences give the same answer.

A key maps a text to its answer: a string, a number or any other hashable value, or None where the
text gives no answer. Texts with equal answers count as one answer in ``cpsbs.answers``. Any
function will do; these are ready-made ones. A key with an attribute ``batched`` that is true is
given all texts of a source at once, the most probable first, and returns a list of answers. A key
with an attribute ``choices`` lists all answers that it can return besides None, so that
``cpsbs.answers`` can bound the entropy from above.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cpsbs.extras import required

Key = Callable[[Any], Any]
"""A function from a text to its answer; or, if it is batched, from a list of texts to a list."""

NUMBER = re.compile(
    r"(?<![\w.])[-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)(?:[eE][-+]?\d+)?"
)
"""A decimal number, with or without commas between thousands."""


def text(answer: str) -> str:
    """Return the whole text, with runs of white space as one space."""
    return " ".join(answer.split())


def first_line(answer: str) -> str | None:
    """Return the first line that is not blank, without white space around it."""
    lines = (line.strip() for line in answer.splitlines())
    return next((line for line in lines if line), None)


def number(answer: str) -> int | float | None:
    """Return the last number in the text, so that "6 × 7 = 42." and "42.0" are one answer.

    Chains of thought end with their result. Commas between thousands are understood, other ways of
    writing numbers (1 250 or 5.000,00) are not. Digits that follow a letter, as in CO2, are no
    number, and a hyphen after a number is no sign.
    """
    found = [match.group() for match in NUMBER.finditer(answer) if match.group()]
    if not found:
        return None
    digits = found[-1].replace(",", "").replace("−", "-")
    if digits.lstrip("+-").isdigit():
        return int(digits)
    value = float(digits)
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else value


class choice:  # noqa: N801, used like the functions beside it
    """Return the first of the given options that stands alone in the text, such as A, B, C or D.

    Capitals count, and so does the article in "A fruit is an apple": ask the model for the letter
    alone, or use ``pattern`` where it says more.

    Args:
        options: the options; a string stands for its letters.
    """

    def __init__(self, options: str | Sequence[str] = "ABCD") -> None:
        self.choices = tuple(options)
        if not self.choices or not all(isinstance(o, str) and o for o in self.choices):
            raise ValueError(f"options is {options!r}; it must hold at least one text")
        alternatives = "|".join(map(re.escape, sorted(self.choices, key=len, reverse=True)))
        self._pattern = re.compile(rf"(?<!\w)(?:{alternatives})(?!\w)")

    def __call__(self, answer: str) -> str | None:
        """Return the option, or None if there is none in the text."""
        found = self._pattern.search(answer)
        return None if found is None else found.group()


class pattern:  # noqa: N801, used like the functions beside it
    """Return what a regular expression finds first: its first group, or all of it without one.

    Args:
        expression: the regular expression.
    """

    def __init__(self, expression: str) -> None:
        try:
            self._pattern = re.compile(expression)
        except re.error as error:
            raise ValueError(
                f"expression is {expression!r}, which is no regular expression: {error}"
            ) from error

    def __call__(self, answer: str) -> str | None:
        """Return what was found, or None if nothing was."""
        found = self._pattern.search(answer)
        if found is None:
            return None
        text: str | None = found.group(1 if self._pattern.groups else 0)
        return text


class json_field:  # noqa: N801, used like the functions beside it
    """Return a field of the first JSON object in the text; objects, lists, true and false as JSON.

    Args:
        path: the name of the field; dots lead into nested objects.
    """

    def __init__(self, path: str) -> None:
        if not path:
            raise ValueError("path is empty; it must name a field")
        self._path = path.split(".")

    def __call__(self, answer: str) -> Hashable:
        """Return the field, or None if there is no such object or field."""
        value = _first_object(answer)
        for name in self._path:
            if not isinstance(value, dict) or name not in value:
                return None
            value = value[name]
        if isinstance(value, dict | list | bool):  # Python takes true and 1 for equal
            return json.dumps(value, sort_keys=True, ensure_ascii=False)
        found: Hashable = value
        return found


def _first_object(answer: str) -> Any:
    """Return the first JSON object that stands anywhere in a text, or None."""
    decoder = json.JSONDecoder()
    for match in re.finditer(r"\{", answer):
        try:
            return decoder.raw_decode(answer, match.start())[0]
        except (ValueError, RecursionError):
            continue
    return None


class meaning:  # noqa: N801, used like the functions beside it
    """Group texts whose embeddings are close: the most probable text of a group is its answer.

    Texts are taken in the order of their probability. Each joins the group whose first text is
    closest, by the cosine of their embeddings, if that is at least ``threshold``, and else founds a
    group of its own. The entropy over such answers is the semantic entropy of the model. The groups
    depend on which texts were found: estimates and certain bounds are for the grouping as it is.

    Args:
        embed: a function from a list of texts to their embeddings [n, d], such as
            ``SentenceTransformer.encode``, or ``word_embeddings()``.
        threshold: the least cosine of two texts of one meaning.
    """

    batched = True

    def __init__(self, embed: Callable[[list[str]], Any], threshold: float = 0.8) -> None:
        if not callable(embed):
            raise ValueError(f"embed is {embed!r}; it must be a function from texts to vectors")
        if not -1 <= threshold <= 1:
            raise ValueError(f"threshold is {threshold}; it must be a cosine, from -1 to 1")
        self._embed, self._threshold = embed, threshold

    def __call__(self, answers: list[str]) -> list[str]:
        """Return for each text the first text of its group."""
        different = list(dict.fromkeys(text(answer) for answer in answers))
        vectors = self._vectors(different)
        cosine = vectors @ vectors.T
        leaders: list[int] = []
        group: dict[str, str] = {}
        for i, own in enumerate(different):
            nearest = max(leaders, key=lambda j: float(cosine[i, j]), default=None)
            if nearest is None or float(cosine[i, nearest]) < self._threshold:
                nearest = i
                leaders.append(i)
            group[own] = different[nearest]
        return [group[text(answer)] for answer in answers]

    def _vectors(self, texts: list[str]) -> Tensor:
        """Return [n, d] the embeddings, scaled to length one."""
        found = torch.as_tensor(self._embed(texts), dtype=torch.float64, device="cpu")
        if found.ndim != 2 or len(found) != len(texts):
            raise ValueError(
                f"embed returned the shape {list(found.shape)} for {len(texts)} texts; it must "
                "return one vector for each"
            )
        if not bool(found.isfinite().all()):
            raise ValueError("embed returned numbers that are not finite")
        length: Tensor = found.norm(dim=-1, keepdim=True)
        return found / length.clamp(min=1e-300)


def word_embeddings() -> Callable[[list[str]], Any]:
    """Return the embedding function of WordLlama, a small model inside its package.

    Needs the extra ``meaning``. Nothing is downloaded. It averages vectors of words, so that it
    sees which words are there and not their order: for real work give ``meaning`` the embedding
    function of a sentence model.
    """
    package: Any = required("wordllama", "meaning")
    # It looks for its own files in a folder of another name, unless it is told where they are.
    folder = Path(package.__file__).parent
    loaded = package.WordLlama.load(cache_dir=folder, disable_download=True)

    def embed(texts: list[str]) -> Any:
        return loaded.embed(texts, norm=True)

    return embed


KEYS = (
    "text",
    "first-line",
    "number",
    "choice:ABCD",
    "choice:yes,no",
    "regex:EXPRESSION",
    "json:FIELD",
)
"""How keys are named on the command line; ``meaning[:THRESHOLD]`` needs an extra."""


def key_named(name: str) -> Key:
    """Return the key that a name such as ``first-line`` or ``choice:ABCD`` stands for."""
    kind, colon, argument = name.partition(":")
    plain: dict[str, Key] = {"text": text, "first-line": first_line, "number": number}
    if kind in plain and not colon:
        return plain[kind]
    if kind == "choice" and (not argument or argument.isupper() or "," in argument):
        options = [option.strip() for option in argument.split(",")] if "," in argument else None
        return choice(options or argument or "ABCD")
    if kind == "regex" and argument:
        return pattern(argument)
    if kind == "json" and argument:
        return json_field(argument)
    if kind == "meaning":
        try:
            threshold = float(argument) if colon else 0.8
        except ValueError as error:
            raise ValueError(f"key is {name!r}; after the colon it must have a number") from error
        return meaning(word_embeddings(), threshold)
    raise ValueError(
        f"key is {name!r}; it must be one of {', '.join(KEYS)} and meaning[:THRESHOLD]"
    )
