"""The split into head and tail, and the error bounds that it keeps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cpsbs.conditional_poisson import normalizer
from cpsbs.conditional_poisson.bernoulli_sum import TAIL_ODDS_LIMIT
from cpsbs.conditional_poisson.population import TAIL_SPREAD, split
from cpsbs.conditional_poisson.weights import (
    TRUNCATION,
    CandidateWeights,
    PlainWeights,
    WithForcedItem,
    terms_needed,
)
from cpsbs.scores.reading import Largest, read


@pytest.mark.parametrize("n", [1, 15, 16, 17, 1000, 9999, 10_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_are_those_of_topk(n: int, dtype: torch.dtype) -> None:
    """bfloat16 has plenty of ties; values agree even where positions may not."""
    x = torch.randn((3, n), generator=torch.Generator().manual_seed(n)).to(dtype)
    for m in {1, min(n, 7), min(n, 64), n}:
        found = PlainWeights(x).largest(m)
        assert torch.equal(found.values, x.topk(m).values.double())
        assert torch.equal(x.gather(-1, found.index).double(), found.values)
        assert all(len(set(row)) == m for row in found.index.tolist())


def test_power_sums_over_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn((5, 1003), generator=torch.Generator().manual_seed(0))
    unit = x.double().amax(-1)
    index = torch.stack([torch.randperm(1003)[:40] for _ in range(5)])
    head = Largest(x.double().gather(-1, index), index)
    weight = (x.double() - unit[:, None]).exp().scatter(-1, index, 0.0)
    padded = torch.nn.functional.pad(weight, (0, -1003 % 32)).view(5, -1, 32)
    for block in (64, 500, 1003, 4000, 2**20):
        monkeypatch.setattr("cpsbs.conditional_poisson.weights.block_size", lambda _, b=block: b)
        sums, chunk_sums, chunk = PlainWeights(x).power_sums(
            unit, head, 20, lambda *_: torch.full((5,), 1e-3)
        )
        assert sums.shape[-1] == terms_needed(20, 1e-3) == 5
        assert chunk == 32
        for j in range(5):
            torch.testing.assert_close(sums[:, j], weight.pow(j + 1).sum(-1), rtol=1e-14, atol=0)
        torch.testing.assert_close(chunk_sums, padded.sum(-1), rtol=1e-14, atol=0)


@pytest.mark.parametrize("forced", [False, True])
def test_power_sums_depend_on_their_arguments_alone(forced: bool) -> None:
    """On the head that is passed, whatever else was found, split or drawn from before."""
    scores = 3 * torch.randn((2, 3, 2000), generator=torch.Generator().manual_seed(0)).double()
    chunks = read(scores, 1.0, 64, 4)
    offset = -chunks.log_total - 1.0
    fresh, used = (CandidateWeights(chunks, offset, True) for _ in range(2))
    used.largest(300)
    split(used, 5)
    head = fresh.largest(80)
    if forced:
        head = WithForcedItem(fresh, torch.tensor([[17], [4000]])).largest(80)
    unit = head.values[:, -1]

    def bound(mass: Tensor | None, rounds: int) -> Tensor:
        return torch.full((2,), 0.01, dtype=torch.float64)

    outside = (fresh.values - unit[:, None]).exp().scatter(-1, head.index, 0.0)
    for weights in (fresh, used):
        sums, _, _ = weights.power_sums(unit, head, 5, bound)
        torch.testing.assert_close(sums[:, 0], outside.sum(-1), rtol=1e-9, atol=0)
        assert torch.equal(sums, fresh.power_sums(unit, head, 5, bound)[0])


@pytest.mark.parametrize("k", [1, 2, 8, 20, 100])
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 4.0, 30.0, 1000.0])
@pytest.mark.parametrize("n", [3000, 30_000])
def test_the_bounds_hold(k: int, spread: float, n: int) -> None:
    """At both tilts: on the odds of the tail, what its series leaves out, and its spread."""
    x = spread * torch.randn((2, n), generator=torch.Generator().manual_seed(k)).double()
    population = split(x, k)
    if population.tail is None:
        assert population.head.shape[-1] == n
        return
    in_tail = torch.ones((2, n), dtype=torch.bool).scatter(-1, population.head_index, False)
    y = population.relative(x)
    terms = population.tail.powers.sums.shape[-1]
    for law in (population.law, population.law_above):
        odds = torch.where(in_tail, (y + law.tilt[:, None]).exp(), 0.0)
        u = float(odds.max())
        assert u < TAIL_ODDS_LIMIT
        assert float(odds.pow(terms + 1).sum(-1).max()) / (terms + 1) / (1 - u) < TRUNCATION
        exact = odds.log1p().sum(-1)
        series = population.tail.powers.log_terms(law.tilt).sum(-1)
        torch.testing.assert_close(series, exact, rtol=1e-13, atol=TRUNCATION)
    odds = torch.where(in_tail, (y + population.law.tilt[:, None]).exp(), 0.0)
    assert float(odds.square().sum(-1).max()) <= TAIL_SPREAD * (1 + 1e-9)


def test_a_heavy_tail_needs_fewer_power_sums_than_its_head_tells() -> None:
    """10⁵ equal items: the first power sum shows that the odds of each are next to nothing."""
    population = split(torch.zeros((1, 100_000)), 20)
    assert population.tail is not None
    assert population.tail.powers.sums.shape[-1] == 4
    log_z = float(normalizer.log_normalizer(population))
    assert log_z == pytest.approx(math.log(math.comb(100_000, 20)), rel=1e-14)


def test_a_flat_row_gets_a_large_head_only_where_it_must() -> None:
    """500 of 10⁴ equal items would be drawn from the tail with many coincidences; 20 would not."""
    assert split(torch.zeros((1, 10_000)), 20).head.shape[-1] < 1000
    assert split(torch.zeros((1, 10_000)), 500).tail is None
    assert split(torch.zeros((1, 200_000)), 500).head.shape[-1] == 4040


@pytest.mark.parametrize("offset", [-0.5, 0.5])
def test_the_tilt_puts_k_in_the_bulk(offset: float) -> None:
    """P(S = K) is of order 1/σ whatever the weights are."""
    generator = torch.Generator().manual_seed(0)
    for n, k, spread in [(10, 3, 1.0), (10, 9, 300.0), (2000, 700, 5.0), (5000, 20, 50.0)]:
        x = spread * torch.randn((20, n), generator=generator, dtype=torch.float64)
        population = split(x, k)
        law = population.law if offset < 0 else population.law_above
        p, q = law.coins(population.relative(x))
        sigma = (p * q).sum(-1).sqrt()
        assert bool((law.log_probability.exp() > 0.25 / (sigma + 0.5)).all())
        error = (p.sum(-1) - (k + offset)).abs()
        assert bool((error <= 0.25 * sigma.clamp(min=0.5) + 1e-9).all())
    assert math.isfinite(float(population.law.tilt.sum()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("odds", [True, False])
@pytest.mark.parametrize(("parents", "tokens"), [(1, 5000), (4, 1600), (7, 999), (20, 300)])
def test_candidates_need_not_be_written_down(
    odds: bool, parents: int, tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The population is the same as that of a tensor with their log-weights, at any temperature."""
    monkeypatch.setattr("cpsbs.scores.reading.block_size", lambda _: 2 * tokens)
    generator = torch.Generator().manual_seed(parents)
    scores = 3 * torch.randn((3, parents, tokens), generator=generator).to(dtype)
    scores[1, :, ::3] = -math.inf
    scores[2, 0, :200] = -math.inf  # whole chunks without a candidate
    chunks = read(scores, 0.7, 64, 4)
    torch.testing.assert_close(
        chunks.log_total, (scores.double() / 0.7).logsumexp(-1), rtol=1e-7, atol=1e-7
    )
    offset = torch.randn((3, parents), generator=generator).double().log_softmax(-1)
    offset = offset - chunks.log_total
    candidates = CandidateWeights(chunks, offset, odds)
    log_p = (scores.double() / 0.7 + offset[..., None]).flatten(1)
    written = log_p - (-torch.expm1(log_p)).log() if odds else log_p
    torch.testing.assert_close(candidates.values, written, rtol=1e-13, atol=1e-13)
    ours, plain = split(candidates, 5), split(written, 5)
    assert torch.equal(ours.ranked, plain.ranked)
    assert ours.tail is not None
    assert plain.tail is not None
    close = 1e-11 if dtype == torch.float64 else 1e-6
    first, second = ours.tail.powers.sums[:, 0], plain.tail.powers.sums[:, 0]
    torch.testing.assert_close(first, second, rtol=close, atol=0)
    torch.testing.assert_close(
        ours.law.log_probability, plain.law.log_probability, rtol=close, atol=close
    )
    every = torch.arange(ours.tail.chunk_sums.shape[-1])
    for row, own in enumerate(written):
        item, log_weight = candidates.members(
            torch.full_like(every, row), every, ours.tail.chunk_length
        )
        there = log_weight > -math.inf
        assert torch.equal(item[there].sort().values, (own > -math.inf).nonzero()[:, 0])
        torch.testing.assert_close(log_weight[there], own[item[there]], rtol=close, atol=close)
