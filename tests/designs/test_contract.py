"""Every design we ship keeps its promises, and the check notices those that do not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cpsbs import DESIGNS, Design, check_design
from cpsbs.designs import Candidates, ConditionalPoissonDesign, Diverse, Selection, TopK
from cpsbs.randomness import Streams


@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_every_design_keeps_its_promises(name: str, k: int) -> None:
    check_design(DESIGNS[name](), k)


def test_other_settings_keep_them_too() -> None:
    check_design(ConditionalPoissonDesign(weights="probability"))
    check_design(ConditionalPoissonDesign(anneal=0.3))
    check_design(Diverse(strength=2.0, groups=2), k=4)


class Broken(Design):
    """A design that does something wrong with what a good one returns."""

    name = "broken"

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        good = ConditionalPoissonDesign().select(candidates, k, streams)
        assert good.log_inclusion is not None
        if self.fault == "twice":
            return replace(good, index=good.index[:, :1].expand(-1, k))
        if self.fault == "zero":
            return replace(good, index=torch.zeros_like(good.index))
        if self.fault == "outside":
            return replace(good, index=good.index + candidates.chunks.scores[0].numel())
        if self.fault == "empty":
            return replace(good, present=torch.zeros_like(good.present))
        if self.fault == "sum":
            return replace(good, log_inclusion=good.log_inclusion - math.log(2))
        if self.fault == "varies":
            noise = 0.1 * torch.rand(good.index.shape).double()
            return replace(good, log_inclusion=good.log_inclusion - noise)
        other = TopK().select(candidates, k, streams)
        uniform = math.log(k / int((candidates.chunks.scores[0] > -math.inf).sum()))
        return replace(other, log_inclusion=torch.full_like(good.log_inclusion, min(uniform, 0.0)))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("twice", "picked a candidate twice"),
        ("zero", "probability zero"),
        ("outside", "outside"),
        ("empty", "filled another number of places"),
        ("sum", "sum to"),
        ("varies", "varies"),
        ("frequencies", "sum to|standard deviations"),
    ],
)
def test_broken_promises_are_noticed(fault: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_design(Broken(fault))


@pytest.mark.parametrize("settings", [{"weights": "logits"}, {"anneal": -1.0}])
def test_bad_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        ConditionalPoissonDesign(**settings)  # type: ignore[arg-type]


def test_diverse_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="strength is -1"):
        Diverse(strength=-1)
    with pytest.raises(ValueError, match="groups is 0"):
        Diverse(groups=0)
