"""A toy for reinforcement learning: a tiny GPT-2 that adds two digits, and whose reward is known.

The reward of an answer is 1 if it is right, else 0, so that the expected reward is the probability
of the right answer, which the model tells exactly. ``policy_gradient.py`` and ``trl_toy.py`` train
it.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

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
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=split, eos_token="<end>", pad_token="<pad>")


def make_model(tokenizer: Any, seed: int = 0) -> Any:
    """Return a GPT-2 of one layer, with random weights and without dropout."""
    torch.manual_seed(seed)
    make: Any = GPT2LMHeadModel
    return make(
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


@torch.no_grad()
def exact_reward(model: Any, tokenizer: Any) -> float:
    """Return the expected reward: the probability of the right answer, on average over all sums."""
    return float(answer_log_prob(model, tokenizer).exp().mean())


def read_sums(model: Any, tokenizer: Any, until: float = 0.25) -> Any:
    """Train a model on right sums until its expected reward is as large as this."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    while exact_reward(model, tokenizer) < until:
        optimizer.zero_grad()
        torch.autograd.backward(-answer_log_prob(model, tokenizer).mean())
        optimizer.step()
    return model
