"""Compiles every kernel for a GPU of compute capability 9.0; no GPU is needed for it.

Triton's interpreter accepts what the compiler does not, such as a variable that changes its shape
in a loop.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cpsbs.backends.triton import kernels

TYPES = {
    "*fp64": "head offset again reach partial cosines sines back tail_real tail_imaginary binomials"
    " picked tilts turned probability log_normalizer inverse_temperature lifts log_prob log_total"
    " values log_inclusion new_log_prob new_log_inclusion selected_log_inclusion out"
    " score threshold new_score new_threshold shifted until notes inclusion trace_start"
    " trace_inside trace_share",
    "*i64": "head_index seeds counts index rows found length parent eos new_token new_length tops"
    " position drawn near",
    "*i32": "slot_of bits chosen keys places place order levels sizes ties tied",
    "*i1": "present finished new_present new_finished broken selected",
    "*fp32": "maxima sums",
    "*fp16": "scores states query new_keys new_values mask bias logits x weight factor"
    " first second third gate up hidden normed",
    "i32": "k m slots parents tokens chunks blocks table stride each ends pad capacity sources"
    " heads inner dim q_row q_head nk_row nk_head nv_row nv_head m_row m_head m_place b_row b_head"
    " b_place cos_row kv_heads count step c_row inputs outputs width steps size"
    " first_size second_size third_size segments programs most",
    "fp32": "log_low log_high log_limit scaling eps",
}
"""The types of arguments by their names, which mean the same in nearly all kernels."""

SIZES = {"ODDS": True, "LENGTH": 64, "PLACES": 16, "POINTS": 16, "COINS": 128, "BLOCKS": 4}
"""The constants that several kernels have."""

HALF = dict.fromkeys(("out", "keys", "values"), "*fp16")
ATTENTION = HALF | {"DIM": 64, "PADDED_DIM": 64, "PADDED": 16, "BLOCK": 16}
TREE = HALF | {
    "QUERIES": 16,
    "MEMBERS": 4,
    "PADDED": 4,
    "HALF": 32,
    "BLOCK": 64,
    "PARTS": 1,
    "EARLY": False,
}
TREE |= {"cosines": "*fp16", "sines": "*fp16"}
PRODUCT = {"out": "*fp16", "ROWS": 64, "MORE": 16, "COLUMNS": 128, "DEPTH": 64, "STAGES": 5}
ROWS = {"parents": "*i64", "PADDED": 8}
PERTURBED = {"keys": "*i64", "num_warps": 8}

RANKING = {"GROUP": 16, "RANKED": 32, "SLICE": 256}

STRATIFIED = {"GROUP": 16, "FULL_SHARE": 0.05, "FORBIDDEN": 1e12, "num_warps": 8}

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "attention_programs.own": [
        ATTENTION | {"GROUP": 1, "num_warps": 1},
        ATTENTION | {"GROUP": 4, "bias": None, "num_warps": 2},
    ],
    "attention_programs.shared": [
        ATTENTION | {"GROUP": 1, "QUERIES": 16, "length": "i32", "num_warps": 1},
    ],
    "tree_attention.attend": [
        TREE | {"GROUP": 1, "cosines": None, "sines": None},
        TREE | {"GROUP": 4, "bias": None, "PARTS": 4, "EARLY": True},
    ],
    "few_rows._parts": [
        PRODUCT | {"out": "*fp32"},
        PRODUCT | {"out": "*fp32", "MORE": 0, "COLUMNS": 256, "num_warps": 8},
    ],
    "few_rows._gated": [PRODUCT | {"num_warps": 8}, PRODUCT | {"MORE": 0, "COLUMNS": 64}],
    "few_rows._finish": [{"parts": "*fp32", "PARTS": 4, "BLOCK": 2048}],
    "cache._advance": [ROWS | {"BLOCK": 32}],
    "cache._move": [ROWS | {"BLOCK": 1024, "num_warps": 8}],
    "extending._extend": [{"INCLUSION": True, "PARENTS": 16, "num_warps": 1}],
    "extending._close": [{"BLOCK": 4096}],
    "gumbel._chunk_scores": [PERTURBED],
    "gumbel._choose_chunks": [PERTURBED | {"BLOCK": 8192, "num_warps": 16}],
    "gumbel._member_scores": [PERTURBED | {"GROUP": 16}],
    "gumbel._choose": [PERTURBED | {"BLOCK": 2048}],
    "layers._rms": [{"out": "*fp16", "BLOCK": 2048}],
    "layers._rotate": [{"HALF": 32, "HEADS": 32, "KV_HEADS": 8}],
    "layers._silu": [{"BLOCK": 2048}],
    "logits._add": [{"out": "*fp16", "BLOCK": 4096, "num_warps": 8}],
    "noise._uniform": [{"BLOCK": 1024}],
    "poisson_programs.without_head": [{"GROUP": 16, "TERMS": 8}],
    "poisson_programs.tail": [{"num_warps": 8}],
    "poisson_programs.draw": [{"GROUP": 32, "num_warps": 16}],
    "poisson_programs.inclusion": [{}],
    "reading._read": [{"TERMS": 8, "GROUP": 32, "RUN": 16, "factor": "fp32"}],
    "reading._normalize": [{"BLOCK": 512}],
    "stratified_programs.begin": [{"PARENTS": 16}],
    "stratified_programs.masses": [{}],
    "stratified_programs.draw": [
        STRATIFIED | {"PLACES": 2, "PARENTS": 2, "STRIDE": 1},
        STRATIFIED | {"PLACES": 32, "PARENTS": 8, "STRIDE": 32},
        STRATIFIED | {"PLACES": 8, "PARENTS": 64, "LENGTH": 256, "STRIDE": 1024},
    ],
    "finding._choose": [
        {"HELD": 16384, "GROUPS": 512, "num_warps": 16},
        {"HELD": 32, "GROUPS": 32, "num_warps": 16},
        {"HELD": 0, "GROUPS": 0, "num_warps": 16},
    ],
    "finding._collect": [{"GROUP": 16}, {"LENGTH": 4096, "GROUP": 1}],
    "finding._rank": [RANKING | {"KIND": "odds"}, RANKING | {"KIND": "log-probability"}],
}
"""What each kernel is compiled with, on top of the above or instead of it."""


def kernels_there_are() -> dict[str, Any]:
    """Return all kernels by name: functions for Triton that ask which program they are."""
    found = {}
    for info in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{info.name}")
        for name, value in vars(module).items():
            own = isinstance(value, triton.JITFunction) and value.__module__ == module.__name__
            if own and "tl.program_id(" in value.src:
                found[f"{info.name}.{name}"] = value
    return found


def compile_kernel(name: str) -> list[str]:
    """Compile all variants of a kernel, and return them in PTX."""
    compiled = []
    module, _, function = name.partition(".")
    kernel = getattr(importlib.import_module(f"{kernels.__name__}.{module}"), function)
    types = {name: kind for kind, names in TYPES.items() for name in names.split()}
    for own in VARIANTS[name]:
        given = types | SIZES | own
        constants = {name: given[name] for name in kernel.arg_names if name.isupper()}
        constants |= {name: None for name in kernel.arg_names if given[name] is None}
        signature = {
            name: "constexpr" if name in constants else given[name] for name in kernel.arg_names
        }
        source: Any = ASTSource(kernel, signature, constants)
        options = {"num_warps": own.get("num_warps", 4)}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        compiled.append(str(made.asm["ptx"]))
    return compiled
