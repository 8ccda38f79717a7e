"""Samples have the law they should.

Every test here compares frequencies with exact probabilities by a chi-square statistic. The false
alarm rate of each is 1e-4, and seeds are fixed, so that a failure means a change in the code.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy import stats
from torch import Tensor

from cpsbs import ConditionalPoisson
from cpsbs.randomness import split_seed

FALSE_ALARM = 1e-4


def assert_frequencies(observed: Tensor, probability: Tensor, draws: int) -> None:
    """Compare by chi-square, with cells pooled in order until each expects at least five."""
    expected = probability.double() * draws
    order = expected.argsort()
    pooled: list[list[float]] = [[0.0, 0.0]]
    for o, e in zip(observed.double()[order].tolist(), expected[order].tolist(), strict=True):
        if pooled[-1][1] >= 5:
            pooled.append([0.0, 0.0])
        pooled[-1][0] += o
        pooled[-1][1] += e
    if len(pooled) > 1 and pooled[-1][1] < 5:
        last = pooled.pop()
        pooled[-1] = [pooled[-1][0] + last[0], pooled[-1][1] + last[1]]
    statistic = sum((o - e) ** 2 / e for o, e in pooled)
    assert len(pooled) > 1
    assert stats.chi2.sf(statistic, len(pooled) - 1) > FALSE_ALARM


def counts_of_subsets(samples: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return all subsets [C, K], and how often each was drawn [C]."""
    k = samples.shape[-1]
    subsets = torch.tensor(list(itertools.combinations(range(n), k)))
    code = (1 << samples).sum(-1)
    observed = (code[:, None] == (1 << subsets).sum(-1)).sum(0)
    assert int(observed.sum()) == len(samples)
    return subsets, observed


@pytest.mark.parametrize(
    ("name", "weights", "k"),
    [
        ("ties", [0.0] * 6, 3),
        ("spread", [-3.0, -1.0, 0.0, 1.0, 2.0, 4.0], 3),
        ("one", [-1.0, 0.0, 1.0, 2.0], 1),
        ("all but one", [-1.0, 0.0, 1.0, 2.0, 2.5], 4),
        ("dominant", [30.0, 0.0, 0.5, 1.0, -30.0], 2),
        ("forced and excluded", [float("inf"), 0.0, 1.0, float("-inf"), 2.0, 3.0], 3),
    ],
)
def test_all_subsets_have_their_probability(name: str, weights: list[float], k: int) -> None:
    design = ConditionalPoisson(torch.tensor(weights), k)
    draws = 40_000
    samples = design.sample((draws,), torch.Generator().manual_seed(len(name)))
    subsets, observed = counts_of_subsets(samples, len(weights))
    probability = design.log_prob(subsets).exp()
    assert float(probability.sum()) == pytest.approx(1, abs=1e-12)
    assert int(observed[probability == 0].sum()) == 0
    assert_frequencies(observed, probability, draws)


def test_rows_of_a_batch_have_their_own_law_and_are_independent() -> None:
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0], [3.0, 0.0, 0.0, -2.0]])
    design = ConditionalPoisson(x, 2)
    draws = 40_000
    samples = design.sample((draws,), torch.Generator().manual_seed(0))
    assert samples.shape == (draws, 2, 2)
    cells = []
    for r in range(2):
        subsets, observed = counts_of_subsets(samples[:, r], 4)
        probability = design.log_prob(subsets[:, None, :].expand(-1, 2, -1)).exp()[:, r]
        assert_frequencies(observed, probability, draws)
        cells.append(((1 << samples[:, r]).sum(-1), (1 << subsets).sum(-1), probability))
    (first, codes, p), (second, _, q) = cells
    both = (first[:, None] == codes)[:, :, None] & (second[:, None] == codes)[:, None, :]
    assert_frequencies(both.sum(0).flatten(), (p[:, None] * q).flatten(), draws)


