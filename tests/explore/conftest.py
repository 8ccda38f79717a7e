"""An explorer of a small model with words for tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

import cpsbs
from cpsbs.explore.explorer import Explorer
from tests.models.folders import causal_folder


@pytest.fixture(scope="session")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Explorer:
    folder: Path = causal_folder(tmp_path_factory.mktemp("causal"))
    return Explorer(cpsbs.load(folder, device="cpu"))
