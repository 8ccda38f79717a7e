"""What the kernels must compute, on a GPU or in Triton's interpreter (see ``interpreted``)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from cpsbs import ConditionalPoisson, FunctionModel, search
from cpsbs.backends import backend_for
from cpsbs.backends.triton.kernels import POWER_SUMS, finding, layers, noise, poisson
from cpsbs.backends.triton.kernels.extending import close_rows
from cpsbs.backends.triton.kernels.finding import find_head
from cpsbs.conditional_poisson.weights import CandidateWeights
from cpsbs.designs import Candidates, GumbelTopK, Selection, Stratified
from cpsbs.randomness import Counters, Streams
from cpsbs.scores import reading
from cpsbs.search import recursion
from cpsbs.search.beams import Hypotheses, StepResult

Made = tuple[CandidateWeights, poisson.Drawn]


def drawn(
    scores: Tensor, k: int, odds: bool = True, temperature: float = 1.0, length: int = 64,
    log_prob: Tensor | None = None, seed: int = 0,
) -> Made:  # fmt: skip
    """A sample by the kernels, and the weights that it is from."""
    sources, parents, _ = scores.shape
    table = reading.read(
        scores, temperature, length, POWER_SUMS, backend=backend_for(scores.device)
    )
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
        ours = reading.read(scores, 0.7, 64, 4, backend=backend_for(scores.device))
        maxima, sums = torch.empty_like(ours.maxima), torch.empty_like(ours.sums)
        reading._read_by_blocks(
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
        ((1, 2, 40_000), 6, True, 0.5, torch.float32),  # more chunks than a block of the tail
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
    """How often candidates are picked, of the head, of the tail, and tied ones on its border.

    Whether a candidate is in a sample, or any of a set of them, is one coin for each draw, so that
    the counts are binomial. One is refused if a count as far out, on its side, has a probability
    below 1e-6; there are at most 104 counts, so that false alarms are below 2.1e-4 in all.
    """
    k, tokens = 2, 50
    one = random_scores(device, 1, 2, tokens, scale=1.0)
    one[0, 0, :20] = -0.5  # ties, some of them in the head and some not
    weights, out = drawn(one.expand(draws, -1, -1).contiguous(), k)
    values = weights.values[0]
    above, tied = values > values[0] + 1e-6, (values - values[0]).abs() < 1e-6
    assert int(above.sum()) < 8 * k + 40 < int((above | tied).sum())
    design = ConditionalPoisson(values, k)
    pi = design.log_inclusion.exp().tolist()
    times = torch.bincount(out.index.flatten(), minlength=len(pi)).tolist()
    for count, probability in zip(times, pi, strict=True):
        if draws * probability > 5:
            assert_binomial(count, draws, probability)
    # Samples with none of a set, whose probability log Z without it tells: pairs, and rare ones.
    rare = torch.tensor([draws * p <= 5 for p in pi], device=device)
    mixed = torch.arange(2 * tokens, device=device) % 7 == 3
    for some in (tied, ~above & ~tied, rare, mixed):
        without = ConditionalPoisson(values.masked_fill(some, -math.inf), k)
        none = float((without.log_normalizer - design.log_normalizer).exp())
        assert_binomial(int((~some[out.index].any(-1)).sum()), draws, min(none, 1.0))


def assert_binomial(count: int, draws: int, probability: float) -> None:
    """The exact probability of a count so far out on its side is at least 1e-6."""
    log_p, log_q = math.log(probability), math.log(max(1 - probability, 1e-300))
    low = count <= draws * probability
    total = 0.0
    for i in range(count, -1, -1) if low else range(count, draws + 1):
        ways = math.lgamma(draws + 1) - math.lgamma(i + 1) - math.lgamma(draws - i + 1)
        term = math.exp(ways + i * log_p + (draws - i) * log_q)
        total += term
        if term < 1e-20:
            break
    assert total >= 1e-6, (count, draws * probability, total)


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


def check_head(device: str) -> None:
    """The largest and their marks: ties, -inf, a short last chunk, few candidates, no numbers."""
    cases: list[tuple[tuple[int, int, int], int, float, torch.dtype]] = [
        ((2, 3, 100), 20, 1.0, torch.float32),
        ((1, 4, 3000), 72, 0.7, torch.float16),
        ((1, 1, 60), 60, 1.0, torch.float32),
        ((1, 2, 100), 150, 1.0, torch.float32),
        ((2, 2, 1500), 300, 1.3, torch.bfloat16),
    ]
    for (sources, parents, tokens), m, temperature, dtype in cases:
        scores = random_scores(device, sources, parents, tokens).to(dtype)
        scores[:, 0, ::3] = 1.0
        offset = random_scores(device, sources, parents, seed=1).double() - 20.0
        if parents > 2:
            offset[:, 1], scores[0, 2], scores[0, 2, -3:] = -math.inf, -math.inf, 5.0
        table = reading.read(scores, temperature, 64, 1, backend=backend_for(scores.device))
        values = (scores.double() / temperature + offset[..., None]).flatten(1)
        if sources > 1:
            offset[1, -1] = math.nan
            values[1, -tokens:] = -math.inf
        head = find_head(table, offset, m, "log-probability")
        with patch.object(finding, "MOST_HELD", 0):  # as for more chunks
            other = find_head(table, offset, m, "log-probability")
        for part in fields(head):
            assert torch.equal(getattr(head, part.name), getattr(other, part.name))
        expected = values.topk(m).values
        # In float32, equal ones may change places.
        torch.testing.assert_close(head.values, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(values.gather(1, head.index), head.values)
        assert head.chosen.shape[1] == min(m, table.maxima[0].numel())
        for r in range(sources):
            assert len(set(head.index[r].tolist())) == m
            each, marked = table.maxima.shape[-1], []
            for slot, chunk in enumerate(head.chosen[r].tolist()):
                assert head.slot_of[r, chunk] == slot + 1
                first = chunk // each * tokens + chunk % each * 64
                words = head.bits[r, slot].tolist()
                marked += [first + i for i in range(64) if words[i // 32] >> i % 32 & 1]
            assert sorted(marked) == sorted(head.index[r].tolist())
            assert int((head.slot_of[r] > 0).sum()) == head.chosen.shape[1]
    for kind in ("odds", "probability"):
        weights = CandidateWeights(table, offset + 19.9999, kind == "odds")
        head = find_head(table, weights.offset, m, "odds" if kind == "odds" else "probability")
        row = torch.arange(sources, device=device)[:, None]
        own = weights.take(row, head.index).nan_to_num(nan=-math.inf, posinf=math.inf)
        torch.testing.assert_close(head.values, own, rtol=1e-12, atol=1e-12)


def check_ties(device: str) -> None:
    """The head to the last of equal scores, however its members are divided among programs."""
    minus, sources, parents, tokens = -math.inf, 7, 3, 300
    scores = random_scores(device, sources, parents, tokens)
    scores[0] = scores[0].round()
    scores[1] = 0.0
    scores[2], scores[2, :, 200:203] = minus, 0.0  # hardly any candidates
    scores[3], scores[3, 1] = minus, scores[4, 1]
    scores[4, :, :128], scores[4, 0, 77] = 9.0, math.inf
    scores[5] = minus
    scores[6, :, ::64] = 10.0 + torch.arange(5, device=device) // 2
    offset = torch.zeros((sources, parents), dtype=torch.float64, device=device) - 20.0
    offset[0, 1] = math.nan
    # Each of many parts on its own, the largest found first; and one program for many parts.
    settings: list[dict[str, Any]] = [
        {"NEAR": finding.NEAR},  # as it is
        {"COLLECTED": 64, "NEAR": 0, "MOST_HELD": 0},
        {"COLLECTED": 128, "RANKED": 16, "RANKERS": 1},
    ]
    for m, length in ((1, 256), (12, 64), (30, 128)):
        table = reading.read(scores, 0.8, length, 1, backend=backend_for(scores.device))

        def numbers(x: Tensor) -> Tensor:
            x = x.double() * (1 / 0.8) + offset[..., None]
            return torch.where(x.isnan(), minus, x).float().flatten(1)

        per_parent = table.maxima.shape[-1]
        best = numbers(table.maxima).sort(descending=True, stable=True).indices[:, :m]
        looked_at = torch.zeros(sources, parents * per_parent, dtype=torch.bool, device=device)
        looked_at.scatter_(1, best, True)
        inside = looked_at.view(sources, parents, per_parent).repeat_interleave(length, -1)
        inside = inside[..., :tokens].flatten(1)
        for changed in settings:
            with patch.multiple(finding, **changed):
                head = find_head(table, offset, m, "log-probability")
            assert torch.equal(head.slot_of > 0, looked_at)
            for r in range(sources):
                index = inside[r].nonzero()[:, 0]
                order = numbers(scores)[r, index].sort(descending=True, stable=True).indices
                assert torch.equal(head.index[r], index[order[:m]]), (m, changed, r)
                assert int(sum(x.bit_count() for x in _words(head.bits[r]))) == m


def _words(bits: Tensor) -> list[int]:
    """The words of a tensor of bits, without signs."""
    return [x & 0xFFFFFFFF for x in bits.flatten().tolist()]


def check_normalizing(device: str) -> None:
    """Sums of rows, and what is not a number."""
    scores = random_scores(device, 2, 3, 300)
    scores[0, 1], scores[1, 0, 3], scores[1, 1, 3] = -math.inf, math.nan, math.inf
    log_prob = random_scores(device, 2, 3, seed=1).double()
    log_prob[1, 2] = -math.inf
    table = reading.read(scores, 0.7, 64, 1, backend=backend_for(scores.device))
    log_total, offset = table.normalize(log_prob)
    good = log_total.isfinite()
    assert good.tolist() == [[True, False, True], [False, False, True]]
    expected = (scores.double() / 0.7).logsumexp(-1)
    torch.testing.assert_close(log_total[good], expected[good], rtol=1e-6, atol=1e-6)
    assert torch.equal(offset[good], (log_prob - log_total)[good])


def check_extending(device: str) -> None:
    """Against the reference, into new tensors and in place: ended, absent, several ends or none."""
    generator = torch.Generator().manual_seed(0)
    sources, k, tokens = 3, 5, 70

    def some(high: int) -> Tensor:
        return torch.randint(high, (sources, k), generator=generator).to(device)

    cases = [((3, 9), True, None), ((), False, None), ((4,), True, "scores"), ((), True, "π")]
    for eos, known, broken in cases:
        present, real = some(4) > 0, random_scores(device, 3, sources, k).double()
        beam = Hypotheses(
            torch.arange(sources, device=device), some(tokens), some(20),
            torch.where(present, real[0], -math.inf), (some(3) == 0) & present, present, {},
            real[1] if known else None, None, None,
        )  # fmt: skip
        scores = random_scores(device, sources, k, tokens)
        scores[2, 4, 0] = math.nan if broken == "scores" else 0.0
        candidates = Candidates(
            beam.log_prob,
            reading.read(scores, 0.7, 64, 1, backend=backend_for(scores.device)),
            beam.finished,
        )
        token = torch.where(some(2) > 0, some(tokens), some(10))
        selected = some(5) > 0
        real[2][~selected] = math.nan
        if broken == "π":
            real[2][1, 2], selected[1, 2] = math.nan, True
        selection = Selection(some(k) * tokens + token, selected, real[2] if known else None)
        ends = recursion._end_tokens(eos, torch.device(device))
        expected = recursion._extended(beam, candidates, selection, ends, 1)
        new = recursion.extended(beam, candidates, selection, eos, 1)
        flag = torch.zeros((), dtype=torch.bool, device=device)
        into = StepResult(beam, torch.empty_like(beam.token), flag)
        in_place = recursion.extended(beam, candidates, selection, eos, 1, into)
        assert all(a is b for a, b in zip(in_place.beam.tensors(), beam.tensors(), strict=True))
        for found in (new, in_place):
            pairs = zip(found.beam.tensors(), expected.beam.tensors(), strict=True)
            for a, b in [*pairs, (found.parent, expected.parent)]:
                torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14, equal_nan=True)
            assert bool(found.broken) == bool(expected.broken) == (broken is not None)
        in_place.load(new)  # is it already, but for the flag
        assert bool(in_place.broken) == (broken is not None)


def check_gumbel(device: str) -> None:
    """Against the reference with the same random numbers, and from what it leaves of them."""
    minus, design = -math.inf, GumbelTopK()
    cases: list[tuple[tuple[int, int, int], int, float, torch.dtype]] = [
        ((8, 3, 300), 3, 1.0, torch.float32),
        ((2, 5, 100), 12, 0.7, torch.float16),  # more places than chunks
        ((1, 1, 140_000), 2, 1.0, torch.float32),  # more chunks than are perturbed together
        ((2, 2, 1500), 200, 1.3, torch.bfloat16),  # more of them than are ranked together
    ]
    for (sources, parents, tokens), k, temperature, dtype in cases:
        scores = random_scores(device, sources, parents, tokens).to(dtype)
        log_prob = random_scores(device, sources, parents, seed=1).double().log_softmax(-1)
        score = log_prob + random_scores(device, sources, parents, seed=2).double().abs()
        finished = torch.zeros_like(log_prob, dtype=torch.bool)
        if sources > 2:
            scores[0, 1, 1:], scores[0, 1, 0], finished[0, 1] = minus, 0.0, True
            scores[1:3, :, 1:], scores[1:3, :, 0], finished[1:3] = minus, 0.0, True
            log_prob[2:4, 1:], score[2:4, 1:] = minus, minus  # one present, finished or not
            scores[4] = 0.0
            scores[5, 0, 64:] = minus
            scores[6, 0, 5] = math.nan
            scores[7] *= 50
        threshold = random_scores(device, sources, 1, scale=5.0, seed=3).double() - 5.0
        state = {"score": score, "threshold": threshold.expand(-1, parents)}
        table = reading.read(scores, temperature, 64, 1, backend=backend_for(scores.device))
        candidates = Candidates(log_prob, table, finished, state)
        streams = Streams(None, sources, torch.device(device), backend_for(device))
        seeds = torch.arange(sources, device=device) + 7
        streams.counters = Counters(seeds, seeds % 3)
        other = streams.copy()
        found = design.select(candidates, k, streams)
        expected = design._by_torch(candidates, k, other)
        assert streams.counters.counts.tolist() == (seeds % 3 + 2).tolist()
        assert torch.equal(found.present, expected.present)
        there = found.present
        assert torch.equal(found.index[there], expected.index[there])
        assert bool(((found.index >= 0) & (found.index < parents * tokens)).all())
        for name, own in found.state.items():
            torch.testing.assert_close(
                own, expected.state[name], rtol=1e-9, atol=1e-9, equal_nan=True
            )
        if sources > 2:
            assert there.sum(-1)[[1, 2]].tolist() == [min(parents, k), 1]


def check_stratified(device: str) -> None:
    """Against the reference with the same random numbers, draw for draw."""
    minus, design = -math.inf, Stratified()
    cases: list[tuple[tuple[int, int, int], int, int, float, torch.dtype, float]] = [
        ((9, 3, 300), 3, 64, 1.0, torch.float32, 2.0),
        ((3, 5, 100), 12, 64, 0.7, torch.float16, 1.0),  # more places than chunks
        ((2, 4, 400), 4, 64, 1.0, torch.float32, 0.1),  # no heavy candidates
        ((2, 6, 2500), 40, 256, 1.3, torch.bfloat16, 4.0),  # more than are compared together
        ((1, 1, 70_000), 2, 64, 1.0, torch.float32, 2.0),  # more chunks than are added up together
        ((1, 40, 200), 40, 64, 1.0, torch.float32, 6.0),  # more parents than are compared together
    ]
    for (sources, parents, tokens), k, length, temperature, dtype, scale in cases:
        if device == "cuda":
            sources = 20 * sources if sources < 9 else sources
        scores = random_scores(device, sources, parents, tokens, scale=scale).to(dtype)
        log_prob = random_scores(device, sources, parents, seed=1).double().log_softmax(-1)
        past = -random_scores(device, sources, parents, seed=2).double().abs() / 2
        if sources == 9:
            scores[0, 1, 1:], scores[0, 1, 0] = minus, 0.0  # a finished parent
            scores[1, :, 1:], scores[1, :, 0] = minus, 0.0  # as many candidates as places
            log_prob[2, 1:] = minus  # one parent
            log_prob[3, 1:], scores[3, 0, 2:] = minus, minus  # fewer candidates than places
            scores[4] = 0.0
            scores[5, 0, 64:] = minus
            scores[6] *= 50  # all heavy but for rounding
            scores[7, :, 3:] = -1e30  # forbidden by a large negative score
            log_prob[8], scores[8, 0] = torch.tensor([0.0, -50.0, -60.0]), minus
            scores[8, 0, 9] = 0.0
        table = reading.read(scores, temperature, length, 1, backend=backend_for(scores.device))
        finished = torch.zeros_like(log_prob, dtype=torch.bool)
        candidates = Candidates(log_prob, table, finished, {}, past)
        streams = Streams(None, sources, torch.device(device), backend_for(device))
        seeds = torch.arange(sources, device=device) + 11
        streams.counters = Counters(seeds, seeds % 3)
        for _ in range(2):
            other = streams.copy()
            found = design.draw(candidates, k, streams, joint=False)
            expected = design._by_torch(candidates, k, other)
            assert other.counters is not None
            assert torch.equal(streams.counters.counts, other.counters.counts)
            assert torch.equal(found.present, expected.present)
            there = found.present
            assert torch.equal(found.index[there], expected.index[there])
            assert bool(((found.index >= 0) & (found.index < parents * tokens)).all())
            pairs = [(found.log_inclusion, expected.log_inclusion)]
            pairs += [(own, expected.state[name]) for name, own in found.state.items()]
            for own, given in pairs:
                assert own is not None
                assert given is not None
                torch.testing.assert_close(own[there], given[there], rtol=2e-6, atol=2e-6)
        if sources == 9:
            assert there.sum(-1)[[1, 3]].tolist() == [3, 2]


def philox(seed: int, place: int) -> float:
    """Philox-4x32 with ten rounds (Salmon et al. 2011): its first two words as a number."""
    a, b, c, d = place % 2**32, place >> 32, 0, 0
    key, other_key = seed % 2**32, seed >> 32
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b = (right >> 32) ^ b ^ key, right % 2**32
        c, d = (left >> 32) ^ d ^ other_key, left % 2**32
        key, other_key = (key + 0x9E3779B9) % 2**32, (other_key + 0xBB67AE85) % 2**32
    return (a << 21 ^ b >> 11) * 2.0**-53


def check_noise(device: str) -> None:
    """Uniform, and each row's by its own seed and count."""
    seeds = torch.tensor([5, 6, 5], device=device)
    counts = torch.tensor([0, 0, 1], device=device)
    row = torch.arange(3, device=device)
    x = noise.uniform(seeds, counts, row, (40, 50))
    assert torch.equal(x[1], noise.uniform(seeds, counts, row[1:2], (2000,))[0].view(40, 50))
    # A seed gives the same numbers with every version of Triton.
    for a, number in ((0, 0), (1, 7), (2, 1999)):
        place = (int(counts[row[a]]) << 32) + number
        assert float(x[a].flatten()[number]) == philox(int(seeds[row[a]]), place)
    assert not bool((x[0] == x[2]).any())
    assert 0 <= float(x.min()) < 1e-2
    assert 1 - 1e-2 < float(x.max()) < 1
    assert abs(float(x.mean()) - 0.5) < 5 * math.sqrt(1 / 12 / x.numel())  # false alarms < 1e-6


