"""The embedded model as a CTranslate2 model, to compare the engines on the same weights.

CTranslate2's converter for Marian drops the row of ``<pad>`` and starts its decoder from a zero
embedding, as the models of the Marian toolkit do. Ours starts from the embedding of ``<pad>``, so
this loader keeps the row and starts from the token.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from cpsbs.text import TextModel


@cache
def _converter() -> Any:
    """Return the class of the converter; CTranslate2 is imported only when it is asked for."""
    from ctranslate2.converters import Converter
    from ctranslate2.converters.transformers import BartLoader, MarianMTLoader

    class Loader(MarianMTLoader):  # type: ignore[misc]
        """Marian with a decoder that starts from the embedding of a token."""

        set_decoder = BartLoader.set_decoder
        get_vocabulary = BartLoader.get_vocabulary

        def set_config(self, config: Any, model: Any, tokenizer: Any) -> None:
            """Name the special tokens."""
            super().set_config(config, model, tokenizer)
            start = model.config.decoder_start_token_id
            config.decoder_start_token = tokenizer.convert_ids_to_tokens(start)

        def _remove_pad_weights(self, spec: Any) -> None:
            """Keep the row of the padding token."""

    class Converted(Converter):  # type: ignore[misc]
        """Converts a model that is in memory."""

        def __init__(self, text: TextModel) -> None:
            self._text = text

        def _load(self) -> Any:
            return Loader()(self._text.model, self._text.tokenizer)

    return Converted


def convert(text: TextModel, folder: Path) -> None:
    """Write a Marian model into a folder as CTranslate2 reads it, in float32."""
    _converter()(text).convert(str(folder), force=True)
