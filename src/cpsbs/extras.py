"""Packages that not everyone needs."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def required(package: str, extra: str) -> ModuleType:
    """Import a package, or say how to get it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise ImportError(
            f"{package} is not installed; get it with: pip install 'cpsbs[{extra}]'"
        ) from error


def silence_transformers() -> None:
    """No progress bars and warnings of transformers in this process; errors are raised anyhow."""
    required("transformers", "transformers")
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    hub_logging.set_verbosity(50)  # its retries are told once, when they are over
