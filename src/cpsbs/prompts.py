"""Prompts as tokens: plain texts, and conversations that go through a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
"""A conversation: messages with a "role" and a "content", the latest one last."""

Prompt = str | Messages
"""A source to translate or a text to continue; or a conversation for a chat model to answer."""


def prompt_tokens(tokenizer: Any, name: str, texts: Sequence[Prompt]) -> list[list[int]]:
    """Return the tokens of every prompt, with the special tokens that belong to it.

    Args:
        tokenizer: the tokenizer of a transformers model.
        name: the name of the model, for messages.
        texts: the prompts.
    """
    found: list[list[int]] = [[] for _ in texts]
    plain = [i for i, text in enumerate(texts) if isinstance(text, str)]
    chats = [i for i in range(len(texts)) if not isinstance(texts[i], str)]
    # A chat template writes the special tokens itself.
    for numbers, special in ((plain, True), (chats, False)):
        rendered = [_rendered(tokenizer, name, i, texts[i]) for i in numbers]
        if not rendered:
            continue
        try:
            tokens = tokenizer(rendered, add_special_tokens=special).input_ids
        except Exception as error:  # the library behind it has no error classes of its own
            raise ValueError(
                f"the tokenizer of {name} cannot tokenize the texts: {error}"
            ) from error
        for i, own in zip(numbers, tokens, strict=True):
            found[i] = own
    return found


def _rendered(tokenizer: Any, name: str, number: int, prompt: object) -> str:
    """Return a prompt as the text to tokenize; refuse what no tokenizer takes."""
    text = prompt
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        text = _chat_text(tokenizer, name, number, prompt)
    if not isinstance(text, str):
        kind = type(prompt).__name__
        raise ValueError(f"texts[{number}] is a {kind}; it must be a string or a conversation")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"texts[{number}] is not Unicode text: {error}") from error
    return text


def _chat_text(tokenizer: Any, name: str, number: int, messages: Sequence[Any]) -> str:
    """Return a conversation as the tokenizer's chat template writes it, up to the answer."""
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ValueError(
                f"texts[{number}] has {message!r} among its messages; a message must be a "
                'dictionary with a "role" and a "content"'
            )
    if not messages:
        raise ValueError(f"texts[{number}] has no messages; it must have at least one")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"texts[{number}] is a conversation, but the tokenizer of {name} has no chat "
            "template; give texts, or set tokenizer.chat_template"
        )
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template may raise anything
        raise ValueError(
            f"texts[{number}] does not fit the chat template of {name}: {error}"
        ) from error
    return text
