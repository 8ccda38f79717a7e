"""Chunks of scores, also of parents that share a row or have none, and the largest candidates."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cpsbs.designs import Candidates
from cpsbs.scores.largest import places_of_largest
from cpsbs.scores.reading import Chunks, read

SOURCES, PARENTS = 3, 5


def two_ways(tokens: int, length: int, dtype: torch.dtype) -> tuple[Chunks, Chunks]:
    """Return the same scores in full, and by rows which some parents share and others lack."""
    generator = torch.Generator().manual_seed(tokens)
    rows = 3 * torch.randn((9, tokens), generator=generator).to(dtype)
    rows[4, : tokens // 2] = -math.inf
    row = torch.tensor([[0, 1, 2, 9, 9], [3, 3, 3, 3, 4], [9, 5, 6, 7, 8]])
    alone = torch.full((1, tokens), -math.inf, dtype=dtype)
    alone[0, 0] = 0.0
    full = torch.cat([rows, alone])[row]
    return read(full, 0.7, length, 4), read(rows, 0.7, length, 4, row)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "length"), [(640, 64), (700, 64), (50, 64), (96, 32), (100, 32)]
)
def test_rows_that_are_shared_or_not_there(tokens: int, length: int, dtype: torch.dtype) -> None:
    full, mapped = two_ways(tokens, length, dtype)
    close = 1e-12 if dtype == torch.float64 else 1e-5

    def same(a: Tensor, b: Tensor) -> None:
        torch.testing.assert_close(a, b, rtol=0.0, atol=close)

    assert mapped.shape == full.shape == (SOURCES, PARENTS, tokens)
    assert torch.equal(mapped.scores, full.scores)
    for name in ("maxima", "sums", "log_total", "log_masses"):
        same(getattr(mapped, name), getattr(full, name))
    everything = torch.arange(PARENTS * tokens).expand(SOURCES, -1)
    assert torch.equal(mapped.take_along(everything), full.take_along(everything))
    chunks = full.maxima.shape[-1]
    every = torch.arange(PARENTS * chunks).expand(SOURCES, -1)
    number = torch.arange(SOURCES)[:, None]
    for own, other in zip(mapped.members(number, every), full.members(number, every), strict=True):
        assert torch.equal(own, other)
    offset = torch.randn((SOURCES, PARENTS), generator=torch.Generator().manual_seed(1)).double()
    head = full.find_largest(offset, 12)
    same(mapped.find_largest(offset, 12).values, head.values)
    unit = head.values[:, -1]
    table = full.masses_outside(head, offset, unit, 3)
    same(mapped.masses_outside(mapped.find_largest(offset, 12), offset, unit, 3), table)
    same(mapped.masses(offset - unit[:, None], head.index.sort(dim=-1).values, 3), table)
    some = torch.tensor([2, 0])
    for chosen in (full, mapped):
        part = chosen.of(some, slice(1, 4))
        assert torch.equal(part.scores, full.scores[some][:, 1:4])
        same(part.log_total, full.log_total[some][:, 1:4])


def test_the_masses_are_those_of_all_but_the_head() -> None:
    full, _ = two_ways(700, 64, torch.float64)
    offset = torch.zeros((SOURCES, PARENTS), dtype=torch.float64)
    head = full.find_largest(offset, 12)
    log_p = (full.scores / 0.7).flatten(1)
    values, index = log_p.topk(12, dim=-1)
    assert torch.equal(head.values, values)
    weight = (log_p - values[:, -1:]).exp().scatter(-1, index, 0.0)
    sums = full.masses_outside(head, offset, values[:, -1], 3).sum(-1)
    expected = torch.stack([(weight**j).sum(-1) for j in (1, 2, 3)])
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("forbidden", [-1e4, -1e9, torch.finfo(torch.float32).min, -math.inf])
def test_forbidden_tokens(forbidden: float) -> None:
    """Where fewer candidates are allowed than the head has places, some forbidden ones are in it.

    They are in one source of two, in chunks of their own or beside allowed tokens.
    """
    generator = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn((2, 2, 700), generator=generator)
    scores[1, 0, 5:] = forbidden
    scores[1, 1, 70:] = forbidden
    chunks = read(scores, 1.0, 32, 2)
    offset = torch.tensor([[-1.0, -2.0], [-3.0, -7.0]], dtype=torch.float64)
    head = chunks.find_largest(offset, 40)
    log_p = (scores.double() + offset[..., None]).flatten(1)
    torch.testing.assert_close(head.values, log_p.topk(40, dim=-1).values, rtol=0, atol=0)
    if forbidden == -math.inf:
        head = chunks.find_largest(offset, 20)
    unit = head.values[:, -1]
    weight = (log_p - unit[:, None]).exp().scatter(-1, head.index, 0.0)
    expected = torch.stack([weight.sum(-1), (weight**2).sum(-1)])
    for table in (
        chunks.masses_outside(head, offset, unit, 2),
        chunks.masses(offset - unit[:, None], head.index.sort(dim=-1).values, 2),
    ):
        torch.testing.assert_close(table.sum(-1).double(), expected, rtol=1e-5, atol=1e-8)


def test_entropy_of_rows_that_are_not_there_is_zero() -> None:
    full, mapped = two_ways(700, 64, torch.float64)
    log_prob = torch.zeros((SOURCES, PARENTS), dtype=torch.float64)
    assert mapped.row is not None
    finished = mapped.row.eq(9)
    expected = Candidates(log_prob, full, finished).entropy()
    found = Candidates(log_prob, mapped, finished).entropy()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert bool((found[finished] == 0).all())
    assert bool((found[~finished] > 0).all())


def test_a_temperature_leaves_the_maxima_as_they_are() -> None:
    full, _ = two_ways(640, 64, torch.float64)
    before = full.maxima.clone()
    _ = full.peaks
    assert torch.equal(full.maxima, before)


@pytest.mark.parametrize(("n", "m"), [(12_800, 200), (12_801, 200), (800, 50), (800, 49), (64, 1)])
def test_places_of_the_largest(n: int, m: int) -> None:
    generator = torch.Generator().manual_seed(n + m)
    x = torch.randn((4, n), generator=generator)
    x[1] = x[1].round()  # ties
    x[2, 3:] = -math.inf
    x[3] = 0.0
    place = places_of_largest(x, m)
    assert all(len(set(row)) == m for row in place.tolist())
    assert torch.equal(x.gather(-1, place), x.topk(m, dim=-1).values)
