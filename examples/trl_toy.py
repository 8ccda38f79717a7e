"""Reinforcement learning with trl: groups of different completions instead of independent ones.

    python examples/trl_toy.py

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

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)

SUMS = [(a, b) for a in range(10) for b in range(10)]
PROMPTS = [f"{a} + {b} =" for a, b in SUMS]
ANSWERS = [" ".join(str(a + b)) for a, b in SUMS]
LONGEST = 4
"""The largest number of tokens of a completion; an answer has two digits and an end."""


def make_tokenizer() -> Any:
    """Return a tokenizer with a token for each digit and sign."""
    words = ["<pad>", "<end>", "+", "=", *map(str, range(10))]
    split = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}))
    split.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=split, eos_token="<end>", pad_token="<pad>")


def make_model(tokenizer: Any, seed: int = 0) -> Any:
    """Return a GPT-2 of one layer, with random weights and without dropout."""
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=16,
            n_embd=64,
            n_layer=1,
            n_head=4,
            embd_pdrop=0,
            attn_pdrop=0,
            resid_pdrop=0,
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def answer_log_prob(model: Any, tokenizer: Any) -> Tensor:
    """Return [100] log p of the right answer to every sum, with its end."""
    texts = [f"{p} {y} <end>" for p, y in zip(PROMPTS, ANSWERS, strict=True)]
    data = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    logits = model(data.input_ids, attention_mask=data.attention_mask).logits[:, :-1]
    target = data.input_ids[:, 1:]
    each = logits.log_softmax(-1).gather(-1, target[..., None])[..., 0]
    of_prompt = len(tokenizer(PROMPTS[0]).input_ids) - 1
    log_prob: Tensor = (each * data.attention_mask[:, 1:])[:, of_prompt:].sum(-1)
    return log_prob


def read_sums(model: Any, tokenizer: Any, until: float = 0.25) -> Any:
    """Train a model on right sums until it gets a given share of them."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    while True:
        log_p = answer_log_prob(model, tokenizer)
        if float(log_p.detach().exp().mean()) >= until:
            return model
        optimizer.zero_grad()
        torch.autograd.backward(-log_p.mean())
        optimizer.step()


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
        with torch.no_grad():
            log_p = answer_log_prob(model, self.tokenizer)
        self.found[step] = float(log_p.exp().mean())


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
