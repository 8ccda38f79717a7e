"""Designs are values, and know themselves what their error is."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cpsbs import DESIGNS, Beams, Design, TableModel, estimate, search
from cpsbs.backends import TORCH
from cpsbs.designs import (
    Arithmetic,
    Calibrated,
    Candidates,
    ConditionalPoissonDesign,
    Diverse,
    Independent,
    Selection,
    Stratified,
)
from cpsbs.randomness import Streams
from cpsbs.search.recursion import Transition
from cpsbs.search.settings import SearchSettings

MODEL = TableModel.random(vocab_size=4, length=3, seed=3)


def drawn(design: str | Design, k: int = 3, seed: int = 0, **keep: Any) -> Beams:
    return search(MODEL, k, design, max_length=3, generator=seed, **keep)


def length(y: list[int]) -> float:
    return float(len(y))


class Plain(Design):
    """A design of one's own that is no dataclass."""

    name = "plain"

    def __init__(self, strength: float) -> None:
        self.strength = strength

    def select(
        self, candidates: Candidates, k: int, streams: Streams, joint: bool = False
    ) -> Selection:
        return Stratified().select(candidates, k, streams)


class Renamed(Stratified):
    """The same under another name."""

    name = "renamed"


class Extended(ConditionalPoissonDesign):
    """A subclass with a setting that is no field."""

    def __init__(self, more: int) -> None:
        super().__init__()
        object.__setattr__(self, "_more", more)


# --------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("name", DESIGNS)
def test_equal_settings_make_equal_designs(name: str) -> None:
    one, other = DESIGNS[name](), DESIGNS[name]()
    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one
    assert repr(one) == name


def test_other_settings_or_another_class_make_other_designs() -> None:
    several = [
        ConditionalPoissonDesign(),
        ConditionalPoissonDesign(anneal=0.5),
        ConditionalPoissonDesign("probability"),
        Diverse(),
        Diverse(groups=2),
        Stratified(),
        Renamed(),
        Independent(),
        Arithmetic(),
        Calibrated(),
    ]
    assert len(set(several)) == len(several)
    assert ConditionalPoissonDesign(anneal=0.5) == several[1]
    assert Renamed() == several[6]


def test_designs_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        ConditionalPoissonDesign().anneal = 0.5  # type: ignore[misc]


def test_a_repr_shows_the_settings_that_are_not_the_default() -> None:
    assert repr(ConditionalPoissonDesign(anneal=0.5)) == "conditional-poisson(anneal=0.5)"
    assert repr(Diverse(2.0, groups=2)) == "diverse(strength=2.0, groups=2)"
    assert repr(Plain(0.5)) == "plain(strength=0.5)"


def test_a_design_with_attributes_that_are_no_fields_is_equal_to_itself_only() -> None:
    for one, other in ((Plain(1.0), Plain(1.0)), (Extended(1), Extended(2))):
        assert one == one
        assert one != other
        assert len({one, other}) == 2


def test_a_frozen_dataclass_of_ones_own_is_a_value_too() -> None:
    @dataclass(frozen=True, repr=False, eq=False)
    class Own(Stratified):
        name = "own"
        strength: float = 1.0

    assert Own(2.0) == Own(2.0) != Own(3.0)
    assert repr(Own(2.0)) == "own(strength=2.0)"


def test_not_a_number_is_refused_as_a_strength() -> None:
    with pytest.raises(ValueError, match="strength is nan"):
        Diverse(float("nan"))


def test_recorded_steps_of_designs_that_only_look_alike_are_kept_apart() -> None:
    def key(design: Design) -> object:
        return Transition(SearchSettings(2, design, 3), (0,), 0, TORCH).key

    assert repr(Extended(1)) == repr(Extended(2))
    assert key(Extended(1)) != key(Extended(2))
    assert key(Diverse(groups=2)) == key(Diverse(groups=2))


# ------------------------------------------------------------------------------------ mixed beams


