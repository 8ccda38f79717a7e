"""Every design we ship keeps its promises, and the check notices those that do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from cpsbs import DESIGNS, Design, check_design
from cpsbs.designs import (
    Candidates,
    ConditionalPoissonDesign,
    Diverse,
    Independent,
    Selection,
    Stratified,
    TopK,
)
from cpsbs.designs.variance import DrawnSequences
from cpsbs.randomness import Streams


@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_every_design_keeps_its_promises(name: str, k: int) -> None:
    check_design(DESIGNS[name](), k)


@pytest.mark.parametrize(
    ("design", "k"),
    [
        (ConditionalPoissonDesign(weights="probability"), 3),
        (ConditionalPoissonDesign(anneal=0.3), 3),
        (ConditionalPoissonDesign(anneal=0), 3),
        (Diverse(strength=2.0, groups=2), 4),
        (Stratified(), 30),
    ],
)
def test_other_settings_keep_them_too(design: Design, k: int) -> None:
    check_design(design, k)


# --------------------------------------------------------------- a random number of picks is fine


@dataclass(frozen=True, repr=False, eq=False)
class Coins(Design):
    """Place j tosses a coin; for heads it takes one of the candidates j, j + K, and so on."""

    name = "coins"
    heads: float = 0.9

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        log_p = candidates.log_joint()
        sources, number = log_p.shape
        place = torch.arange(k)
        mine = place[:, None] == torch.arange(number) % k
        share = torch.where(mine, log_p[:, None], -math.inf).softmax(-1).nan_to_num(0.0)
        end = self.heads * share.cumsum(-1)
        level = streams.uniform(torch.arange(sources), (k,))
        index = torch.searchsorted(end, level[..., None], right=True)[..., 0]
        present = level < end[..., -1]
        index = torch.where(present, index, 0)
        pi = self.heads * share.gather(-1, index[..., None])[..., 0]
        pairs = (pi[:, :, None] * pi[:, None]).where(place != place[:, None], pi[:, None])
        return Selection(index, present, pi.log(), pairs.log() if joint else None)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_coins_are_a_design(k: int) -> None:
    check_design(Coins(), k)
    check_design(Coins(heads=0.3), k)


# ------------------------------------------------------------------------------- broken promises


class Broken(Design):
    """A design that does something wrong with what a good one returns."""

    name = "broken"

    def __init__(self, fault: Callable[[Candidates, Selection, int], Selection]) -> None:
        self.fault = fault

    def __repr__(self) -> str:
        return "broken"

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        good = ConditionalPoissonDesign().select(candidates, k, streams, joint)
        return self.fault(candidates, good, k)


def _inclusion(good: Selection) -> Tensor:
    assert good.log_inclusion is not None
    return good.log_inclusion


def _twice(candidates: Candidates, good: Selection, k: int) -> Selection:
    return replace(good, index=good.index[:, :1].expand(-1, k))


def _zero(candidates: Candidates, good: Selection, k: int) -> Selection:
    return replace(good, index=torch.zeros_like(good.index))


def _outside(candidates: Candidates, good: Selection, k: int) -> Selection:
    return replace(good, index=good.index + candidates.shape[1] * candidates.shape[2])


def _outside_where_empty(candidates: Candidates, good: Selection, k: int) -> Selection:
    return replace(good, index=torch.where(good.present, good.index, -1))


def _shape(candidates: Candidates, good: Selection, k: int) -> Selection:
    return replace(good, index=good.index[:, :1])


def _state(candidates: Candidates, good: Selection, k: int) -> Selection:
    return replace(good, state={"seen": torch.zeros(len(good.index))})


def _empty(candidates: Candidates, good: Selection, k: int) -> Selection:
    return replace(good, present=torch.zeros_like(good.present))


def _half(candidates: Candidates, good: Selection, k: int) -> Selection:
    return replace(good, log_inclusion=_inclusion(good) - math.log(2))


def _above_one(candidates: Candidates, good: Selection, k: int) -> Selection:
    return replace(good, log_inclusion=_inclusion(good) + 1)


def _varies(candidates: Candidates, good: Selection, k: int) -> Selection:
    generator = torch.Generator().manual_seed(int(good.index.sum()))
    noise = 0.1 * torch.rand(good.index.shape, generator=generator).double()
    return replace(good, log_inclusion=_inclusion(good) - noise)


def _uniform(candidates: Candidates, good: Selection, k: int) -> Selection:
    possible = int((candidates.chunks.scores[0] > -math.inf).sum())
    uniform = min(0.0, math.log(k / possible))
    return replace(good, log_inclusion=torch.full_like(_inclusion(good), uniform))


def _lost(candidates: Candidates, good: Selection, k: int) -> Selection:
    """Every other draw loses its last pick, and the inclusion probabilities do not say so."""
    present = good.present.clone()
    present[::2, -1] = False
    return replace(good, present=present)


def _independent_pairs(candidates: Candidates, good: Selection, k: int) -> Selection:
    if good.joint_log_inclusion is None:
        return good
    pairs = _inclusion(good)[:, :, None] + _inclusion(good)[:, None]
    pairs.diagonal(dim1=1, dim2=2).copy_(_inclusion(good))
    return replace(good, joint_log_inclusion=pairs)


def _wrong_diagonal(candidates: Candidates, good: Selection, k: int) -> Selection:
    if good.joint_log_inclusion is None:
        return good
    return replace(good, joint_log_inclusion=good.joint_log_inclusion - torch.eye(k).double())


def _nothing_known(candidates: Candidates, good: Selection, k: int) -> Selection:
    return Selection(good.index, good.present)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_twice, "picked a candidate twice"),
        (_zero, "probability zero"),
        (_outside, "outside 0 to P·V − 1"),
        (_outside_where_empty, "index has -1, which is outside"),
        (_shape, r"index has the shape \[4000, 1\]"),
        (_state, r"state\['seen'\] has the shape \[4000\]"),
        (_empty, "picked none of 7 candidates in 4000 draws"),
        (_half, r"sum to 1\.5\d*, but 3 are picked on average"),
        (_above_one, "must be at most 1"),
        (_varies, r"varies by 0\.0"),
        (_uniform, "draws; .* were expected"),
        (_lost, r"but 2\.5 are picked on average"),
        (_independent_pairs, "the joint inclusion probability of a pair is .* were expected"),
        (_wrong_diagonal, "on the diagonal"),
        (_nothing_known, "estimates is true, but its beams have no weights"),
    ],
)
def test_broken_promises_are_noticed(
    fault: Callable[[Candidates, Selection, int], Selection], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_design(Broken(fault))


def test_all_that_is_wrong_is_said_at_once() -> None:
    def several(candidates: Candidates, good: Selection, k: int) -> Selection:
        return _wrong_diagonal(candidates, _twice(candidates, _half(candidates, good, k), k), k)

    with pytest.raises(ValueError, match="breaks what it promises with k = 3") as caught:
        check_design(Broken(several))
    said = str(caught.value)
    for part in ("twice", "sum to", "diagonal", "were expected", "a beam has a sequence", "biased"):
        assert part in said
    assert len(said.splitlines()) == len(set(said.splitlines()))


@dataclass(frozen=True, repr=False, eq=False)
class Heavier(Independent):
    """Independent samples whose weights are a little too large."""

    def log_weight(
        self, log_prob: Tensor, log_inclusion: Tensor | None, state: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        return None, torch.full_like(log_prob, 0.05 - math.log(log_prob.shape[-1]))


def test_biased_weights_are_noticed_in_a_whole_search() -> None:
    with pytest.raises(ValueError, match=r"biased: for f = 1 its mean .* is 1\.051, but") as caught:
        check_design(Heavier())
    assert len(str(caught.value).splitlines()) == 2


@dataclass(frozen=True, repr=False, eq=False)
class Forgetful(Stratified):
    """Steps are right, and weights forget all steps but the sum of their logarithms, halved."""

    def log_weight(
        self, log_prob: Tensor, log_inclusion: Tensor | None, state: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        assert log_inclusion is not None
        return super().log_weight(log_prob, log_inclusion / 2, state)


def test_a_design_whose_steps_are_right_and_whose_weights_are_not_is_noticed() -> None:
    with pytest.raises(ValueError, match="Σ w f is biased"):
        check_design(Forgetful())


@dataclass(frozen=True, repr=False, eq=False)
class Overconfident(Independent):
    """Independent samples with a fifth of the variance that they have."""

    def variance(
        self, drawn: DrawnSequences, weight: Tensor, values: Tensor, log_norm: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        variance, freedom = super().variance(drawn, weight, values, log_norm)
        assert variance is not None
        return variance / 5, freedom


def test_a_variance_that_is_far_too_small_is_noticed() -> None:
    with pytest.raises(ValueError, match=r"the variance is estimated at .* at least half"):
        check_design(Overconfident())


@dataclass(frozen=True, repr=False, eq=False)
class IgnoresNorm(ConditionalPoissonDesign):
    """The variance of normalised estimates forgets by what the weights were divided."""

    def variance(
        self, drawn: DrawnSequences, weight: Tensor, values: Tensor, log_norm: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        return super().variance(drawn, weight, values, None)


def test_a_variance_that_depends_on_the_unit_of_the_weights_is_noticed() -> None:
    with pytest.raises(ValueError, match="the variance of a normalised estimate") as caught:
        check_design(IgnoresNorm())
    assert len(str(caught.value).splitlines()) == 2


@dataclass(frozen=True, repr=False, eq=False)
class LosesSmallModels(Stratified):
    """Its weights are wrong where there is nothing to choose."""

    def log_weight(
        self, log_prob: Tensor, log_inclusion: Tensor | None, state: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        assert log_inclusion is not None
        certain = (log_inclusion == 0).all(-1, keepdim=True)
        return super().log_weight(log_prob, log_inclusion + 0.1 * certain, state)


def test_a_model_with_fewer_than_k_sequences_is_searched_too() -> None:
    with pytest.raises(ValueError, match="Σ w f is biased"):
        check_design(LosesSmallModels())


class NeedsJoint(Stratified):
    """Says that it needs what it never has."""

    needs_joint = True


def test_a_design_that_needs_joint_inclusion_must_have_it() -> None:
    with pytest.raises(ValueError, match="needs_joint is true"):
        check_design(NeedsJoint())


class Careless(TopK):
    """Draws from torch's own generator."""

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        good = super().select(candidates, k, streams)
        order = torch.rand(good.index.shape).argsort(-1)
        return Selection(good.index.gather(-1, order), good.present.gather(-1, order))


def test_a_design_that_does_not_draw_from_its_streams_is_noticed() -> None:
    with pytest.raises(ValueError, match="draw from streams only"):
        check_design(Careless())


class Changeable(TopK):
    """Cannot be hashed, as a dataclass that is not frozen."""

    __hash__ = None  # type: ignore[assignment]


def test_a_recordable_design_that_cannot_be_hashed_is_noticed() -> None:
    with pytest.raises(ValueError, match="make it a frozen dataclass"):
        check_design(Changeable())


def test_a_design_that_fails_is_said_to_and_why() -> None:
    with pytest.raises(ValueError, match="failed with ValueError: groups is 2; k = 3"):
        check_design(Diverse(groups=2), k=3)


@pytest.mark.parametrize("settings", [{"weights": "logits"}, {"anneal": -1.0}])
def test_bad_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        ConditionalPoissonDesign(**settings)  # type: ignore[arg-type]


def test_diverse_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="strength is -1"):
        Diverse(strength=-1)
    with pytest.raises(ValueError, match="groups is 0"):
        Diverse(groups=0)
