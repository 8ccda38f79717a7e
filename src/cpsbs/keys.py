"""Ready-made keys for ``cpsbs.answers``; they live in ``cpsbs.decisions.keys``."""

from cpsbs.decisions.keys import (
    choice,
    first_line,
    json_field,
    meaning,
    number,
    pattern,
    text,
    word_embeddings,
)

__all__ = [
    "choice",
    "first_line",
    "json_field",
    "meaning",
    "number",
    "pattern",
    "text",
    "word_embeddings",
]
