"""Beams: the trail that leads back to their sequences, and beams of some sources."""

from __future__ import annotations

import pytest
import torch

from cpsbs import TableModel, search
from cpsbs.search.beams import Trail


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
