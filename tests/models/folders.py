"""Folders such as transformers saves, of tiny models with a tokenizer of words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from tests.models import tiny

WORDS = ["the", "a", "dog", "cat", "sees", "eats", "red", "old", "house", "and", "one", "two"]


def causal_folder(folder: Path) -> Path:
    """A GPT-2 of 64 positions."""
    return _saved(tiny.gpt2(len(WORDS) + 3), folder)


def _saved(model: Any, folder: Path) -> Path:
    names = ["<pad>", "</s>", "<unk>", *WORDS]
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model.save_pretrained(folder)
    return folder
