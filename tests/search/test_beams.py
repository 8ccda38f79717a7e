"""Beams: the trail that leads back to their sequences, and beams of some sources."""

from __future__ import annotations

import pytest
import torch

from cpsbs import TableModel, search
from cpsbs.designs import design_named
from cpsbs.randomness import Streams
from cpsbs.search.beams import Hypotheses, Trail
from cpsbs.search.settings import SearchSettings


def test_a_trail_leads_back() -> None:
    """The second source leaves after two steps; another one then begins in the place of the first.

    What it finds there of its predecessor is not its own.
    """
    trail = Trail(2, 2, pad=9, device=torch.device("cpu"), steps=3)
    both = torch.tensor([0, 1])
    trail.append(both, torch.tensor([[0, 0], [0, 0]]), torch.tensor([[1, 2], [3, 4]]))
    trail.append(both, torch.tensor([[1, 0], [1, 1]]), torch.tensor([[5, 6], [7, 8]]))
    assert trail.sequences(both[1:], [2]).tolist() == [[[4, 7], [4, 8]]]
    trail.append(both[:1], torch.tensor([[0, 0]]), torch.tensor([[1, 3]]))
    assert trail.sequences(both[:1], [3]).tolist() == [[[2, 5, 1], [2, 5, 3]]]
    trail.begin(both[:1], torch.tensor([[0, 0]]), torch.tensor([[4, 5]]))
    trail.append(both[:1], torch.tensor([[1, 1]]), torch.tensor([[6, 7]]))
    found = trail.sequences(both, [2, 3]).tolist()
    assert found == [[[5, 6, 9], [5, 7, 9]], [[7, 9, 9], [8, 9, 9]]]


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 8, 13, 64, 65])
def test_a_long_trail_is_walked_as_if_step_by_step(steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    trail, written = Trail(3, 4, pad=0, device=torch.device("cpu"), steps=steps), []
    for _ in range(steps + 2):
        parent = torch.randint(4, (3, 4), generator=generator)
        token = torch.randint(100, (3, 4), generator=generator)
        trail.append(torch.arange(3), parent, token)
        written.append((parent.tolist(), token.tolist()))
    found = trail.sequences(torch.tensor([2, 0]), [steps, steps]).tolist()
    for source, sequences in zip((2, 0), found, strict=True):
        for row, sequence in enumerate(sequences):
            expected, at = [], row
            for parents, tokens in reversed(written[-steps:]):
                expected.append(tokens[source][at])
                at = parents[source][at]
            assert sequence == expected[::-1]


def test_one_source_is_beams_too() -> None:
    model = TableModel.random(vocab_size=5, length=3, seed=0, sources=2)
    beams = search(model, 3, max_length=3, generator=0)
    assert torch.equal(beams[1].sequences, beams.sequences[1:])
    assert [row["source"] for row in beams.to_rows()] == [0] * 3 + [1] * 3


def test_a_trail_keeps_what_a_design_notes_of_every_step() -> None:
    """A source that has left, or has taken fewer steps than another, has zeros there."""
    trail = Trail(2, 2, pad=9, device=torch.device("cpu"), steps=3)
    both, noted = torch.tensor([0, 1]), torch.arange(1.0, 9.0).view(2, 2, 2)
    parent = torch.tensor([[0, 0], [0, 0]])
    trail.append(both, parent, torch.tensor([[1, 2], [3, 4]]), noted)
    trail.append(both[:1], torch.tensor([[1, 0]]), torch.tensor([[5, 6]]), 10 * noted[:1])
    streams = Streams(torch.Generator().manual_seed(0), 2, torch.device("cpu"))
    settings = SearchSettings(2, design_named("stratified"), 3)
    found = trail.found(Hypotheses.roots(settings, streams, both), both, [2, 2])
    assert found.tokens.tolist() == [[[2, 5], [1, 6]], [[3, 9], [4, 9]]]
    assert found.trace is not None
    assert found.trace[0].tolist() == [[[3, 4], [10, 20]], [[1, 2], [30, 40]]]
    assert found.trace[1].tolist() == [[[5, 6], [0, 0]], [[7, 8], [0, 0]]]
    trail.begin(both[:1], parent[:1], torch.tensor([[7, 8]]), 5 * noted[:1])
    found = trail.found(Hypotheses.roots(settings, streams, both[:1]), both[:1], [1])
    assert found.trace is not None
    assert found.trace.tolist() == [[[[5, 10]], [[15, 20]]]]


def test_the_trace_stays_with_its_sequences() -> None:
    model = TableModel.random(vocab_size=5, length=4, eos=0, seed=1)
    beams = search(TableModel(model.tables * 3, 0), 6, "stratified", max_length=4, generator=2)
    assert beams.trace is not None
    assert beams.trace.shape == (*beams.sequences.shape, 3)
    assert beams.log_inclusion is not None
    share = beams.trace[..., -1]
    # The last light pick of a sequence gave it its weight; certain sequences have none.
    weight = (beams.log_prob - beams.log_inclusion).exp()
    light = beams.present & (beams.log_inclusion < 0)
    assert torch.allclose(share.amax(-1)[light].double(), weight[light], rtol=1e-6)
    assert bool((share.amax(-1)[~light] == 0).all())
    part = beams[1].trace
    assert part is not None
    assert torch.equal(part, beams.trace[1:2])
    assert search(model, 6, "gumbel-top-k", max_length=4, generator=2).trace is None
