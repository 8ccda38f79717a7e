"""Checks of kernels that run in Triton's interpreter, in a process of their own."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest


def in_the_interpreter(check: Callable[[], None]) -> None:
    """It has to be asked for before Triton is imported."""
    pytest.importorskip("triton")
    module, name = check.__module__, check.__name__
    code = f"import torch\nfrom {module} import {name}\n"
    code += f"with torch.no_grad():\n    {name}()\nprint('fine')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "fine\n", done.stderr


def let_the_interpreter_multiply_bfloat16() -> None:
    """Its matrix product takes the bits of a bfloat16 for an integer."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    original = builder.create_dot

    def wide(x: Any) -> Any:
        """In float32, of which a bfloat16 is the upper half."""
        if str(x.dtype.scalar) != "bf16":
            return x
        bits = x.data.astype("uint32") << 16
        return interpreter.TensorHandle(bits.view("float32"), interpreter.tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, wide(a), wide(b), *rest)

    builder.create_dot = create_dot
