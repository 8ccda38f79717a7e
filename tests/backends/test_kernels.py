"""The kernels, in Triton's interpreter and, where there is one, on a card."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.parametrize("what", ["numbers", pytest.param("law", marks=pytest.mark.slow)])
def test_in_the_interpreter(what: str) -> None:
    """In a process whose Triton interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.backends.checks", what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_they_compile(tmp_path: Path) -> None:
    """In a process of its own, which finds nothing that was compiled before."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.backends.compiling"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_card() -> None:
    from tests.backends.checks import CHECKS, check_law

    for check in CHECKS:
        check("cuda")
    check_law("cuda", 100_000)
