"""Reinforcement learning with trl: groups of different completions instead of independent ones.

    python -m examples.trl_toy

A tiny GPT-2 learns to add two digits. It first reads some right sums, until it gets a quarter of
them, and then trains on rewards alone: 1 for the right answer, 0 for any other. One run has groups
of independent completions, as GRPO has them, and one has groups of different completions, which
``stratified`` draws and weights; all else is the same. The reward is known exactly: it is the
probability of the right answer, on average over all sums. docs/how-to has a page on it.
"""

from __future__ import annotations

import copy
import importlib.util
import tempfile
from typing import Any

from transformers import PrinterCallback, TrainerCallback

from examples.adding import (
    ANSWERS,
    LONGEST,
    PROMPTS,
    exact_reward,
    make_model,
    make_tokenizer,
    read_sums,
)


def is_right(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Return the reward of every completion; trl passes the weights and more besides."""
    right = dict(zip(PROMPTS, ANSWERS, strict=True))
    return [float(y == right[p]) for p, y in zip(prompts, completions, strict=True)]


class ExactReward(TrainerCallback):
    """Notes the exact reward every few steps."""

    def __init__(self, tokenizer: Any, every: int) -> None:
        self.tokenizer, self.every = tokenizer, every
        self.found: dict[int, float] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Note the reward before a step."""
        if state.global_step % self.every == 0:
            self.note(state.global_step, given["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Note the reward at the end."""
        self.note(state.global_step, given["model"])

    def note(self, step: int, model: Any) -> None:
        """Note the exact reward of a model."""
        self.found[step] = exact_reward(model, self.tokenizer)


def train(
    model: Any,
    tokenizer: Any,
    design: str,
    *,
    steps: int = 200,
    seed: int = 0,
    baseline: str | float = "auto",
    **settings: Any,
) -> dict[int, float]:
    """Train a copy of a model on rewards, and return the exact reward after some steps.

    Args:
        model: where to begin.
        tokenizer: its tokenizer.
        design: how completions are drawn.
        steps: the number of steps, with 25 prompts and 4 completions of each.
        seed: the seed of the run.
        baseline: as for ``WeightedGRPOTrainer``.
        settings: further settings of ``GRPOConfig``.
    """
    import datasets
    import trl

    import cpsbs.trl

    noted = ExactReward(tokenizer, max(1, steps // 5))
    with tempfile.TemporaryDirectory() as folder:
        chosen = {
            "output_dir": folder,
            "num_generations": 4,
            "per_device_train_batch_size": 100,
            "max_completion_length": LONGEST,
            "loss_type": "dr_grpo",  # a sum over tokens; trl's default would be biased
            "scale_rewards": "none",
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "max_steps": steps,
            "seed": seed,
            "bf16": False,
            "use_cpu": True,
            "gradient_checkpointing": False,
            "report_to": "none",
            "save_strategy": "no",
            "logging_strategy": "no",
            "disable_tqdm": True,
        }
        trainer = cpsbs.trl.WeightedGRPOTrainer(
            model=copy.deepcopy(model),
            args=trl.GRPOConfig(**{**chosen, **settings}),
            reward_funcs=is_right,
            train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tokenizer,
            rollout_func=cpsbs.trl.Rollout(design),
            baseline=baseline,
            callbacks=[noted],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return noted.found


def main() -> None:
    """Train twice, and print the reward against the steps."""
    if importlib.util.find_spec("trl") is None:
        print("trl is not installed")
        return
    tokenizer = make_tokenizer()
    model = read_sums(make_model(tokenizer), tokenizer)
    runs = {design: train(model, tokenizer, design) for design in ("independent", "stratified")}
    print("step", *runs)
    for step in runs["stratified"]:
        print(f"{step:4}", *(f"{found[step]:{len(name)}.3f}" for name, found in runs.items()))


if __name__ == "__main__":
    main()
