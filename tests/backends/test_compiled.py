"""What compiled loops read, find and draw is what the reference does, for awkward numbers too."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from cpsbs.backends import TORCH
from cpsbs.backends.cpu import compiled, products
from cpsbs.backends.cpu.backend import COMPILED
from cpsbs.backends.cpu.products import PackedProduct
from cpsbs.conditional_poisson.weights import CandidateWeights
from cpsbs.designs.conditional_poisson import draw_poisson
from cpsbs.designs.stratified import FULL_SHARE, Stratified
from cpsbs.designs.targets import FORBIDDEN
from cpsbs.designs.top_k import TopK
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Candidates, Selection
from cpsbs.scores.reading import beam_chunk_length, read
from cpsbs.search.beams import Hypotheses
from cpsbs.search.recursion import extended
from cpsbs.search.settings import SearchSettings


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


def offered(k: int, parents: int, temperature: float, temper: float = 0.3) -> Any:
    """Return scores of 6 sources, some of whose hypotheses have ended, and log p of the parents."""
    random = torch.Generator().manual_seed(k + parents)
    log_prob = torch.rand((6, parents), generator=random, dtype=torch.float64).log_softmax(-1)
    ended = torch.rand((6, parents), generator=random) < 0.3 * (parents > 1)
    ended[:, 0] = False
    row = (~ended).flatten().cumsum(0).view(6, parents) - 1
    scores = torch.randn((int((~ended).sum()), 5000), generator=random) / temper
    scores[0, 7] = -math.inf
    row = row.masked_fill(ended, len(scores))
    length = beam_chunk_length(parents, 5000, k, 4, COMPILED)
    chunks = read(scores, temperature, length, 4, row, COMPILED)
    return [replace(chunks, backend=backend) for backend in (COMPILED, TORCH)], log_prob


@pytest.mark.parametrize(("k", "parents"), [(1, 1), (5, 1), (5, 5), (20, 20)])
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_the_largest_candidates(k: int, parents: int, temperature: float) -> None:
    (found, expected), log_prob = offered(k, parents, temperature)
    for x, y in zip(found.normalize(log_prob), expected.normalize(log_prob), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-13)
    offset = expected.normalize(log_prob)[1]
    assert COMPILED.find_largest(found, offset, k) is not None
    for x, y in zip(found.largest(offset, k), expected.largest(offset, k), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-13)


def test_offsets_that_compiled_functions_cannot_read_are_left_to_torch() -> None:
    """They may come from a design of the user's."""
    (chunks, _), _ = offered(5, 5, 1.0)
    offset = torch.full((12, 5), -5.0)[:6]
    assert COMPILED.find_largest(chunks, offset, 5) is None
    assert COMPILED.find_largest(chunks, offset.double()[:, :1], 5) is None
    value, expected = (chunks.largest(x, 5)[0] for x in (offset, offset.double()))
    torch.testing.assert_close(value, expected)


@pytest.mark.parametrize(("k", "parents"), [(1, 5), (5, 5), (20, 20)])
@pytest.mark.parametrize("temperature", [1.0, 0.4])
@pytest.mark.parametrize("odds", [True, False])
@pytest.mark.parametrize("separate", [True, False])
def test_conditional_poisson_samples_are_those_of_torch(
    k: int, parents: int, temperature: float, odds: bool, separate: bool
) -> None:
    """The same items from the same random numbers, many times, with the same probabilities."""
    tables, log_prob = offered(k, parents, temperature)
    drawn: list[list[Any]] = []
    for chunks in tables:
        weights = CandidateWeights(chunks, chunks.normalize(log_prob)[1], odds)
        drawn.append([])
        for n in range(40):
            random = torch.Generator().manual_seed(n)
            one_for_all = Streams(random, 6, torch.device("cpu"))
            streams = Streams.split(n, 6, "cpu") if separate else one_for_all
            drawn[-1].append(draw_poisson(weights, k, streams, False, chunks.backend))
        fused = chunks.backend.draw_conditional_poisson(weights, k, Streams.split(0, 6, "cpu"))
        assert (fused is None) == (chunks.backend is TORCH)
    for found, expected in zip(*drawn, strict=True):
        assert torch.equal(found.index, expected.index)
        assert bool(found.present.all())
        torch.testing.assert_close(found.log_inclusion, expected.log_inclusion, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("k", "parents"), [(1, 1), (1, 5), (5, 1), (5, 5), (20, 20), (70, 70)])
