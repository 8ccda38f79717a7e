"""The process in which kernels are interpreted, one for each worker of pytest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.backends.interpreted import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Triton's interpreter, or skip the test if there is no Triton."""
    pytest.importorskip("triton")
    with contextlib.closing(Interpreter()) as process:
        yield process
