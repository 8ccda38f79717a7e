"""``ConditionalPoisson`` on whatever floating-point numbers there are, against mpmath.

The oracle enumerates all subsets of a small design, or runs the paper's recurrence for one with a
tail of power sums, with 60 digits. Errors are those of logarithms: 1e-11, and 1e-14 of what the
logarithm itself is, because a float64 holds no more digits of it.
"""

from __future__ import annotations

import math
from typing import Any

import mpmath as mp
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpsbs import ConditionalPoisson
from tests.oracles import Enumeration, Recurrence

LARGEST = 1.7976931348623157e308
NASTY = st.sampled_from(
    [
        *(0.0, -0.0, 1.0, -1.0, 37.0, 700.0, -745.2, 1e-17, 5e-324, -5e-324, 1e16, -1e16, -1e20),
        *(1e300, -1e300, 1.7e308, -1.7e308, LARGEST, -LARGEST, math.inf, -math.inf),
    ]
)
ANY = st.one_of(
    NASTY,
    st.floats(allow_nan=False),
    st.floats(-50, 50),
    st.floats(-1e-3, 1e-3),
    st.integers(-3, 3),
)


@st.composite
def small_designs(draw: st.DrawFn) -> tuple[list[float], int]:
    """Some numbers, often the same or neighbours, and a K."""
    n = draw(st.integers(1, 6))
    log_weights = [float(draw(ANY)) for _ in range(n)]
    for i in range(1, n):
        if draw(st.integers(0, 3)) == 0:  # a tie with the one before it, or nearly
            step = draw(st.sampled_from([-math.inf, 0.0, math.inf]))
            tie = log_weights[i - 1]
            log_weights[i] = math.nextafter(tie, step) if step and math.isfinite(tie) else tie
    return log_weights, draw(st.integers(0, n))


def check(
    design: ConditionalPoisson, oracle: Any, log_weights: list[float], items: list[int]
) -> None:
    """Compare log Z and log π of some items."""
    finite = [abs(x) for x in log_weights if math.isfinite(x)]
    scale = design.k * max(finite, default=0.0)
    _close(float(design.log_normalizer), oracle.log_z, 1e-11 + 1e-15 * scale)
    log_pi = design.log_inclusion
    some = design.log_inclusion_of(torch.tensor(items))
    for i, item in enumerate(items):
        exact = oracle.inclusion(item)
        if exact == 0:
            assert float(log_pi[item]) == float(some[i]) == -math.inf
            continue
        exact = mp.log(exact)
        tolerance = float(min(1e-11 - 1e-14 * exact, mp.mpf(LARGEST)))
        _close(float(log_pi[item]), exact, tolerance)
        _close(float(some[i]), exact, tolerance)


def _close(found: float, exact: Any, tolerance: float) -> None:
    if abs(exact) > LARGEST:
        infinite = found == math.copysign(math.inf, exact)
        # What exceeds the largest float64 by less than rounding does may be rounded to it.
        border = abs(exact) <= mp.mpf(LARGEST) * (1 + mp.mpf(2) ** -52)
        assert infinite or (border and found == math.copysign(LARGEST, exact)), (found, exact)
    else:
        assert abs(mp.mpf(found) - exact) <= tolerance, (found, exact, tolerance)


def check_small(case: tuple[list[float], int]) -> None:
    log_weights, k = case
    forced = log_weights.count(math.inf)
    positive = len(log_weights) - log_weights.count(-math.inf)
    x = torch.tensor(log_weights, dtype=torch.float64)
    if not forced <= k <= positive:
        with pytest.raises(ValueError, match="log_weights"):
            ConditionalPoisson(x, k)
        return
    design = ConditionalPoisson(x, k)
    check(design, Enumeration(log_weights, k), log_weights, list(range(len(log_weights))))
    sample = design.sample(generator=torch.Generator().manual_seed(0)).tolist()
    assert len(set(sample)) == k
    assert {i for i, w in enumerate(log_weights) if w == math.inf} <= set(sample)
    assert not {i for i, w in enumerate(log_weights) if w == -math.inf} & set(sample)


@st.composite
def large_designs(draw: st.DrawFn) -> tuple[list[float], int]:
    """Enough items for a tail of power sums, drawn from a few clusters."""
    n, k = draw(st.integers(300, 500)), draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    centres = torch.tensor(draw(st.lists(st.floats(-300, 300), min_size=1, max_size=4)))
    spread = draw(st.sampled_from([0.0, 1e-9, 1.0, 30.0]))
    which = torch.randint(len(centres), (n,), generator=generator)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return (centres.double()[which] + spread * noise).tolist(), k


def check_large(case: tuple[list[float], int]) -> None:
    log_weights, k = case
    x = torch.tensor(log_weights, dtype=torch.float64)
    order = x.argsort(descending=True).tolist()
    items = [order[i] for i in (0, k - 1, k, 100, len(order) - 1)]
    check(ConditionalPoisson(x, k), Recurrence(log_weights, k), log_weights, items)


FUZZ = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@settings(FUZZ, max_examples=150)
@given(small_designs())
def test_small_designs_of_any_numbers(case: tuple[list[float], int]) -> None:
    check_small(case)


@settings(FUZZ, max_examples=15)
@given(large_designs())
def test_designs_with_a_tail(case: tuple[list[float], int]) -> None:
    check_large(case)


@pytest.mark.slow
@settings(FUZZ, max_examples=9_000)
@given(small_designs())
def test_nine_thousand_small_designs(case: tuple[list[float], int]) -> None:
    check_small(case)


@pytest.mark.slow
@settings(FUZZ, max_examples=1_000)
@given(large_designs())
def test_a_thousand_designs_with_a_tail(case: tuple[list[float], int]) -> None:
    check_large(case)
