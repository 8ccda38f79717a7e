"""Streams of random numbers: no number is drawn twice, and nobody advances another's stream."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from cpsbs.backends.base import Backend
from cpsbs.designs import Calibrated, Candidates, ConditionalPoissonDesign
from cpsbs.designs.base import DrawingDesign
from cpsbs.randomness import Counters, Streams, _seed_and_count, split_seed
from cpsbs.scores.reading import read

CPU = torch.device("cpu")


class CountingBackend(Backend):
    """A backend with counters on a CPU, which notes every (seed, count) that it draws from."""

    name = "counting"
    counts_random_numbers = True

    def __init__(self) -> None:
        self.drawn: Counter[tuple[int, int]] = Counter()

    def uniform(self, counters: Counters, row: Tensor, size: tuple[int, ...]) -> Tensor:
        numbers = torch.empty((len(row), *size), dtype=torch.float64)
        for own, r in zip(numbers.unbind(), row.tolist(), strict=True):
            seed, count = int(counters.seeds[r]), int(counters.counts[r])
            self.drawn[seed, count] += 1
            own.uniform_(generator=torch.Generator().manual_seed(seed % 2**32 * 1000 + count))
        counters.counts.index_add_(0, row, torch.ones_like(row))
        return numbers


def counted(backend: Backend, rows: int = 4) -> Streams:
    return Streams.split(3, rows, CPU, backend)


def position(streams: Streams) -> list[int]:
    assert streams.counters is not None
    return streams.counters.counts.tolist()


def test_a_selection_does_not_advance_what_it_was_selected_from() -> None:
    every, some = torch.arange(4), torch.tensor([2, 0])
    expected = counted(CountingBackend()).uniform(every, (5,))
    streams = counted(CountingBackend())
    selected = streams.select(some)
    assert position(streams) == [0, 0, 0, 0]
    assert torch.equal(streams.uniform(every, (5,)), expected)
    assert torch.equal(selected.uniform(torch.arange(2), (5,)), expected[some])


def test_a_selection_that_is_put_back_shares_no_number_with_later_draws() -> None:
    backend = CountingBackend()
    streams, some = counted(backend), torch.tensor([2, 0])
    selected = streams.select(some)
    for _ in range(3):
        selected.uniform(torch.arange(2), (5,))
    streams.put(some, selected)
    assert position(streams) == [3, 0, 3, 0]
    streams.uniform(torch.arange(4), (5,))
    assert set(backend.drawn.values()) == {1}


@pytest.mark.parametrize("shared", [True, False])
def test_generators_go_on_through_a_selection(shared: bool) -> None:
    """One for all rows, or one for each: a selection draws from the same generators."""
    streams = Streams(torch.Generator() if shared else split_seed(3, 4), 4, CPU)
    before, some = streams.generator, torch.tensor([2, 0])
    selected = streams.select(some)
    first = selected.uniform(torch.arange(2), (5,))
    streams.put(some, selected)
    assert streams.generator == before
    assert not torch.equal(streams.uniform(some, (5,)), first)


def test_streams_of_single_rows_do_not_fit_into_one_generator() -> None:
    one = Streams(torch.Generator(), 4, CPU)
    for others in (Streams(split_seed(0, 1), 1, CPU), Streams(torch.Generator(), 1, CPU)):
        with pytest.raises(ValueError, match="generator is one for all sources"):
            one.put([0], others)


@pytest.mark.parametrize("design", [ConditionalPoissonDesign(), Calibrated()])
def test_sources_with_few_candidates_do_not_make_others_draw_twice(design: DrawingDesign) -> None:
    """Two of four sources keep all their candidates; the others draw, step after step."""
    scores = torch.randn((4, 1, 40), generator=torch.Generator().manual_seed(0))
    scores[1::2, :, 3:] = -math.inf
    finished = torch.zeros((4, 1), dtype=torch.bool)
    log_prob = torch.zeros((4, 1), dtype=torch.float64)
    backend = CountingBackend()
    streams = counted(backend)
    for step in range(1, 4):
        chunks = read(scores, 1.0, 32, 4)
        candidates = Candidates(log_prob, chunks, finished, log_inclusion=log_prob)
        selection = design.select(candidates, 5, streams)
        assert selection.present.sum(-1).tolist() == [5, 3, 5, 3]
        assert all(count >= step for count in position(streams)[::2])
    assert set(backend.drawn.values()) == {1}
    assert sum(backend.drawn.values()) == sum(position(streams))


class GeneratorOnGPU:
    """What a torch.Generator on a GPU tells without a draw."""

    device = torch.device("cuda")

    def __init__(self, seed: int) -> None:
        self.seed, self.offset = seed, 0

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


def test_streams_made_of_one_generator_have_nothing_in_common() -> None:
    """A counter that began a few draws after another one would repeat the rest of its draws."""
    generator = GeneratorOnGPU(7)
    made = [_seed_and_count(generator) for _ in range(3)]  # type: ignore[arg-type]
    assert made[0] == (7, 0)
    assert len({seed for seed, _ in made}) == 3