@pytest.mark.parametrize("temperature", [1.0, 0.4, 0.1])
@pytest.mark.parametrize("temper", [0.3, 5.0])  # peaked, and with no heavy candidate
def test_stratified_samples_are_those_of_torch(
    k: int, parents: int, temperature: float, temper: float
) -> None:
    """The same items from the same random numbers, many times, with the same state.

    Float32 sums are added up in another order, so that a point next to the end of an item may fall
    on the neighbour: on up to 2 of 12,000 picks in 400 draws.
    """
    tables, log_prob = offered(k, parents, temperature, temper)
    others = 0
    design, random = Stratified(), torch.Generator().manual_seed(1)
    past = torch.rand(log_prob.shape, generator=random, dtype=torch.float64).log()
    past[:, 0] = 0.0
    log_prob[2, 1:] = -math.inf  # one parent
    ended = tables[0].row == len(tables[0].rows)
    found, expected = (Candidates(log_prob, x, ended, log_inclusion=past) for x in tables)
    for n in range(40):
        streams, other = (Streams.split(n, 6, "cpu") for _ in range(2))
        drawn = COMPILED.draw_stratified(found, k, streams, FULL_SHARE, FORBIDDEN)
        wanted = design._by_torch(expected, k, other)
        assert drawn is not None
        same = (drawn.index == wanted.index).all(-1)
        others += 6 - int(same.sum())
        assert bool(drawn.present.all())
        assert drawn.log_inclusion is not None
        assert wanted.log_inclusion is not None
        pairs = [(drawn.log_inclusion, wanted.log_inclusion)]
        pairs += [(own, wanted.state[name]) for name, own in drawn.state.items()]
        for own, reference in pairs:
            torch.testing.assert_close(own[same], reference[same], rtol=1e-5, atol=1e-5)
        row = torch.arange(6)
        assert torch.equal(streams.uniform(row, (1,)), other.uniform(row, (1,)))
    assert others <= 2


def test_sources_that_are_not_ordinary_are_left_to_torch() -> None:
    """Certain candidates, fewer than K of them, and scores too far apart for float32."""
    chunks, log_prob = offered(5, 5, 1.0)
    for change in ("certain", "few", "apart"):
        scores = chunks[0].scores.clone()
        log_prob[2] = torch.tensor([0.0] + 4 * [-math.inf])
        scores[2] = -math.inf if change == "few" else -1e9 if change == "apart" else -90.0
        scores[2, 0, : 5 if change == "few" else 1] = 0.0
        table = read(scores, 1.0, 64, 4, None, COMPILED)
        weights = CandidateWeights(table, table.normalize(log_prob)[1], True)
        streams = Streams.split(1, 6, "cpu")
        assert COMPILED.draw_conditional_poisson(weights, 5, streams) is None
        past = torch.zeros_like(log_prob)
        candidates = Candidates(log_prob, table, past.bool(), log_inclusion=past)
        if change != "certain":  # for stratified sampling that is an ordinary source
            given = (candidates, 5, streams, FULL_SHARE, FORBIDDEN)
            assert COMPILED.draw_stratified(*given) is None
        again = Streams.split(1, 6, "cpu")
        row = torch.arange(6)
        assert torch.equal(streams.uniform(row, (3,)), again.uniform(row, (3,)))


@pytest.mark.parametrize("n", [1, 6, 13])
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 64), (40, 5), (7, 130)])
@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu_new"])
def test_packed_products(n: int, inputs: int, outputs: int, activation: str | None) -> None:
    """In float32 and with int8 weights, where rounded inputs are multiplied without an error."""
    random = torch.Generator().manual_seed(0)
    x, weight, bias, residual = (
        torch.randn(shape, generator=random)
        for shape in ((n, inputs), (outputs, inputs), (outputs,), (n, outputs))
    )
    gelu = partial(torch.nn.functional.gelu, approximate="tanh")
    silu = torch.nn.functional.silu
    acts: dict[str | None, Any] = {"relu": torch.relu, "silu": silu, "gelu_new": gelu}
    act = acts.get(activation, lambda y: y)
    library: Any = compiled.library()
    product = PackedProduct.pack(weight, bias, activation)
    assert (product is not None) == bool(library.multiplies_floats())
    if product is None:
        pytest.skip("this processor has other products")
    torch.testing.assert_close(product(x, residual), act(x @ weight.T + bias) + residual)
    torch.testing.assert_close(product(x[::2]), act(x[::2] @ weight.T + bias))
    integers, scale = (20 * weight).round().clamp(-127, 127).to(torch.int8), weight[:, 0].abs()
    quantized = PackedProduct.pack(integers, None, activation, scale)
    if quantized is None:
        assert inputs % 4 or not library.multiplies_bytes()
        return
    size = x.abs().amax(-1, keepdim=True) / 127
    rounded = torch.floor(x * (127 / x.abs().amax(-1, keepdim=True)) + 128.5) - 128
    wanted = (rounded @ integers.float().T) * scale * size
    torch.testing.assert_close(quantized(x), act(wanted), rtol=1e-5, atol=1e-5)
    quantized.replace_bias(bias)
    found = quantized(x, residual)
    torch.testing.assert_close(found, act(wanted + bias) + residual, rtol=1e-5, atol=1e-5)


