"""Compiled functions that find too little memory raise a ``MemoryError``, wherever it is."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cpsbs.backends.cpu import compiled

FAILING = """
#undef malloc
#include <stdint.h>
#include <stdlib.h>
int64_t left = INT64_MAX;
void *malloc_that_fails(size_t bytes) { return left-- == 0 ? 0 : malloc(bytes); }
"""
"""An allocation that fails once, after a number of others."""

SEARCHES = """
import ctypes
import itertools
import torch
from cpsbs import TransformersModel, search
from cpsbs.backends.cpu.compiled import library
from tests.models.tiny import prompts
from tests.models.wide import wide

model, functions = wide("marian", 2000), library()
left = ctypes.c_int64.in_dll(functions, "left")

def found(design, **options):
    own = TransformersModel(model, **prompts(model))
    return search(own, 5, design, max_length=6, generator=0, **options).log_prob

DESIGNS = ("top-k", "conditional-poisson", "stratified")
for design, nucleus in itertools.product(DESIGNS, (None, 0.99)):
    expected, failed, n = found(design, nucleus=nucleus), 0, -1
    done = False
    while not done:
        n += 1
        left.value = n
        try:
            assert torch.equal(found(design, nucleus=nucleus), expected)
        except MemoryError as error:
            assert "too little memory" in str(error)
            failed += 1
        done = left.value >= 0
    left.value = 2**62
    assert torch.equal(found(design, nucleus=nucleus), expected)
    assert failed == n, (design, failed, n)
    print(design, nucleus, failed)
"""
"""Searches in which every allocation fails in turn. With a nucleus steps are taken one by one."""


def test_too_little_memory_is_an_error_in_python(tmp_path: Path) -> None:
    if compiled.library() is None:
        pytest.skip("there is no C compiler")
    failing = tmp_path / "failing.c"
    failing.write_text(FAILING)
    compiler = [*shlex.split(os.environ.get("CC") or "cc"), "-Dmalloc=malloc_that_fails"]
    own = {
        "CC": shlex.join([*compiler, str(failing)]),
        "XDG_CACHE_HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SEARCHES],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    counts = [int(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(counts) == 6
    assert min(counts) > 3, done.stdout
