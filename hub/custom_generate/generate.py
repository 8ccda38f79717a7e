"""Sampling without replacement for ``model.generate``; the method itself is in the package cpsbs.

model.generate(**inputs, custom_generate="ORG/cpsbs", trust_remote_code=True, num_beams=10)
"""

from __future__ import annotations

from typing import Any

from transformers import GenerationMixin

try:  # transformers would name the package, but not the extra that it needs
    import cpsbs
except ImportError as error:
    raise ImportError(
        "this decoding method is in the package cpsbs, which cannot be imported "
        f"({error}); get it with: pip install 'cpsbs[transformers]'"
    ) from error

LOADING = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
"""Arguments of ``model.generate`` that say how this file is loaded, not how to decode."""


def generate(model: Any, **arguments: Any) -> Any:
    """Draw ``num_beams`` different sequences for each input.

    transformers passes on whatever ``model.generate`` was given. ``cpsbs.generate`` describes the
    arguments that are its own, ``design`` and ``generator``.
    """
    decoding = {name: value for name, value in arguments.items() if name not in LOADING}
    return GenerationMixin.generate(model, custom_generate=cpsbs.generate, **decoding)
