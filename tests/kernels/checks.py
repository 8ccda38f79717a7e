"""What the kernels must do, on a card or in Triton's interpreter.

The interpreter is chosen by an environment variable before Triton is imported, so that these checks
run in a process of their own on a CPU; on a card they are called by ``test_kernels``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from cpsbs import ConditionalPoisson, FunctionModel, search
from cpsbs.kernels import POWER_SUMS, noise, poisson
from cpsbs.kernels.closing import close_rows
from cpsbs.polynomials import chunks
from cpsbs.polynomials.weights import CandidateWeights

Made = tuple[CandidateWeights, poisson.Drawn]


def drawn(
    scores: Tensor, k: int, odds: bool = True, temperature: float = 1.0, length: int = 64,
    log_prob: Tensor | None = None, seed: int = 0,
) -> Made:  # fmt: skip
    """A sample by the kernels, and the weights that it is from."""
    sources, parents, _ = scores.shape
    table = chunks.read(scores, temperature, length, POWER_SUMS)
    if log_prob is None:
        log_prob = torch.zeros((sources, parents), dtype=torch.float64, device=scores.device)
        log_prob = log_prob.log_softmax(-1)
    weights = CandidateWeights(table, log_prob - table.log_total, odds)
    seeds = torch.arange(sources, device=scores.device) + 1000 * seed
    return weights, poisson.draw(table, weights.offset, odds, k, seeds, torch.zeros_like(seeds))


def random_scores(device: str, *shape: int, scale: float = 2.0, seed: int = 0) -> Tensor:
    """Normal ones."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).to(device)


def check_reading(device: str) -> None:
    """Against the reading by blocks, for every dtype and a last chunk that is shorter."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        scores = random_scores(device, 2, 3, 300).to(dtype)
        scores[0, 1, 128:192] = -math.inf
        ours = chunks.read(scores, 0.7, 64, 4)
        maxima, sums = torch.empty_like(ours.maxima), torch.empty_like(ours.sums)
        chunks._read_by_blocks(
            scores.flatten(0, 1), 0.7, 64, maxima.flatten(0, 1), sums.flatten(1, 2)
        )
        torch.testing.assert_close(ours.maxima, maxima, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours.sums, sums, rtol=3e-6, atol=1e-6)


def check_numbers(device: str) -> None:
    """Log Z and π against the exact arithmetic, from the same scores."""
    cases: list[tuple[tuple[int, int, int], int, bool, float, torch.dtype]] = [
        ((2, 3, 100), 3, True, 2.0, torch.float32),
        ((1, 3, 100), 3, False, 2.0, torch.float32),
        ((1, 1, 200), 1, True, 1.0, torch.float32),
        ((1, 2, 1500), 12, True, 0.1, torch.float32),
        ((1, 4, 100), 2, True, 20.0, torch.float32),
        ((1, 2, 200), 2, True, 2.0, torch.bfloat16),
        ((1, 1, 60), 7, True, 1.0, torch.float32),
    ]
    for shape, k, odds, scale, dtype in cases:
        scores = random_scores(device, *shape, scale=scale).to(dtype)
        if device == "cuda":  # the interpreter takes a second for a source
            scores = random_scores(device, 8, shape[1], 20 * shape[2], scale=scale).to(dtype)
        weights, out = drawn(scores, k, odds, temperature=0.8)
        exact = ConditionalPoisson(weights.values, k)
        torch.testing.assert_close(out.log_normalizer, exact.log_normalizer, rtol=0, atol=1e-6)
        expected = exact.log_inclusion_of(out.index)
        torch.testing.assert_close(out.log_inclusion, expected, rtol=0, atol=1e-6)
        assert bool(out.present.all())
        assert all(len(set(row)) == k for row in out.index.tolist())


def check_law(device: str, draws: int) -> None:
    """How often candidates are picked, head and tail and tied ones, within 5 σ of their π."""
    k, tokens = 2, 100
    one = random_scores(device, 1, 2, tokens, scale=1.0)
    one[0, 0, :40] = 1.5  # ties across the border of the head
    scores = one.expand(draws, -1, -1).contiguous()
    weights, head, out = drawn(scores, k)
    assert head.shape[-1] == 56 < weights.shape[1]
    pi = ConditionalPoisson(weights.values[0], k).log_inclusion.exp()
    times = torch.bincount(out.index.flatten(), minlength=len(pi))
    z = (times - draws * pi) / (draws * pi * (1 - pi)).sqrt()
    assert float(z.abs().max()) < 5, float(z.abs().max())  # 200 candidates: false alarms < 2e-4
    # Pairs, as one number: the sum of all pairs among the first ten of each parent.
    some = out.index % tokens < 10
    both = (some.sum(-1) * (some.sum(-1) - 1)).double()
    places = [p * tokens + t for p in range(2) for t in range(10)]
    joint = ConditionalPoisson(weights.values[0], k).joint_log_inclusion(
        torch.tensor(places, device=device)
    )
    expected = float(joint.exp().sum() - joint.diagonal().exp().sum())
    error = float(both.std() / math.sqrt(draws))
    assert abs(float(both.mean()) - expected) < 5 * error  # false alarms < 1e-6


def check_special_rows(device: str) -> None:
    """Certain candidates, too few of them, finished parents, equal scores, and no numbers."""
    minus = -math.inf
    scores = random_scores(device, 6, 3, 90)
    scores[0, :, 1:] = minus  # three candidates for four places
    scores[1, :, 2:] = minus  # six candidates, all in the head
    scores[2] = 0.0  # all equal
    scores[3, 0], scores[3, 0, 5] = minus, 0.0  # one of them certain to follow its parent
    scores[4, 0, :] = math.nan
    log_prob = torch.full((6, 3), math.log(1 / 3), dtype=torch.float64, device=device)
    log_prob[3] = torch.tensor([0.0, minus, minus])
    log_prob[5, 1:] = minus
    weights, out = drawn(scores, 4, log_prob=log_prob)
    assert out.present[0].tolist() == [True, True, True, False]
    assert sorted(out.index[0, :3].tolist()) == [0, 90, 180]
    assert out.log_inclusion[0].tolist() == [0.0] * 4
    assert out.present[3].tolist() == [True, False, False, False]
    assert out.index[3, 0] == 5
    good = [1, 2, 5]
    exact = ConditionalPoisson(weights.values[good], 4)
    expected = exact.log_inclusion_of(out.index[good])
    torch.testing.assert_close(out.log_inclusion[good], expected, rtol=0, atol=1e-6)


def check_forced(device: str) -> None:
    """One candidate of probability one, and others besides (as after finished parents)."""
    scores = random_scores(device, 1, 2, 150)
    scores[:, 0], scores[:, 0, 0] = -math.inf, 0.0
    log_prob = torch.zeros((1, 2), dtype=torch.float64, device=device)
    log_prob[:, 1] = -1.0
    weights, out = drawn(scores, 2, log_prob=log_prob)
    exact = ConditionalPoisson(weights.values, 2)
    assert bool((out.index == 0).any(-1).all())
    expected = exact.log_inclusion_of(out.index)
    torch.testing.assert_close(out.log_inclusion, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(out.log_normalizer, exact.log_normalizer, rtol=0, atol=1e-6)


def check_noise(device: str) -> None:
    """Uniform, and each row's by its own seed and count."""
    seeds = torch.tensor([5, 6, 5], device=device)
    counts = torch.tensor([0, 0, 1], device=device)
    row = torch.arange(3, device=device)
    x = noise.uniform(seeds, counts, row, (40, 50))
    assert torch.equal(x[1], noise.uniform(seeds, counts, row[1:2], (2000,))[0].view(40, 50))
    assert not bool((x[0] == x[2]).any())
    assert 0 <= float(x.min()) < 1e-2
    assert 1 - 1e-2 < float(x.max()) < 1
    assert abs(float(x.mean()) - 0.5) < 5 * math.sqrt(1 / 12 / x.numel())  # false alarms < 1e-6


