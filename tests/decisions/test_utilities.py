"""Utilities: tables that agree with slow definitions, pair by pair, for any texts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsbs import keys, mbr
from cpsbs.decisions import ngrams, utilities
from cpsbs.decisions.utilities import Bleu, Chrf, EditSimilarity, ExactMatch, Function, as_utility
from cpsbs.estimation.metrics import sentence_bleu, sentence_chrf

CPU = torch.device("cpu")
ODD = [
    "",
    " \t\n ",
    "a",
    "aaaa aaa",
    "x" * 3000,
    "\ud800x",
    "a\0b",
    "我今天很高兴。今天很高兴",
    "これはテストです、テスト。",
    "Être à l'été, déjà vu: e\u0301te\u0301",
    "a\u00a0b",
    "a\u2028b c",
    "3.14, 1,000 & 20% -- (no!) ... &amp; <skipped>x",
    "the cat sat on the mat, the cat sat",
    "the cat sat on the mat.",
    "𝒳𝒴 🙂🙂🙂",
]
"""Texts on which an implementation of a metric may stumble."""

SLOW = {"chrf": sentence_chrf, "bleu": sentence_bleu}


def tables(name: str, candidates: Any, evidence: Any) -> list[Any]:
    return as_utility(name).tables(candidates, evidence, CPU)


def assert_as_sacrebleu(name: str, candidates: Any, evidence: Any) -> None:
    found = tables(name, candidates, evidence)
    for table, own, others in zip(found, candidates, evidence, strict=True):
        assert table.dtype == torch.float64
        exact = [[SLOW[name](c, y) for y in others] for c in own]
        expected = torch.tensor(exact, dtype=torch.float64).view(len(own), len(others))
        assert table.shape == expected.shape
        assert torch.allclose(table, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", SLOW)
def test_odd_texts_score_as_in_sacrebleu(name: str) -> None:
    assert_as_sacrebleu(name, [ODD], [ODD])


@pytest.mark.parametrize("name", SLOW)
def test_sources_do_not_disturb_each_other(name: str) -> None:
    sizes = [(1, 3), (5, 1), (2, 7), (16, 4), (1, 1)]
    candidates = [[ODD[(3 * s + i) % 16] for i in range(c)] for s, (c, _) in enumerate(sizes)]
    evidence = [[ODD[(5 * s + 2 * i) % 16] for i in range(e)] for s, (_, e) in enumerate(sizes)]
    assert_as_sacrebleu(name, candidates, evidence)


repetitive = st.text("ab .", max_size=12)
anything = st.text(st.characters(exclude_categories=()), max_size=12)


def lists(texts: st.SearchStrategy[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(texts, min_size=1, max_size=4)


def sources(texts: st.SearchStrategy[str]) -> st.SearchStrategy[list[tuple[list[str], list[str]]]]:
    return st.lists(st.tuples(lists(texts), lists(texts)), min_size=1, max_size=4)


@pytest.mark.parametrize("name", SLOW)
@given(given_sources=sources(repetitive) | sources(anything))
@settings(max_examples=60, deadline=None)
def test_random_texts_score_as_in_sacrebleu(
    name: str, given_sources: list[tuple[list[str], list[str]]]
) -> None:
    candidates, evidence = zip(*given_sources, strict=True)
    assert_as_sacrebleu(name, candidates, evidence)


def wide_texts() -> list[str]:
    """Return texts that together have more than 2¹¹ characters, with n-grams in common."""
    every = "".join(map(chr, range(0x4E00, 0x4E00 + 2**11 + 100)))
    return [every, every[1000:], every[:500] * 2, every[::-1], every[1500:1700] + "abc"]


def test_more_characters_than_fit_into_one_key_score_as_in_sacrebleu() -> None:
    texts = wide_texts()
    letters = len(set("".join(texts)))
    assert letters > 2**11
    assert Chrf.order * letters.bit_length() > ngrams.KEY_BITS
    assert_as_sacrebleu("chrf", [texts, ["ab", texts[0]]], [texts[:3], ODD])


@pytest.mark.parametrize("name", SLOW)
def test_both_ways_of_sorting_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    candidates, evidence = [ODD, ODD[3:7]], [ODD[:5], ODD]
    one_key = tables(name, candidates, evidence)
    monkeypatch.setattr(ngrams, "KEY_BITS", 0)
    for a, b in zip(one_key, tables(name, candidates, evidence), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize(("symbols", "table"), [(1, 1), (200, 2**22), (2**17, 500), (7000, 9000)])
def test_parts_of_any_size_give_the_same(
    name: str, symbols: int, table: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidates = [ODD[i : i + 1 + i % 4] for i in range(12)]
    evidence = [ODD[(7 * i) % 12 :][: 1 + i % 3] for i in range(12)]
    whole = tables(name, candidates, evidence)
    monkeypatch.setitem(ngrams.SYMBOLS, "cpu", symbols)
    monkeypatch.setitem(ngrams.TABLE, "cpu", table)
    for a, b in zip(whole, tables(name, candidates, evidence), strict=True):
        assert torch.equal(a, b)


def shared_by_counting(a: Sequence[str], b: Sequence[str], n: int) -> int:
    first, second = (
        Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1)) for text in (a, b)
    )
    return sum((first & second).values())


@given(st.lists(st.text("abc", max_size=9), min_size=1, max_size=5), st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_shared_ngrams_are_those_that_counting_finds(texts: list[str], order: int) -> None:
    symbols = ngrams.Symbols.of_characters([texts])
    every = torch.arange(len(texts))[None]
    found = ngrams.shared_ngrams(symbols, every, every, order, CPU)
    expected = [
        [[shared_by_counting(a, b, n) for b in texts] for a in texts] for n in range(1, order + 1)
    ]
    assert found[0].tolist() == expected


def levenshtein(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


@given(lists(repetitive | anything), lists(repetitive | anything))
@settings(max_examples=60, deadline=None)
def test_edit_similarity_is_one_less_the_share_of_edits(own: list[str], others: list[str]) -> None:
    (table,) = EditSimilarity().tables([own], [others], CPU)
    for row, a in zip(table.tolist(), own, strict=True):
        for value, b in zip(row, others, strict=True):
            longest = max(len(a), len(b))
            expected = 1 - levenshtein(a, b) / longest if longest else 1.0
            assert value == pytest.approx(expected, abs=1e-12)


def test_exact_match_forgives_white_space_around_a_text() -> None:
    one, two = ExactMatch().tables([["a b", " a b\n", "ab"], [""]], [["a b"], [" ", "x"]], CPU)
    assert one.tolist() == [[1], [1], [0]]
    assert two.tolist() == [[1, 0]]
    assert one.dtype == torch.float64


def test_a_function_is_called_once_for_each_distinct_pair_of_a_source() -> None:
    calls: list[tuple[str, str]] = []

    def longer(c: str, y: str) -> int:
        calls.append((c, y))
        return len(c) - len(y)

    one, two = as_utility(longer).tables([["a", "bb", "a"], ["a"]], [["x", "x", ""], ["x"]], CPU)
    assert one.tolist() == [[0, 0, 1], [1, 1, 2], [0, 0, 1]]
    assert two.tolist() == [[0]]
    assert Counter(calls) == {("a", "x"): 2, ("a", ""): 1, ("bb", "x"): 1, ("bb", ""): 1}
    assert as_utility(longer).name == "longer"
    assert as_utility(longer).bounds is None


def test_a_batched_function_gets_blocks_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilities, "PAIRS", 4)
    blocks: list[int] = []

    def together(candidates: list[str], texts: list[str]) -> Any:
        assert len(candidates) == len(texts)
        blocks.append(len(texts))
        return torch.tensor([len(c) * 10 + len(y) for c, y in zip(candidates, texts, strict=True)])

    together.batched = True  # type: ignore[attr-defined]
    candidates, evidence = [["a", "bb"], ["ccc"]], [["", "x", "x"], ["xx", "", "x", "yyy", "zzzz"]]
    one, two = as_utility(together).tables(candidates, evidence, CPU)
    assert one.tolist() == [[10, 11, 11], [20, 21, 21]]
    assert two.tolist() == [[32, 30, 31, 33, 34]]
    assert blocks == [4, 4, 1]


def test_functions_may_state_a_name_and_bounds() -> None:
    def same(c: str, y: str) -> bool:
        return c == y

    same.bounds = (0, 1)  # type: ignore[attr-defined]
    assert Function(same).bounds == (0, 1)
    assert Function(same, "equal", (-1, 2)).bounds == (-1, 2)
    assert mbr([["a", "b"]], [["b"]], Function(same, "equal")).utility == "equal"


def test_a_real_embedding_model_is_a_utility() -> None:
    pytest.importorskip("wordllama", reason="needs the extra meaning")
    embed = keys.word_embeddings()
    sizes: list[int] = []

    def cosine(candidates: list[str], texts: list[str]) -> Any:
        sizes.append(len(texts))
        a, b = (torch.as_tensor(embed(x), dtype=torch.float64) for x in (candidates, texts))
        return (a * b).sum(-1)

    cosine.batched = True  # type: ignore[attr-defined]
    cosine.bounds = (-1, 1)  # type: ignore[attr-defined]
    said = ["The capital is Paris.", "Paris is the capital.", "Paris", "Bananas are yellow."]
    found = mbr([said], utility=cosine)[0]
    assert sizes == [16]
    assert found.candidates[-1].text == said[-1]
    vectors = torch.as_tensor(embed(said), dtype=torch.float64)
    mean = (vectors @ vectors.T).mean(-1)
    assert found.text == said[int(mean.argmax())]
    assert found.utility == pytest.approx(float(mean.max()), abs=1e-6)


def test_names_stand_for_utilities() -> None:
    kinds = {"chrf": Chrf, "BLEU": Bleu, "exact": ExactMatch, "Edit": EditSimilarity}
    for name, kind in kinds.items():
        assert isinstance(as_utility(name), kind)
        assert as_utility(name).bounds == (0, 1)
    own = Chrf()
    assert as_utility(own) is own


def test_what_is_no_utility_is_refused() -> None:
    with pytest.raises(ValueError, match="utility is 'comet'; it must be one of chrf, bleu, exact"):
        as_utility("comet")
    with pytest.raises(ValueError, match=r"utility is the class Chrf; pass an object, Chrf\(\)"):
        as_utility(Chrf)
    with pytest.raises(ValueError, match="utility is 3; it must be one of"):
        as_utility(3)


def returns(value: Any, **attributes: Any) -> Any:
    """Return a function with attributes that is ``value`` for the candidate "bad", else 0."""

    def f(c: Any, y: Any) -> Any:
        if attributes.get("batched"):
            return value
        return value if c == "bad" else 0.0

    for name, attribute in attributes.items():
        setattr(f, name, attribute)
    return f


def test_a_bad_value_names_the_source_and_the_texts() -> None:
    candidates, evidence = [["a"], ["a", "bad"]], [["x"], ["y"]]
    for value in (math.nan, math.inf):
        with pytest.raises(
            ValueError,
            match=f"the utility f is {value} for source 1, candidate 'bad' and 'y'; it must be fin",
        ):
            mbr(candidates, evidence, returns(value))
    with pytest.raises(
        ValueError, match=r"is 2\.0 for source 1, candidate 'bad' and 'y'; it must be in \[0, 1\]"
    ):
        mbr(candidates, evidence, returns(2, bounds=(0, 1)))
    with pytest.raises(ValueError, match=r"is -9\.0 .* it must be in \[-1, inf\], by its bounds"):
        mbr(candidates, evidence, returns(-9, bounds=(-1, math.inf)))
    with pytest.raises(ValueError, match="utility returned 'x' for source 1; it must return a num"):
        mbr(candidates, evidence, returns("x"))


def test_a_batch_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="batched and returned 3 numbers for 2 pairs"):
        mbr([["a", "b"]], [["x"]], returns([0.0] * 3, batched=True))


def test_a_utility_of_the_wrong_shape_is_refused() -> None:
    class Turned(Chrf):
        name = "turned"

        def tables(self, candidates: Any, evidence: Any, device: torch.device) -> list[Any]:
            return [table.T for table in super().tables(candidates, evidence, device)]

    with pytest.raises(
        ValueError, match=r"turned returned the shape \[1, 2\] for source 0; .* = \[2, 1\]"
    ):
        mbr([["a", "b"]], [["x"]], Turned())


def test_a_failing_function_names_the_texts() -> None:
    def fails(c: Any, y: Any) -> float:
        raise RuntimeError("no idea")

    with pytest.raises(
        ValueError, match="failed on texts of source 0, 'a' and 'x': RuntimeError: no idea"
    ):
        mbr([["a"]], [["x"]], fails)
    fails.batched = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="of source 0, in a batch: RuntimeError: no idea"):
        mbr([["a"]], [["x"]], fails)
