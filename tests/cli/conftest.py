"""A small model in a folder, as somebody's own would be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.folders import causal_folder


@pytest.fixture(scope="session")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal model with a tokenizer of words."""
    return causal_folder(tmp_path_factory.mktemp("causal"))
