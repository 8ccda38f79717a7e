"""Kernels that can be compiled without being launched, all that a step needs at the same time.

Triton compiles a kernel when it is first launched, and the next one only when that is done. A step
that is taken inside of ``compiling_only`` launches nothing: its kernels are compiled side by side.

Each is compiled in a thread, and not by ``triton.AsyncCompileMode``, which older versions do not
have: if a compiler fails, perhaps because the user has interrupted it, that mode leaves the error
in the kernel's cache for all later launches.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.errors import OutOfResources

MOST_THREADS = 16
"""The most kernels that are compiled at the same time."""


class _Here(threading.local):
    """What holds for one thread."""

    ask: Callable[..., None] | None = None
    """Calls a function in another thread, if kernels are only compiled here."""


_here = _Here()


class NotWrittenError(Exception):
    """Something depends on what a kernel was to write that has only been compiled."""


class Kernel(triton.JITFunction):  # type: ignore[misc, unused-ignore]
    """A function of Triton's that is only compiled inside of ``compiling_only``."""

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """Launch the kernel, or let it be compiled."""
        if (ask := _here.ask) is None:
            return super().run(*args, grid=grid, warmup=warmup, **kwargs)
        return ask(super().run, *args, grid=grid, warmup=True, **kwargs)


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Do what ``triton.jit`` does, for functions that the host launches."""

    def made(function: Callable[..., Any]) -> Any:
        found: Any = triton.jit(function, **options)
        if isinstance(found, triton.JITFunction):  # and not what an interpreter runs
            found.__class__ = Kernel
        return found

    return made if function is None else made(function)


@contextmanager
def compiling_only(indices: bool = False) -> Iterator[None]:
    """Compile the kernels that this thread would launch; all can be launched when this ends.

    What the kernels would have written is zero.

    Args:
        indices: allow operations that take indices. No kernel may have written these.

    Raises:
        NotWrittenError: if an operation is given indices, which may be wrong.
        Exception: what the compiler has raised. The kernel is compiled again when it is launched.
    """
    found = list[Future[Any]]()

    def ask(*args: Any, **kwargs: Any) -> None:
        found.append(threads.submit(_compiled, *args, **kwargs))
        # Triton hashes its own files once, but if several threads come at once, each does so.
        wait(found[:1])

    device = torch.cuda.current_device() if torch.cuda.is_available() else -1  # -1: no change
    with (
        ThreadPoolExecutor(
            min(MOST_THREADS, os.cpu_count() or 1),
            initializer=torch.cuda.set_device,
            initargs=(device,),
        ) as threads,
        _Unwritten(indices),
    ):
        _here.ask = ask
        try:
            yield
        finally:
            _here.ask = None
    for kernel in found:
        kernel.result()


def _compiled(run: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Compile a kernel and what launches it, which is a C program of its own in some versions."""
    made = run(*args, **kwargs)
    with suppress(OutOfResources):  # the launch says so again
        made.run  # noqa: B018  (it is made when it is first asked for)


class _Unwritten(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Fills new memory with zeros, and raises where an operation is given indices.

    They may come from what was not written, and a GPU that is given an index too large serves no
    further call of the process.
    """

    def __init__(self, indices: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._indices = indices

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            given = argument.name in ("index", "indices") and not isinstance(value, int)
            if given and not self._indices:
                raise NotWrittenError(f"{func} is given indices")
        made = func(*args, **(kwargs or {}))
        return made.zero_() if "empty" in func.overloadpacket.__name__ else made
