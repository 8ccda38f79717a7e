"""Every kernel of a selection compiled for a card; no card is needed for it.

The interpreter takes what the compiler does not, as a variable that changes its shape in a loop.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cpsbs.backends.triton.kernels import (
    closing,
    extending,
    gumbel,
    head,
    noise,
    poisson_programs,
    reading,
)

TYPES = {
    "*fp64": "head offset again reach partial cosines sines back tail_real tail_imaginary binomials"
    " picked tilts turned probability log_normalizer inverse_temperature lifts log_prob log_total"
    " values log_inclusion new_log_prob new_log_inclusion selected_log_inclusion out"
    " score threshold new_score new_threshold",
    "*i64": "head_index seeds counts index rows found length parent eos new_token new_length tops",
    "*i32": "slot_of bits chosen keys near places",
    "*i1": "present finished new_present new_finished broken selected",
    "*fp32": "maxima sums",
    "*fp16": "scores",
    "i32": "k m slots parents tokens chunks blocks table stride each ends pad",
    "fp32": "log_low log_high log_limit",
}
"""Names of arguments, which mean the same in all kernels, but for those below."""

SIZES = {"ODDS": True, "LENGTH": 64, "PLACES": 16, "POINTS": 16, "COINS": 128, "BLOCKS": 4}

KERNELS: list[tuple[Any, dict[str, Any]]] = [
    (closing._close, {"BLOCK": 4096}),
    (reading._read, {"TERMS": 8, "GROUP": 32, "inverse_temperature": "fp32"}),
    (reading._normalize, {"BLOCK": 512}),
    (head._find, {"KIND": "odds"}),
    (poisson_programs.without_head, {"GROUP": 16}),
    (poisson_programs.tail, {}),
    (poisson_programs.draw, {"GROUP": 16}),
    (poisson_programs.inclusion, {}),
    (extending._extend, {"INCLUSION": True, "PARENTS": 16}),
    (gumbel._chunk_scores, {"keys": "*i64"}),
    (gumbel._choose_chunks, {"keys": "*i64", "BLOCK": 8192}),
    (gumbel._member_scores, {"keys": "*i64", "GROUP": 16}),
    (gumbel._choose, {"keys": "*i64", "BLOCK": 2048}),
    (noise._uniform, {"BLOCK": 1024}),
]


def compile_all() -> None:
    """For a card of compute capability 9.0."""
    types = {name: kind for kind, names in TYPES.items() for name in names.split()}
    for kernel, own in KERNELS:
        given = types | SIZES | own
        constants = {name: given[name] for name in kernel.arg_names if name.isupper()}
        signature = {
            name: "constexpr" if name in constants else given[name] for name in kernel.arg_names
        }
        source: Any = ASTSource(kernel, signature, constants)
        triton.compile(source, target=GPUTarget("cuda", 90, 32))


if __name__ == "__main__":
    compile_all()