@pytest.mark.parametrize(
    ("n", "k", "spread"), [(4000, 3, 0.0), (4000, 10, 0.5), (4000, 10, 3.0), (40_000, 6, 2.0)]
)
def test_head_and_tail_have_their_law(n: int, k: int, spread: float) -> None:
    """It is checked for items of the head, for how many come from the tail, and for items of it."""
    x = spread * torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    design = ConditionalPoisson(x, k)
    head = design._population.head_index[0]
    assert design._population.tail is not None
    draws = 20_000
    samples = design.sample((draws,), torch.Generator().manual_seed(k))
    ordered = samples.sort(-1).values
    assert torch.equal(ordered, samples)
    assert bool((ordered[:, 1:] > ordered[:, :-1]).all())
    times = torch.bincount(samples.flatten(), minlength=n)
    pi = design.log_inclusion.exp()

    # Each item of the head is a binomial count of its own; the smallest p-value, by Bonferroni.
    p_values = [
        stats.binomtest(int(times[i]), draws, float(pi[i])).pvalue for i in head[: 2 * k].tolist()
    ]
    assert min(p_values) > FALSE_ALARM / len(p_values)

    # The number of items from the tail: enumerate it from the law of the two parts.
    from_tail = k - torch.isin(samples, head).sum(-1)
    out_of_head = torch.ones(n, dtype=torch.bool)
    out_of_head[head] = False
    counts = torch.tensor(
        [
            float(
                ConditionalPoisson(x[head], k - j).log_normalizer
                + ConditionalPoisson(x[out_of_head], j).log_normalizer
                - design.log_normalizer
            )
            for j in range(k + 1)
        ]
    ).exp()
    assert float(counts.sum()) == pytest.approx(1, abs=1e-6)
    assert_frequencies(torch.bincount(from_tail, minlength=k + 1), counts, draws)

    # Items of the tail, pooled into twenty groups; groups are not independent of each other, but
    # nearly so, because few of an item's companions come from the tail.
    tail = out_of_head.nonzero()[:, 0]
    groups = torch.arange(len(tail)) * 20 // len(tail)
    observed = torch.zeros(20).index_add_(0, groups, times[tail].float())
    expected = torch.zeros(20, dtype=torch.float64).index_add_(0, groups, pi[tail])
    share = expected / expected.sum()
    assert_frequencies(observed, share, int(observed.sum()))


def test_pairs_in_the_tail_have_their_law() -> None:
    """With uniform weights all pairs of items are equally likely, in and out of the head."""
    design = ConditionalPoisson(torch.zeros(400), 2)
    assert design._population.tail is not None
    draws = 60_000
    samples = design.sample((draws,), torch.Generator().manual_seed(8)) // 100
    cell = samples[:, 0] * 4 + samples[:, 1]
    observed = torch.bincount(cell, minlength=16).view(4, 4)
    same, different = 100 * 99 / 2, 100 * 100
    probability = torch.full((4, 4), float(different)).triu(1)
    probability += torch.diag(torch.full((4,), same))
    total = 400 * 399 / 2
    upper = torch.ones(4, 4, dtype=torch.bool).triu()
    assert_frequencies(observed[upper], probability[upper] / total, draws)


