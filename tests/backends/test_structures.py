"""Structures that are written in C and again in Python have the same fields in the same places."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from collections.abc import Iterator

import pytest

from cpsbs.backends.cpu import compiled, extending, poisson, products, steps, stratified, tables
from cpsbs.models.transformers.direct import compiled_decoder, compiled_layers, layers

STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "cache": compiled_decoder._Cache,
    "decoder": compiled_decoder._Decoder,
    "design": poisson._Design,
    "drawn": stratified._Drawn,
    "extension": extending._Extension,
    "law": poisson._Law,
    "layer": compiled_layers._Layer,
    "norm": layers.NormFields,
    "places": compiled_layers._Places,
    "product": products._Product,
    "scores": tables.Scores,
    "search": steps._Search,
    "stack": compiled_layers._Stack,
    "stratified": stratified._Stratified,
    "table": compiled_layers._Table,
}
"""The structures in Python, by their names in C."""

KINDS = {ctypes.c_double: 1, ctypes.c_int64: 2}
"""Numbers for the kinds of fields, all others of which count as 0."""

CHECKS = """
#include <stddef.h>
#include "steps.c" /* which includes all headers with structures */
#define KIND(x) _Generic(x, double: 1, int64_t: 2, default: 0)
"""


def _all_below(kind: type[ctypes.Structure]) -> Iterator[type[ctypes.Structure]]:
    for below in kind.__subclasses__():
        yield below
        yield from _all_below(below)


def test_all_structures_are_compared() -> None:
    every = {kind for kind in _all_below(ctypes.Structure) if kind.__module__.startswith("cpsbs.")}
    assert every - {compiled.Fields} == set(STRUCTURES.values())


@pytest.mark.parametrize("name", STRUCTURES)
def test_the_compiler_finds_the_fields_where_python_writes_them(name: str) -> None:
    if compiled.library() is None:
        pytest.skip("there is no C compiler")
    structure = STRUCTURES[name]
    wanted = {f"sizeof({name})": ctypes.sizeof(structure)}
    for field, kind, *_ in structure._fields_:
        wanted[f"offsetof({name}, {field})"] = getattr(structure, field).offset
        wanted[f"KIND((({name} *)0)->{field})"] = KINDS.get(kind, 0)
    _check(wanted)


def _check(wanted: dict[str, int]) -> None:
    """Let the compiler check that constants of C have these values."""
    checks = (f'_Static_assert({x} == {n}, "{x} is not {n}");' for x, n in wanted.items())
    compiler = shlex.split(os.environ.get("CC") or "cc")
    done = subprocess.run(
        [*compiler, "-fsyntax-only", "-I", str(compiled.FOLDER), "-x", "c", "-"],
        input=CHECKS + "\n".join(checks),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
