"""Measures of texts."""

from __future__ import annotations

import pytest

from cpsbs import diversity, sentence_bleu
from cpsbs.extras import required


def test_diversity_is_the_sum_over_orders() -> None:
    """Two sentences: 4 of 6 unigrams, 3 of 4 bigrams and 2 of 2 trigrams are different."""
    assert diversity([["a", "b", "c"], ["a", "b", "d"]]) == pytest.approx(4 / 6 + 3 / 4 + 2 / 2)
    assert diversity([[1, 2, 3, 4, 5]]) == 4
    assert diversity([[1]] * 10) == pytest.approx(0.1)
    assert diversity([]) == 0


def test_sentence_bleu_is_sacrebleu_s() -> None:
    assert sentence_bleu("the cat sat on the mat", "the cat sat on the mat") == pytest.approx(1)
    # 2/3 unigrams, 1/2 bigrams, no trigram, which is smoothed to 1/2; there is no order 4.
    expected = (2 / 3 * 1 / 2 * 1 / 2) ** (1 / 3)
    assert sentence_bleu("the cat ran", "the cat sat") == pytest.approx(expected)


def test_a_missing_package_is_named_with_the_extra() -> None:
    with pytest.raises(ImportError, match=r"pip install 'cpsbs\[metrics\]'"):
        required("a_package_that_nobody_has", "metrics")