def check_layers(device: str) -> None:
    """Against the operators of transformers, in float64."""
    rows, dim = 3, 40
    for dtype, error in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        x, other = (random_scores(device, rows, dim, seed=i).to(dtype) for i in range(2))
        weight = random_scores(device, dim, seed=2).to(dtype)
        out = torch.empty_like(x)
        layers.rms_norm(x, weight, 1e-5, out)
        exact = torch.nn.functional.rms_norm(x.double(), (dim,), weight.double(), 1e-5)
        torch.testing.assert_close(out.double(), exact, rtol=error, atol=error)
        exact = torch.nn.functional.silu(x.double()) * other.double()
        layers.silu_times(x, other)
        torch.testing.assert_close(x.double(), exact, rtol=error, atol=error)
        q, k = (random_scores(device, rows, heads, 8).to(dtype) for heads in (6, 2))
        for angles in (rows, 1):
            cos, sin = (random_scores(device, angles, 8, seed=i).to(dtype) for i in range(2))
            exact_q, exact_k = apply_rotary_pos_emb(q.double(), k.double(), cos, sin)
            layers.rotate(q, k, cos, sin)
            torch.testing.assert_close(q.double(), exact_q, rtol=error, atol=10 * error)
            torch.testing.assert_close(k.double(), exact_k, rtol=error, atol=10 * error)


