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