def test_beams_of_designs_that_only_look_alike_are_not_mixed() -> None:
    @dataclass(frozen=True)
    class Silent(Stratified):
        strength: float = 1.0

        def __repr__(self) -> str:
            return "stratified"

    beams = [drawn(Silent(s), seed=i) for i, s in enumerate((1.0, 2.0))]
    with pytest.raises(ValueError, match="different settings of design"):
        estimate(beams, length)
    same = [drawn(Silent(1.0), seed=i) for i in range(2)]
    assert estimate(same, length).repeats == 2


def test_beams_of_one_plain_design_can_be_mixed_and_of_two_cannot() -> None:
    plain = Plain(1.0)
    assert estimate([drawn(plain, seed=i) for i in range(2)], length).repeats == 2
    with pytest.raises(ValueError, match="pass one object to all searches"):
        estimate([drawn(Plain(1.0), seed=i) for i in range(2)], length)


def test_beams_that_do_not_know_their_design_are_compared_by_its_print() -> None:
    beams = [replace(drawn("stratified", seed=i), made_by=None) for i in range(2)]
    assert estimate(beams, length).repeats == 2
    other = replace(beams[1], settings={**beams[1].settings, "design": "stratified(x=1)"})
    with pytest.raises(ValueError, match="different settings of design"):
        estimate([beams[0], other], length)


# ------------------------------------------------------------------------------------ error bars


def test_beams_know_the_design_that_made_them() -> None:
    design = ConditionalPoissonDesign(anneal=0.5)
    beams = drawn(design)
    assert beams.made_by == design
    assert beams[0].made_by == design
    assert beams.design == "conditional-poisson"


def test_a_design_under_another_name_keeps_its_error_bar() -> None:
    one, other = (estimate(drawn(design, 5), sum) for design in (Stratified(), Renamed()))
    assert one.standard_error is not None
    assert other.standard_error is not None
    assert float(one.standard_error) == float(other.standard_error) > 0
    assert torch.equal(one.freedom, other.freedom)


def test_a_design_that_borrows_a_name_does_not_get_its_error_bar() -> None:
    class Borrowed(Plain):
        name = "stratified"

    assert estimate(drawn(Borrowed(1.0)), length).standard_error is None


def test_beams_from_elsewhere_have_no_error_of_one_beam() -> None:
    beams = replace(drawn("stratified"), made_by=None)
    result = estimate(beams, length)
    assert result.standard_error is None
    assert "error not known" in str(result)


def test_a_design_of_ones_own_can_say_its_variance() -> None:
    class Sure(Plain):
        def variance(
            self, drawn: Any, weight: Tensor, values: Tensor, log_norm: Tensor | None
        ) -> tuple[Tensor | None, Tensor]:
            return torch.full_like(values[:, 0], 4.0), torch.full((len(values),), 7.0)

    result = estimate(drawn(Sure(1.0)), length)
    assert result.standard_error is not None
    assert result.standard_error.tolist() == [2.0]
    assert result.freedom.tolist() == [7.0]


@pytest.mark.parametrize("name", DESIGNS)
def test_one_beam_tells_its_error_with_joint_inclusion_exactly_where_it_is_needed(
    name: str,
) -> None:
    design = DESIGNS[name]
    if not design.estimates:
        assert not design.needs_joint
        return
    without, with_joint = (estimate(drawn(name, joint=joint), length) for joint in (False, True))
    assert design.needs_joint == (without.variance is None and with_joint.variance is not None)
    assert ("search with joint=True" in str(without)) == design.needs_joint
    assert "search with joint=True" not in str(with_joint)


def test_a_design_that_needs_joint_is_told_so_under_any_name() -> None:
    class Other(Calibrated):
        name = "other"

    assert "search with joint=True" in str(estimate(drawn(Other()), length))


def test_arithmetic_sampling_does_not_inherit_the_error_of_independent_samples() -> None:
    assert estimate(drawn("independent"), length).variance is not None
    assert estimate(drawn("arithmetic"), length).variance is None


@pytest.mark.parametrize("name", DESIGNS)
def test_a_design_says_whether_its_beams_have_weights(name: str) -> None:
    assert (drawn(name).log_weight is not None) == DESIGNS[name].estimates
