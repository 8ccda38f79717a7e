"""Policy gradients on a toy: reward against steps, by independent and by distinct completions.

    python -m examples.policy_gradient

The tiny GPT-2 of ``adding.py`` has read some right sums and gets a quarter of them; now it trains
on rewards alone, 1 for the right answer and 0 for any other. Every step draws four completions for
each of 25 prompts: ``RLOO`` and ``independent`` with replacement, ``SBS`` and ``stratified``
without. All else but the baseline is the same. The expected reward is known exactly. It takes less
than two minutes on a CPU.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import cpsbs
from cpsbs import TextModel
from examples.adding import (
    ANSWERS,
    LONGEST,
    PROMPTS,
    exact_reward,
    make_model,
    make_tokenizer,
    read_sums,
)

MEMORY = 0.9
"""What remains of the running mean of a prompt's rewards after each time that it is drawn."""


@dataclass(frozen=True)
class Method:
    """How completions are drawn, and what their rewards are compared with."""

    design: str
    baseline: str | None = None
    """The name of a baseline; None for a running mean of the prompt's rewards, which is fixed
    before the draw."""


METHODS = {
    "RLOO": Method("independent", "loo"),
    "independent": Method("independent"),
    "SBS": Method("gumbel-top-k", "loo"),
    "stratified": Method("stratified"),
}


def is_right(numbers: Sequence[int]) -> list[Any]:
    """Return a function for each of these prompts, true of the right answer alone."""

    def rewards(answer: str) -> Any:
        return lambda text: float(text == answer)

    return [rewards(ANSWERS[i]) for i in numbers]


def train(
    model: Any,
    tokenizer: Any,
    method: Method,
    *,
    steps: int = 200,
    every: int = 40,
    k: int = 4,
    prompts: int = 25,
    rate: float = 1e-3,
    seed: int = 0,
) -> list[float]:
    """Train a copy of a model on rewards, and return the exact reward every few steps.

    Args:
        model: where to begin.
        tokenizer: its tokenizer.
        method: how to draw.
        steps: the number of steps.
        every: after how many steps to note the reward.
        k: K, the number of completions for a prompt.
        prompts: the number of prompts of a step.
        rate: the learning rate of Adam.
        seed: the seed of the run.
    """
    own = TextModel("adding", copy.deepcopy(model), tokenizer)
    optimizer = torch.optim.Adam(own.model.parameters(), rate)
    chosen, mean = random.Random(seed), torch.zeros(len(PROMPTS), dtype=torch.float64)
    noted = []
    for step in range(steps + 1):
        if step % every == 0:
            noted.append(exact_reward(own.model, tokenizer))
        if step == steps:
            break
        numbers = chosen.sample(range(len(PROMPTS)), prompts)
        texts = [PROMPTS[i] for i in numbers]
        beams = own.beams(texts, k, method.design, max_length=LONGEST, seed=seed * 10**6 + step)
        reward = cpsbs.risk(
            beams,
            is_right(numbers),
            cpsbs.log_prob(own.sequence_model(texts), beams),
            mean[numbers] if method.baseline is None else method.baseline,
            decode=own.decode,
        )
        mean[numbers] = MEMORY * mean[numbers] + (1 - MEMORY) * reward.detach()
        optimizer.zero_grad()
        torch.autograd.backward(-reward.mean())
        optimizer.step()
    return noted


def main() -> None:
    """Train by every method, and print the reward against the steps."""
    tokenizer = make_tokenizer()
    model = read_sums(make_model(tokenizer), tokenizer)
    print(f"{'steps':>12}", *(f"{step:6}" for step in range(0, 201, 40)))
    for name, method in METHODS.items():
        seeds = [train(model, tokenizer, method, seed=seed) for seed in range(2)]
        means = torch.tensor(seeds).mean(0).tolist()
        print(f"{name:>12}", *(f"{reward:6.3f}" for reward in means), flush=True)


if __name__ == "__main__":
    main()
