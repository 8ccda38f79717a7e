"""The kernels in Triton's interpreter and in its compiler and, where there is one, on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from tests.backends import compiling
from tests.backends.checks import CHECKS, check_law
from tests.backends.interpreted import Interpreter


@pytest.mark.parametrize("check", CHECKS)
def test_in_the_interpreter(check: Callable[[str], None], interpreter: Interpreter) -> None:
    interpreter.run(check, "cpu")


@pytest.mark.slow
def test_the_law_in_the_interpreter(interpreter: Interpreter) -> None:
    interpreter.run(check_law, "cpu", 150)


def test_every_kernel_is_compiled() -> None:
    assert set(compiling.kernels_there_are()) == set(compiling.VARIANTS)


@pytest.mark.parametrize("name", compiling.VARIANTS)
def test_they_compile(name: str) -> None:
    """For a GPU that need not be there."""
    compiling.compile_kernel(name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    for check in CHECKS:
        check("cuda")
    check_law("cuda", 100_000)