def check_closing(device: str) -> None:
    """Only rows that are closed change."""
    scores = random_scores(device, 3, 5000)
    before = scores.clone()
    close_rows(scores, torch.tensor([False, True, False], device=device))
    assert torch.equal(scores[[0, 2]], before[[0, 2]])
    assert float(scores[1, 0]) == 0.0
    assert bool((scores[1, 1:] == -math.inf).all())


def check_search(device: str) -> None:
    """Designs that draw on the kernels, through the search; a source by itself is the same."""
    table = random_scores(device, 40, 40, scale=1.0).log_softmax(-1)

    def next_log_probs(prefix: Tensor) -> Tensor:
        last = prefix[:, -1] if prefix.shape[1] else torch.zeros_like(prefix.sum(-1))
        return table[last]

    def run(sources: int, design: str) -> tuple[list[list[list[int]]], Tensor]:
        model = FunctionModel(next_log_probs, 40, eos=0, sources=sources, device=device)
        beams = search(model, 3, design, max_length=4, generator=3)
        return [beams.tokens(b) for b in range(sources)], beams.log_prob

    for design in ("conditional-poisson", "gumbel-top-k", "independent", "stratified"):
        together, log_prob = run(2, design)
        alone, _ = run(1, design)
        assert together[:1] == alone
        for sequences, values in zip(together, log_prob.tolist(), strict=True):
            for y, value in zip(sequences, values, strict=True):
                exact = sum(float(table[a, b]) for a, b in zip([0, *y], y, strict=False))
                assert abs(value - exact) < 1e-4


CHECKS: list[Callable[[str], None]] = [
    check_reading,
    check_numbers,
    check_special_rows,
    check_forced,
    check_noise,
    check_closing,
    check_search,
]

if __name__ == "__main__":
    import sys

    if sys.argv[1:] == ["law"]:
        check_law("cpu", 400)
    else:
        for check in CHECKS:
            check("cpu")