@pytest.mark.parametrize(("n", "k"), [(1000, 400), (300, 150)])
def test_large_k_has_its_law(n: int, k: int) -> None:
    x = 2 * torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    design = ConditionalPoisson(x, k)
    draws = 2_000
    samples = design.sample((draws,), torch.Generator().manual_seed(k))
    assert samples.shape == (draws, k)
    times = torch.bincount(samples.flatten(), minlength=n)
    pi = design.log_inclusion.exp().clamp(0, 1)
    p_values = [stats.binomtest(int(times[i]), draws, float(pi[i])).pvalue for i in range(n)]
    assert min(p_values) > FALSE_ALARM / n
    # How many of the first half are in: another function of the sample than single counts.
    inside = (samples < n // 2).sum(-1).double()
    half = torch.arange(n // 2)
    joint = design.joint_log_inclusion(half).exp()
    mean = float(pi[half].sum())
    variance = float(joint.sum()) - mean**2
    assert abs(float(inside.mean()) - mean) < 4 * (variance / draws) ** 0.5
    assert 0.85 < float(inside.var()) / variance < 1.15


def test_the_seed_decides() -> None:
    design = ConditionalPoisson(torch.randn((3, 5000)), 6)
    first = design.sample((7,), torch.Generator().manual_seed(1))
    assert torch.equal(first, design.sample((7,), torch.Generator().manual_seed(1)))
    assert not torch.equal(first, design.sample((7,), torch.Generator().manual_seed(2)))
    state = torch.get_rng_state()
    design.sample((), torch.Generator().manual_seed(1))
    assert torch.equal(state, torch.get_rng_state())


def test_with_a_generator_for_each_row_other_rows_do_not_matter() -> None:
    x = 2 * torch.randn((5, 6000), generator=torch.Generator().manual_seed(0))
    together = ConditionalPoisson(x, 6).sample((), split_seed(3, 5))
    for i in range(5):
        alone = ConditionalPoisson(x[i], 6).sample((), split_seed(3, 5)[i : i + 1])
        assert torch.equal(together[i], alone)
    seeds = {g.initial_seed() for seed in range(30) for g in split_seed(seed, 30)}
    assert len(seeds) == 900


def test_nor_how_many_attempts_and_batches_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat weights take several rounds of attempts; a small block makes batches of a few rows."""
    x = torch.randn((40, 200), generator=torch.Generator().manual_seed(0)) / 4
    together = ConditionalPoisson(x, 40).sample((), split_seed(3, 40))
    for size in (1000, 2**19):
        monkeypatch.setattr(
            "cpsbs.conditional_poisson.sampling.block_size", lambda _, size=size: size
        )
        assert torch.equal(ConditionalPoisson(x, 40).sample((), split_seed(3, 40)), together)
        for i in (0, 17, 39):
            alone = ConditionalPoisson(x[i], 40).sample((), split_seed(3, 40)[i : i + 1])
            assert torch.equal(together[i], alone)


def test_the_law_with_a_generator_for_each_row() -> None:
    """The law is the same with a stream for each row, from which attempts are drawn in rounds."""
    x, draws = torch.tensor([-2.0, -1.0, 0.0, 0.5, 1.0, 1.5, 2.0]), 20_000
    design = ConditionalPoisson(x.expand(draws, -1), 3)
    samples = design.sample((), split_seed(1, draws))
    subsets, observed = counts_of_subsets(samples, 7)
    assert_frequencies(observed, ConditionalPoisson(x, 3).log_prob(subsets).exp(), draws)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_the_default_type_of_torch_does_not_matter(dtype: torch.dtype) -> None:
    x = 2 * torch.randn((3, 5000), generator=torch.Generator().manual_seed(0))
    expected = ConditionalPoisson(x, 6)
    samples = expected.sample((4,), torch.Generator().manual_seed(1))
    try:
        torch.set_default_dtype(dtype)
        found = ConditionalPoisson(x, 6)
        assert torch.equal(found.sample((4,), torch.Generator().manual_seed(1)), samples)
        assert torch.equal(found.log_inclusion, expected.log_inclusion)
    finally:
        torch.set_default_dtype(torch.float32)


def test_no_sample_leaves_out_a_forced_item_or_takes_an_excluded_one() -> None:
    x = torch.randn((4, 3000), generator=torch.Generator().manual_seed(0))
    x[:, 17] = float("inf")
    x[:, 1000:] = float("-inf")
    samples = ConditionalPoisson(x, 5).sample((500,), torch.Generator().manual_seed(1))
    assert bool((samples == 17).any(-1).all())
    assert int(samples.max()) < 1000


@pytest.mark.parametrize("floor", [float("-inf"), -1e4])
def test_a_row_without_a_tail_beside_one_with(floor: float) -> None:
    x = torch.zeros((3, 2000), dtype=torch.float64)
    x[1, 96:] = floor
    samples = ConditionalPoisson(x, 2).sample((300,), torch.Generator().manual_seed(1))
    assert int(samples[:, 1].max()) < 96
    assert int(samples[:, 0].max()) > 96
    assert int(samples[:, 2].max()) > 96


def test_a_tail_of_zeros_is_never_drawn() -> None:
    x = torch.full((2, 3000), float("-inf"))
    x[0, ::100], x[1, 5:10] = 0.0, 0.0
    samples = ConditionalPoisson(x, 5).sample((200,), torch.Generator().manual_seed(1))
    assert bool((samples[:, 0] % 100 == 0).all())
    assert torch.equal(samples[:, 1], torch.arange(5, 10).expand(200, 5))
