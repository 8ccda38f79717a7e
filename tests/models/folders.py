"""Folders such as transformers saves, of tiny models with a tokenizer of words."""

from __future__ import annotations

import json
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
    """A GPT-2 of 64 positions, with the same weights every time."""
    return tiny_folder(folder, "gpt2")


def encoder_folder(folder: Path) -> Path:
    """A BERT without a head."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return _saved(BertModel(BertConfig(vocab_size=len(WORDS) + 3, **sizes)), folder)


def tiny_folder(folder: Path, kind: str) -> Path:
    """One of the models in ``tiny.MODELS``, with the same weights every time."""
    return _saved(tiny.make(kind, len(WORDS) + 3), folder)


def with_settings(folder: Path, file: str, **changes: Any) -> Path:
    """Change some entries of a JSON file in the folder."""
    path = folder / file
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(settings | changes))
    return folder


def hub_cache(folder: Path, cache: Path, name: str) -> Path:
    """Lay out a folder as the hub's cache does, links and all; return the snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("a" * 40)
    for place in (repository / "refs", repository / "blobs", snapshot):
        place.mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    for file in folder.iterdir():
        blob = repository / "blobs" / file.name
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(blob)
    return snapshot


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
