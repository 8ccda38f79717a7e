"""The compiled reading of scores is the reference's, for awkward numbers too."""

from __future__ import annotations

import math

import pytest
import torch

from cpsbs.backends import TORCH
from cpsbs.backends.cpu import compiled
from cpsbs.backends.cpu.backend import COMPILED
from cpsbs.scores.reading import read


@pytest.fixture(autouse=True)
def _compiler() -> None:
    if compiled.library() is None:
        pytest.skip("there is no C compiler")


@pytest.mark.parametrize("tokens", [1, 15, 16, 64, 100, 333])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("terms", [1, 2, 4])
def test_maxima_and_sums(tokens: int, temperature: float, terms: int) -> None:
    scores = 30 * torch.randn((3, 2, tokens), generator=torch.Generator().manual_seed(0))
    scores[0, 0, 0] = -math.inf
    scores[1, 1] = -math.inf
    scores[2, 0] = -1e9
    scores[2, 0, -1] = 0.0
    given = (scores, temperature, 64, terms, None)
    found, expected = read(*given, COMPILED), read(*given, TORCH)
    assert torch.equal(found.maxima, expected.maxima)
    torch.testing.assert_close(found.sums, expected.sums, rtol=3e-6, atol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 17, 79])
def test_what_is_no_number_shows(bad: float, place: int) -> None:
    scores = torch.zeros((1, 1, 80))
    scores[0, 0, place] = bad
    assert not bool(read(scores, 1.0, 64, 4, None, COMPILED).log_total.isfinite().all())
    scores[0, 0] = math.nan
    assert not bool(read(scores, 1.0, 64, 1, None, COMPILED).log_total.isfinite().all())


def test_without_a_compiler_torch_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "a-compiler-that-is-not-there")
    assert compiled.library.__wrapped__() is None
