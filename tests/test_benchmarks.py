"""The benchmark's own promises that do not depend on the clock."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks.conditional_poisson import memory
from cpsbs import ConditionalPoisson
from tests.oracles import textbook_log_normalizer


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_a_sample_of_ten_million_needs_little_memory() -> None:
    assert float(memory(20, 10**7)["copies"]) < 3  # type: ignore[arg-type]


@pytest.mark.parametrize(("n", "k"), [(10, 3), (1000, 400), (5000, 20)])
def test_the_textbook_recurrence_is_a_fair_reference(n: int, k: int) -> None:
    x = 3 * torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    textbook = textbook_log_normalizer(x, k)
    torch.testing.assert_close(
        textbook, ConditionalPoisson(x, k).log_normalizer, rtol=1e-12, atol=0
    )
