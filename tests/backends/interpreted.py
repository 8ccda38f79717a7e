"""Runs checks of kernels in Triton's interpreter, in a process of its own.

Triton reads ``TRITON_INTERPRET`` when it is imported, so that the tests' own process, which
compiles kernels, cannot interpret them. The other process imports everything once and then runs one
check after the other: it reads the module and name of a check and its arguments as a line of JSON,
and answers with a line that holds the traceback of a failure, or null.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


class Interpreter:
    """The other process, which is started when it is first asked for something."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, close() closes it

    def run(self, check: Callable[..., None], *args: Any) -> None:
        """Run a check there, and fail if it does."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps([check.__module__, check.__name__, args]), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        failure = json.loads(answer) if answer else f"the process has ended:\n{self._said()}"
        if failure is not None:
            self.stop()  # the next check begins with a clean process
            pytest.fail(failure, pytrace=False)

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__],
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-5000:]

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def close(self) -> None:
        """End the process, and forget what it has said."""
        self.stop()
        self._errors.close()


def answer_checks() -> None:
    """Run the checks named on standard input, and answer on standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a check prints must not be taken for an answer
    for line in sys.stdin:
        module, name, args = json.loads(line)
        failure = None
        try:
            with torch.no_grad():
                getattr(importlib.import_module(module), name)(*args)
        except BaseException:
            failure = traceback.format_exc()
        print(json.dumps(failure), file=answers, flush=True)


def let_the_interpreter_multiply_bfloat16() -> None:
    """Mend its matrix product, which takes the bits of a bfloat16 for an integer."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    original = builder.create_dot
    if original.__module__ == __name__:
        return

    def wide(x: Any) -> Any:
        """In float32, of which a bfloat16 is the upper half."""
        if str(x.dtype.scalar) != "bf16":
            return x
        bits = x.data.astype("uint32") << 16
        return interpreter.TensorHandle(bits.view("float32"), interpreter.tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return original(self, wide(a), wide(b), *others)

    builder.create_dot = create_dot


if __name__ == "__main__":
    answer_checks()
