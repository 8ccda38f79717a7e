"""The kernels in Triton's interpreter and in its compiler and, where there is one, on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.nvidia.compiler import CUDAOptions

from cpsbs.backends.triton.backend import TRITON
from cpsbs.scores.reading import Chunks
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


def test_kernels_that_are_launched_early_wait(tmp_path: Path) -> None:
    """In a process that finds a card of compute capability 9.0, and compiles for it."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", EARLY], env=environment, text=True, timeout=600,
                          stdout=subprocess.PIPE, check=True)  # fmt: skip
    waits = dict(line.split() for line in done.stdout.splitlines())
    kernels = compiling.kernels_there_are()
    assert set(waits) == {name for name, kernel in kernels.items() if "after_prev" in kernel.src}
    options = {option.name for option in fields(CUDAOptions)}
    assert set(waits.values()) == {"2" if "launch_pdl" in options else "0"}
    for name in waits:
        before, _, _ = kernels[name].src.partition("after_previous()")
        assert "tl.store" not in before


EARLY = """
import torch

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_capability = lambda card: (9, 0)

from tests.backends import compiling

for name in ("few_rows._finish", "few_rows._gated", "few_rows._parts", "tree_attention.attend"):
    for text in compiling.compile_kernel(name)[-1:]:
        print(name, text.count("griddepcontrol"))
"""


def test_more_members_of_chunks_than_are_counted_are_left_to_the_reference() -> None:
    table, offset = torch.zeros(()).expand(1, 36, 32), torch.zeros((1, 36), dtype=torch.float64)
    rows = torch.zeros(()).expand(36, 2**16)
    chunks = Chunks(rows, None, 1.0, 2**11, table, table[None], TRITON)
    assert TRITON.find_largest(chunks, offset, 1100) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    for check in CHECKS:
        check("cuda")
    check_law("cuda", 100_000)
