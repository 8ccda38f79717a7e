"""Refuses what would bias the gradient: settings of the trainer, broken groups, another loss.

The gradient that a ``WeightedGRPOTrainer`` follows is −Σ w (f − b) ∇log p, averaged over prompts,
where log p is the sum over all tokens of a completion. Some settings of ``GRPOConfig`` make it
something else without a word, among them two defaults. They are refused when the trainer is made.
What cannot be seen in the settings is checked while it trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

UNBIASED: dict[str, tuple[tuple[Any, ...], str]] = {
    "loss_type": (
        ("dr_grpo", "luspo"),
        "the others divide by numbers of tokens, which depend on what was drawn",
    ),
    "scale_rewards": (
        ("none",),
        "the standard deviation of a group depends on what was drawn",
    ),
    "multi_objective_aggregation": (
        ("sum_then_normalize",),
        "the standard deviation of a group depends on what was drawn",
    ),
    "num_iterations": (
        (1,),
        "in a second pass the model has moved, and ratios of single tokens do not make up for it",
    ),
    "beta": ((0.0,), "the trainer averages the divergence over completions without weights"),
    "entropy_coef": ((0.0,), "the trainer averages the entropy over tokens without weights"),
    "use_adaptive_entropy": ((False,), "the trainer averages the entropy without weights"),
    "top_entropy_quantile": ((1.0,), "tokens of low entropy would be left out of log p"),
    "mask_truncated_completions": (
        (False,),
        "a completion of maximal length is an outcome like any other",
    ),
    "off_policy_mask_threshold": ((None,), "completions would be left out"),
    "delta": ((None,), "the ratios of a model that has not moved are 1"),
    "top_p": ((1.0,), "the loss does not normalise the tokens that remain"),
    "top_k": ((0, None), "the loss does not normalise the tokens that remain"),
    "min_p": ((None, 0.0), "the loss does not normalise the tokens that remain"),
    "repetition_penalty": ((1.0,), "the loss knows no penalty"),
    "generation_kwargs": ((None, {}), "the rollout does not use them"),
    "use_vllm": ((False,), "the rollout draws from the model itself"),
}
"""Settings of ``GRPOConfig`` that would bias the gradient: the values that do not, and why."""

SAME_LOSS = 1e-3
"""By how much the loss may differ from its value by hand, relative to the sum of its terms."""


def check_settings(args: Any) -> None:
    """Refuse a ``GRPOConfig`` whose loss would not have the weighted gradient."""
    for name, (allowed, why) in UNBIASED.items():
        value = getattr(args, name)
        if value not in allowed:
            choices = " or ".join(map(repr, allowed))
            raise ValueError(
                f"{name} is {value!r}, which would bias the gradient: {why}; it must be {choices}"
            )
    steps, passes = args.steps_per_generation, args.gradient_accumulation_steps
    if passes % steps:
        raise ValueError(
            f"steps_per_generation is {steps} with gradient_accumulation_steps {passes}: the model "
            "would move before all completions of a rollout are used; the former must divide the "
            "latter"
        )


def check_trainer(trainer: Any, reserved: str) -> None:
    """Refuse a trainer with parts that a rollout does not fit.

    Args:
        trainer: the trainer, which has been made.
        reserved: the name of the extra field of a rollout, which no data set may have.
    """
    if getattr(trainer, "aux_loss_enabled", False):
        raise ValueError(
            f"router_aux_loss_coef is {trainer.router_aux_loss_coef}, which adds another loss "
            "without weights; it must be 0.0"
        )
    if trainer.tools or trainer.environment_factories:
        raise ValueError(
            "tools or environment_factory is given, but a rollout draws completions that nothing "
            "interrupts; leave both out"
        )
    plugin = getattr(trainer.args, "deepspeed_plugin", None)
    if trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3):
        raise ValueError(
            "the model is sharded (FSDP or ZeRO-3), but a rollout needs all of it in every "
            "process; train with DDP, or with ZeRO up to stage 2"
        )
    if not hasattr(trainer.processing_class, "pad_token_id"):
        raise ValueError(
            f"processing_class is a {type(trainer.processing_class).__name__}; it must be a "
            "tokenizer, because a rollout draws from tokens alone"
        )
    for name in ("train_dataset", "eval_dataset"):
        if reserved in (getattr(getattr(trainer, name), "column_names", None) or ()):
            raise ValueError(
                f"{name} has a column {reserved!r}, which the rollout would overwrite; rename it"
            )
    modules = trainer.model.modules()
    if any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in modules):
        raise ValueError(
            "disable_dropout is False, and the model has dropout, so that the loss would be of "
            "another model than the draw; it must be True"
        )


def first_of_groups(prompts: Sequence[Any], k: int) -> list[Any]:
    """Return one prompt of each group of K equal ones that follow each other."""
    if len(prompts) % k:
        raise ValueError(
            f"prompts has {len(prompts)} entries in this process, which are not groups of "
            f"num_generations = {k}; make per_device_train_batch_size × steps_per_generation (or "
            f"per_device_eval_batch_size) a multiple of {k}"
        )
    firsts = list(prompts[::k])
    for i, prompt in enumerate(prompts):
        if prompt != firsts[i // k]:
            raise ValueError(
                f"prompts[{i}] is {prompt!r}, but its group of num_generations = {k} begins with "
                f"{firsts[i // k]!r}; the prompts of a group must be equal"
            )
    return firsts


def check_room(model: Any, prompts: Sequence[Sequence[int]], max_length: int) -> None:
    """Refuse prompts that leave no room for completions of the maximal length."""
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(map(len, prompts))
    if room is not None and longest + max_length > room:
        raise ValueError(
            f"max_completion_length is {max_length}, and a prompt has {longest} tokens, where the "
            f"model takes {room} in all; it must be at most {room - longest}"
        )


def check_rewards(rewards: Tensor, k: int) -> None:
    """Refuse rewards [N] that are not numbers; trl would drop their completions silently."""
    wrong = ~rewards.isfinite()
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        raise ValueError(
            f"the reward is {float(rewards[i])} for completion {i % k} of prompt {i // k}; "
            "it must be finite, because a completion that is left out biases the gradient"
        )


def check_completions(inputs: dict[str, Tensor], tokens: Tensor, lengths: Tensor) -> None:
    """Refuse completions that are not those that were drawn, in their order and whole.

    Args:
        inputs: what the trainer made of them.
        tokens: [N, T] what was drawn.
        lengths: [N] the numbers of tokens.
    """
    ids, mask = inputs["completion_ids"], inputs["completion_mask"]
    kept = mask.sum(-1)
    if kept.shape != lengths.shape or not bool((kept == lengths).all()):
        raise ValueError(
            f"the trainer has completions of {kept.tolist()} tokens, where {lengths.tolist()} were "
            "drawn; this version of trl cuts or masks them, which cpsbs.trl does not support"
        )
    size = min(ids.shape[-1], tokens.shape[-1])
    if bool(((ids[:, :size] != tokens[:, :size]) & mask[:, :size].bool()).any()):
        raise ValueError(
            "the trainer has other completions than were drawn, or in another order; this version "
            "of trl is not supported by cpsbs.trl"
        )


def check_log_prob(
    own: Tensor | None, drawn: Tensor | None, mask: Tensor, tolerance: float
) -> None:
    """Refuse a loss of another distribution than the one that was drawn from.

    Args:
        own: [n, T] the trainer's log-probabilities of the tokens.
        drawn: [n, T] those that the rollout returned.
        mask: [n, T] what is not padding.
        tolerance: by how many nats a token they may differ on average.
    """
    if own is None or drawn is None or drawn.shape != own.shape:
        raise ValueError(
            "the trainer has lost the log-probabilities of the rollout; this version of trl is not "
            "supported by cpsbs.trl"
        )
    gap = ((own - drawn).abs() * mask).sum(-1) / mask.sum(-1)
    if not bool((gap <= tolerance).all()):
        i = int(gap.nan_to_num(torch.inf).argmax())
        raise ValueError(
            f"log p of a completion is {float((own * mask)[i].sum()):.6g} in the trainer's loss, "
            f"and was {float((drawn * mask)[i].sum()):.6g} in the rollout ({float(gap[i]):.2g} "
            f"nats a token apart, where {tolerance} are allowed). The loss is of another "
            "distribution than the draw: look for dropout, for processors of logits in the "
            "generation config, and, with a model of absolute positions such as GPT-2, for "
            "prompts of different lengths, which the trainer pads without telling the model; for "
            "rounding, pass a larger tolerance to Rollout"
        )


def check_loss(loss: Tensor, terms: Tensor, divisor: float) -> None:
    """Refuse a loss that is not the sum of A_i log p(y_i) with a constant divisor.

    All ratios of probabilities are 1 while the model has not moved, so that the loss must be
    −Σ A_i T_i / divisor, whatever the model; other normalisers and other terms would show.

    Args:
        loss: a scalar, the trainer's.
        terms: [n] A_i T_i, the advantages times the numbers of tokens.
        divisor: what the sum is divided by.
    """
    expected = -float(terms.double().sum()) / divisor
    scale = float(terms.double().abs().sum()) / divisor
    if not abs(float(loss) - expected) <= SAME_LOSS * scale + 1e-9:
        raise ValueError(
            f"the trainer's loss is {float(loss):.6g}, where the weighted sum over completions is "
            f"{expected:.6g}: something else is added to it, or it is normalised differently in "
            "this version of trl, so that the gradient would be biased"
        )