def check_closing(device: str) -> None:
    """Only rows that are closed change."""
    scores = random_scores(device, 3, 5000)
    before = scores.clone()
    present = torch.tensor([True, False, True], device=device)
    close_rows(scores, present, ~present)
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


def check_scores_far_apart(device: str) -> None:
    """Where float32 cannot tell candidates apart there is an error, and no weight that is NaN."""
    table = random_scores(device, 50, 300, scale=4.0)

    def scores(far: float, prefix: Tensor) -> Tensor:
        found = table[prefix.sum(-1) % 50].clone()
        found[:, 7] += far
        return found

    def run(far: float) -> Tensor:
        model = FunctionModel(partial(scores, far), 300, eos=0, device=device)
        found = search(model, 3, "conditional-poisson", max_length=4, generator=0).log_weight
        assert found is not None
        return found

    assert bool(run(1e6).isfinite().all())
    for far in (1e9, 1e15, 1e30):
        with pytest.raises(ValueError, match="within 1e8"):
            run(far)


CHECKS: list[Callable[[str], None]] = [
    check_reading,
    check_normalizing,
    check_head,
    check_ties,
    check_extending,
    check_numbers,
    check_special_rows,
    check_forced,
    check_gumbel,
    check_stratified,
    check_noise,
    check_closing,
    check_layers,
    check_search,
    check_scores_far_apart,
]
