"""Folders such as transformers saves, of tiny models with a tokenizer of words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from tests.models import tiny

WORDS = ["the", "a", "dog", "cat", "sees", "eats", "red", "old", "house", "and", "one", "two"]


def causal_folder(folder: Path) -> Path:
    """A GPT-2 of 64 positions."""
    return _saved(tiny.gpt2(len(WORDS) + 3), folder)


def encoder_folder(folder: Path) -> Path:
    """A BERT without a head."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return _saved(BertModel(BertConfig(vocab_size=len(WORDS) + 3, **sizes)), folder)


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
