"""Compiles the C files of this folder when they are first needed, if there is a C compiler.

The library is kept in the user's cache folder, under a name that depends on the source, the flags
and the processor. Without a compiler, or where anything goes wrong, there is no library, and torch
does the same in more time.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("cpsbs")

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
"""Sums are not reordered, because exponentials rest on the order. ``-ffast-math`` would moreover
make the whole process flush subnormal numbers."""

MOST_TERMS = 4
"""The most power sums that ``read_scores`` computes."""
MOST_SORTED = 64
"""The most candidates that are found and put into order by insertion."""
SECONDS = 60
"""How long the compiler may take."""

LANES = 16
"""The size of a head must be a multiple of this many numbers, and scratch memory is rounded up."""

POINTER, INTEGER, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

ARGUMENTS: dict[str, list[Any]] = {
    "attend": [
        *(POINTER, INTEGER, POINTER, POINTER, INTEGER, POINTER, INTEGER, POINTER, POINTER),
        *(POINTER, INTEGER, INTEGER, INTEGER, INTEGER, REAL),
        *(POINTER, INTEGER, POINTER, POINTER, POINTER),
    ],
    "put": [POINTER, INTEGER, POINTER, INTEGER, POINTER, POINTER, INTEGER, INTEGER, INTEGER],
    "read_scores": [POINTER, INTEGER, INTEGER, INTEGER, INTEGER, REAL, POINTER, POINTER],
    "round_rows": [POINTER, INTEGER, INTEGER, POINTER, POINTER],
    "finish_rows": [POINTER, POINTER, POINTER, POINTER, INTEGER, INTEGER, POINTER],
    "multiplies_bytes": [],
    "multiplies_floats": [],
    "multiply": [POINTER, POINTER, INTEGER, POINTER, POINTER, POINTER],
    "gate_rows": [POINTER, INTEGER, INTEGER, INTEGER, POINTER],
    "extend": [POINTER, POINTER],
    "draw_uniform": [POINTER, INTEGER, POINTER],
    "take_steps": [POINTER],
    "run_layers": [*[POINTER] * 2, INTEGER, *[POINTER] * 4, INTEGER, INTEGER, POINTER],
    "normalize": [POINTER, POINTER, POINTER, POINTER],
    "normalize_rows": [POINTER, POINTER, INTEGER, INTEGER, POINTER],
    "find_largest": [POINTER, INTEGER, POINTER, POINTER],
    "stratified_targets": [POINTER, POINTER],
    "draw_stratified": [POINTER, POINTER, POINTER, POINTER],
    "poisson_laws": [POINTER, POINTER, POINTER],
    "poisson_flips": [*[POINTER] * 3, INTEGER, INTEGER, *[POINTER] * 4],
    "poisson_fill": [*[POINTER] * 4, INTEGER, *[POINTER] * 4],
    "poisson_inclusion": [POINTER, POINTER, POINTER, POINTER, POINTER],
}
"""The types of the arguments of each function."""

RETURNING = (
    *("draw_stratified", "find_largest", "multiplies_bytes", "multiplies_floats", "normalize"),
    *("poisson_fill", "poisson_laws", "stratified_targets", "take_steps"),
)
"""The functions that return whether they can, or could, do what they are asked for, or that there
is too little memory for it."""


class Fields(ctypes.Structure):
    """A structure that keeps alive whatever it holds the addresses of."""

    @classmethod
    def of(cls, **values: Any) -> Fields:
        """Return the structure with these values.

        A tensor or another structure stands for its address, and a list of tensors for the address
        of theirs.
        """
        fields = cls()
        fields.kept = dict[str, Any]()
        fields.replace(**values)
        return fields

    def replace(self, **values: Any) -> None:
        """Set some fields to other values."""
        for name, value in values.items():
            if isinstance(value, Tensor):
                self.kept[name] = value.contiguous()
                value = self.kept[name].data_ptr()
            elif isinstance(value, list):
                pointers = (POINTER * len(value))(*[x.data_ptr() for x in value])
                self.kept[name] = value, pointers
                value = ctypes.addressof(pointers)
            elif isinstance(value, ctypes.Structure):
                self.kept[name] = value
                value = ctypes.addressof(value)
            setattr(self, name, value)


@functools.cache
def library() -> Any | None:
    """Return the compiled functions, or None where there are none; the reason is logged."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    if not compiler or shutil.which(compiler[0]) is None or platform.system() != "Linux":
        log.info("decoding on the CPU uses torch alone: there is no C compiler")
        return None
    try:
        found = ctypes.CDLL(str(_built(compiler)))
        for name, types in ARGUMENTS.items():
            getattr(found, name).argtypes = types
            getattr(found, name).restype = _whether if name in RETURNING else None
    except (OSError, RuntimeError, subprocess.SubprocessError, AttributeError) as error:
        log.info("decoding on the CPU uses torch alone: %s", error)
        return None
    return found


def _whether(returned: int) -> bool:
    """Return what a function says; raise a ``MemoryError`` if it says there is too little."""
    if returned < 0:
        raise MemoryError("there is too little memory for a step of the search")
    return returned > 0


def _built(compiler: list[str]) -> Path:
    """Return the library, compiled now unless it is in the cache folder."""
    sources = sorted(FOLDER.glob("*.c"))
    text = b"".join(path.read_bytes() for path in [*sources, *sorted(FOLDER.glob("*.h"))])
    key = hashlib.sha256(text + repr((compiler, FLAGS, _processor())).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cpsbs"
    library = folder / f"kernels-{key}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Compiled elsewhere and moved, so that no other process ever loads half a file.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / library.name
        command = [*compiler, *FLAGS, *map(str, sources), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
        os.replace(made, library)
    return library


def _processor() -> str:
    """Return what identifies the instructions of this processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))


def attends(dim: int) -> bool:
    """Return whether attention is compiled for heads of this size."""
    return library() is not None and dim % LANES == 0


def address(x: Tensor | None) -> int | None:
    """Return where the numbers of a tensor are, for an argument of a compiled function."""
    return None if x is None else x.data_ptr()


def rows_of(x: Tensor) -> Tensor:
    """Return a matrix whose rows are contiguous, as compiled functions take them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return 128 + x / scale as bytes [n, d], and the scales [n, 1], if there is a library."""
    compiled = library()
    if compiled is None:
        return None
    x = x.contiguous()
    rounded, scale = (
        torch.empty(x.shape, dtype=torch.uint8, device="cpu"),
        torch.empty((len(x), 1), dtype=torch.float32, device="cpu"),
    )
    compiled.round_rows(address(x), *x.shape, address(rounded), address(scale))
    return rounded, scale


def finished_rows(
    product: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor
) -> bool:
    """Write product · scale + bias + residual into ``out``, if there is a library.

    All are [n, d] and contiguous, but the scale is [n, 1] and the bias [d]; ``out`` may be the
    product itself.
    """
    compiled = library()
    if compiled is None:
        return False
    given = [address(x) for x in (product, scale, bias, residual)]
    compiled.finish_rows(*given, *product.shape, address(out))
    return True
