"""Optional packages: they are imported where they are needed, with advice if they are missing."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def required(package: str, extra: str) -> ModuleType:
    """Import a package, or raise an ImportError that says how to install it.

    Args:
        package: the name to import.
        extra: the extra of cpsbs that installs it, as in ``cpsbs[extra]``.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise ImportError(
            f"{package} is not installed; install it with: pip install 'cpsbs[{extra}]'"
        ) from error


def silence_transformers() -> None:
    """Turn off the progress bars and warnings of transformers in this process; errors stay."""
    required("transformers", "transformers")
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    hub_logging.set_verbosity(50)  # an error follows its last retry; the ones before are not shown