def test_products_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "library", lambda: None)
    assert PackedProduct.pack(torch.ones((4, 4)), None) is None


@pytest.mark.parametrize("known", [True, False])
def test_hypotheses_are_extended_as_by_torch(known: bool) -> None:
    """Places that stay empty, hypotheses that have ended, and tokens that end them."""
    tables, log_prob = offered(5, 5, 1.0)
    random = torch.Generator().manual_seed(5)
    shape, settings = (6, 5), SearchSettings(5, TopK(), 9)
    streams = Streams.split(0, 6, "cpu")
    roots = Hypotheses.roots(settings, streams, torch.arange(6))
    ended = tables[0].row == len(tables[0].rows)
    past = -torch.rand(shape, generator=random, dtype=torch.float64)
    length = torch.randint(1, 9, shape, generator=random)
    beam = replace(roots, length=length, log_prob=log_prob, finished=ended, log_inclusion=past)
    index = torch.randint(25000, shape, generator=random)
    index[ended] = 5000 * torch.arange(5).expand(shape)[ended]
    present = torch.rand(shape, generator=random) < 0.8
    selection = Selection(index, present, past - 1 if known else None)
    ends = tuple(range(0, 5000, 7))
    found, expected = (
        extended(beam, Candidates(log_prob, chunks, ended), selection, ends, 3) for chunks in tables
    )
    candidates = Candidates(log_prob, tables[0], ended)
    assert COMPILED.extends(candidates, selection)
    # A design of the user's may return something else, which is torch's to convert or to refuse.
    others: tuple[dict[str, Any], ...] = (
        {"index": index.int()},
        {"index": index - 25000},
        {"index": index + 25000},
        {"present": present.long()},
        {"log_inclusion": past.float()},
        {"log_inclusion": past[:, :1]},
    )
    for unusual in others:
        assert not COMPILED.extends(candidates, replace(selection, **unusual))
    assert torch.equal(found.parent, expected.parent)
    assert bool(found.broken) == bool(expected.broken)
    assert (found.beam.log_inclusion is None) == (not known)
    for x, y in zip(found.beam.tensors(), expected.beam.tensors(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_an_inclusion_probability_that_is_no_number_breaks_the_step() -> None:
    """If the place is not empty."""
    tables, log_prob = offered(5, 5, 1.0)
    streams, ended = Streams.split(0, 6, "cpu"), tables[0].row == len(tables[0].rows)
    roots = Hypotheses.roots(SearchSettings(5, TopK(), 9), streams, torch.arange(6))
    past = torch.zeros((6, 5), dtype=torch.float64)
    beam = replace(roots, length=past.long(), finished=ended, log_inclusion=past)
    present, own = torch.ones((6, 5), dtype=torch.bool), past.clone()
    own[3, 1] = math.nan
    for broken in (True, False):
        present[3, 1] = broken
        for chunks in tables:
            selection = Selection(torch.zeros((6, 5), dtype=torch.int64), present, own)
            result = extended(beam, Candidates(log_prob, chunks, ended), selection, (), 0)
            assert bool(result.broken) == broken


def test_some_hypotheses_of_several_are_normalized_as_by_torch() -> None:
    """Their log-probabilities are not contiguous."""
    random = torch.Generator().manual_seed(0)
    scores = torch.randn((4, 3, 5000), generator=random)
    log_prob = -torch.rand((4, 5), generator=random, dtype=torch.float64)[:, 1:4]
    length = beam_chunk_length(3, 5000, 3, 1, COMPILED)
    found, expected = (
        Candidates(log_prob, read(scores, 1.0, length, 1, None, backend), log_prob.isnan())
        for backend in (COMPILED, TORCH)
    )
    torch.testing.assert_close(found.log_total, expected.log_total, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.offset, expected.offset, rtol=0, atol=1e-6)
