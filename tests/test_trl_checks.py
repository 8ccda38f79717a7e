"""What ``cpsbs.trl`` checks, without trl."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cpsbs.trl import Rollout, checks
from examples.trl_toy import is_right


def test_prompts_come_in_groups_of_equal_ones() -> None:
    assert checks.first_of_groups(["a", "a", "b", "b"], 2) == ["a", "b"]
    with pytest.raises(ValueError, match="prompts has 3 entries in this process, which are not"):
        checks.first_of_groups(["a", "a", "b"], 2)
    with pytest.raises(ValueError, match=r"prompts\[1\] is 'b', but its group"):
        checks.first_of_groups(["a", "b", "b", "a"], 2)


def test_a_loss_is_compared_with_its_value_by_hand() -> None:
    terms = torch.tensor([2.0, -1.0])
    checks.check_loss(torch.tensor(-0.25), terms, 4)
    for wrong in (-0.26, 0.25, float("nan")):
        with pytest.raises(ValueError, match=r"the weighted sum over completions is -0\.25"):
            checks.check_loss(torch.tensor(wrong), terms, 4)


def test_log_probabilities_are_compared_where_there_are_tokens() -> None:
    own, mask = torch.tensor([[-1.0, -2.0, 9.0]]), torch.tensor([[1, 1, 0]])
    drawn = torch.tensor([[-1.0, -2.01, 0.0]])
    checks.check_log_prob(own, drawn, mask, 0.02)
    for wrong in (drawn - 0.1, drawn * torch.nan):
        with pytest.raises(ValueError, match="log p of a completion is -3 in the trainer's loss"):
            checks.check_log_prob(own, wrong, mask, 0.02)
    with pytest.raises(ValueError, match="has lost the log-probabilities"):
        checks.check_log_prob(own, None, mask, 0.02)


def test_a_rollout_refuses_a_trainer_without_weights() -> None:
    with pytest.raises(ValueError, match=r"it must be a cpsbs\.trl\.WeightedGRPOTrainer"):
        Rollout()(["a"], SimpleNamespace())


def test_the_reward_of_the_example_is_that_of_the_right_answer() -> None:
    assert is_right(["3 + 4 =", "9 + 9 ="], ["7", "1 9"]) == [1.0, 0.0]
