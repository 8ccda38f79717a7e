"""Tokens are written as text, or as bytes where they are parts of characters."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import cpsbs
from cpsbs.explore.pieces import byte_alphabet, pieces_of


def tokenizer_of(backend: Tokenizer, **special: str) -> Any:
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_object=backend, **special)


def byte_level() -> Any:
    """A tokenizer with a token for every byte, as GPT-2's vocabulary begins with."""
    vocabulary = {character: i for i, character in enumerate(byte_alphabet())}
    vocabulary["Ġthe"] = 256
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return tokenizer_of(backend, eos_token="<end>")


@pytest.mark.parametrize("text", ["naïve café", "日本語", "a\nb", "🚲 ride"])
def test_the_bytes_of_all_tokens_make_up_the_text(text: str) -> None:
    tokenizer = byte_level()
    tokens = tokenizer(text).input_ids
    pieces = pieces_of(tokenizer, tokens)
    parts = [pieces[token] for token in tokens]
    joined = b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in parts)
    assert joined.decode() == text


def test_a_part_of_a_character_is_bytes_and_a_whole_one_text() -> None:
    tokenizer = byte_level()
    first, second = tokenizer("é").input_ids
    assert pieces_of(tokenizer, [first, second]) == {first: [0xC3], second: [0xA9]}
    assert pieces_of(tokenizer, [256]) == {256: " the"}


def test_special_tokens_are_written_by_their_name() -> None:
    tokenizer = byte_level()
    end = tokenizer.eos_token_id
    assert pieces_of(tokenizer, [end]) == {end: "<end>"}


def test_the_byte_alphabet_is_that_of_the_tokenizers_library() -> None:
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_bytes_of_sentencepiece_are_bytes() -> None:
    backend = Tokenizer(models.BPE({"<0xC3>": 0, "<0x41>": 1, "▁Un": 2}, [], byte_fallback=True))
    tokenizer = tokenizer_of(backend)
    assert pieces_of(tokenizer, [0, 1, 2]) == {0: [0xC3], 1: "A", 2: " Un"}


def test_pieces_of_the_embedded_model_make_up_the_text() -> None:
    model = cpsbs.load("en-fr", device="cpu")
    (tokens,) = model.beams(["It's 5 o'clock."], 1, "top-k", max_length=20).tokens(0)
    pieces = pieces_of(model.tokenizer, tokens[:-1])
    assert "".join(str(pieces[t]) for t in tokens[:-1]).strip() == model.decode([tokens])[0]
