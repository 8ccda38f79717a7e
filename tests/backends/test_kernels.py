"""The kernels in Triton's interpreter and in its compiler and, where there is one, on a GPU."""

from __future__ import annotations

import os
import re
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
    """In a process that finds a card of compute capability 9.0, and compiles for it.

    Before they wait they write nothing. Attention reads what is older than the kernel before it,
    and the others read nothing.
    """
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", EARLY], env=environment, text=True, timeout=600,
                          stdout=subprocess.PIPE, check=True)  # fmt: skip
    found = {name: counts for name, *counts in map(str.split, done.stdout.splitlines())}
    kernels = compiling.kernels_there_are()
    assert set(found) == {name for name, kernel in kernels.items() if "after_prev" in kernel.src}
    options = {option.name for option in fields(CUDAOptions)}
    for name, (waits, writes, reads) in found.items():
        assert waits == ("2" if "launch_pdl" in options else "0"), name
        assert writes == "0", name
        assert reads == "0" or name == "tree_attention.attend", name
    _, early, _ = kernels["tree_attention.attend"].src.split("after_previous()")
    assert set(re.findall(r"tl\.load\((\w+)", early)) == {"position", "table"}


EARLY = """
import torch

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_capability = lambda card: (9, 0)

from tests.backends import compiling

for name in ("few_rows._finish", "few_rows._gated", "few_rows._parts", "tree_attention.attend"):
    text = compiling.compile_kernel(name)[-1]
    before, wait, _ = text.partition("griddepcontrol.wait")
    before = before if wait else ""
    reads = before.count("ld.global") + before.count("cp.async")
    print(name, text.count("griddepcontrol"), before.count("st.global"), reads)
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
