"""Several steps of a search in one compiled call (``steps.c``).

The recursion is that of ``cpsbs.search.recursion.run``, with the compiled functions that are called
one by one elsewhere and with the same random numbers, so that a seed gives the same sequences.
Python, of which only one thread at a time can run, has little to do: several searches keep several
cores busy, and a search of few hypotheses is several times faster.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cpsbs.backends.base import MOST_DRAWN, CompiledDecoder, StepPlan, StepsTaken
from cpsbs.backends.cpu import poisson
from cpsbs.backends.cpu.compiled import (
    INTEGER,
    MOST_SORTED,
    MOST_TERMS,
    POINTER,
    Fields,
    address,
    library,
)
from cpsbs.randomness import Streams

RULES = ("largest", "conditional-poisson", "stratified")
"""The kinds of ``Rule``, in the order of the enumeration in ``steps.c``."""

STATE = ("start", "inside", "share")
"""What stratified sampling keeps with a hypothesis, in the order of ``steps.c``."""

PARTS = ("reading", "selection", "extension", "model")
"""What a step consists of, in the order of the enumeration in ``steps.c``."""

MOST_WORK = 2**34
"""The most multiplications of a call, which cannot be interrupted; they take about a second."""

MOST_STEPS = 32
"""The most steps of a call, because memory is set aside for what it returns."""

STATE_BYTES = 5056
"""The size of the state of a ``torch.Generator`` as ``random.c`` knows it."""


class _Search(Fields):
    """Mirrors the structure ``search`` of ``steps.c``, field by field."""

    _fields_ = (
        *(("model", POINTER), ("cache", POINTER), ("rule", INTEGER)),
        *(("full_share", ctypes.c_double), ("design", POINTER), ("random", POINTER)),
        *((name, INTEGER) for name in ("sources", "k", "tokens", "length", "terms")),
        *((name, INTEGER) for name in ("pad", "most")),
        *(("temperature", ctypes.c_double), ("ends", POINTER), ("number", INTEGER)),
        *((name, POINTER) for name in ("token", "longer", "parent", "log_prob", "inclusion")),
        *((name, POINTER) for name in ("finished", "present", "state")),
        *((name, POINTER) for name in ("scores", "into", "row")),
        *((name, POINTER) for name in ("parents", "words", "trace")),
        *(("passed", INTEGER), ("count", INTEGER), ("scratch", POINTER)),
        ("seconds", ctypes.c_double * len(PARTS)),
    )


def can_take(plan: StepPlan, sources: int, streams: Streams) -> bool:
    """Return whether compiled functions can select by this rule and draw from these streams."""
    k, kind, terms = plan.k, plan.rule.kind, plan.power_sums
    if streams.counters is not None or not streams.separate or terms > MOST_TERMS:
        return False
    generators: Any = streams.generator
    if len({id(generator) for generator in generators}) < len(generators):
        return False  # sources that share one draw in turns
    if kind == "conditional-poisson":
        fits = poisson.draws(sources, k, k * plan.vocab_size, terms)
    else:
        fits = k <= (MOST_SORTED if kind == "largest" else MOST_DRAWN) and k < k * plan.vocab_size
    return fits and draws_like_torch()


def take(
    compiled: Any,
    plan: StepPlan,
    decoder: CompiledDecoder,
    beam: Any,
    scores: Tensor,
    streams: Streams,
    most: int,
) -> StepsTaken:
    """Take steps; see ``Backend.take_steps``."""
    shape, kind = beam.token.shape, plan.rule.kind
    sources, k = shape
    most = min(most, MOST_STEPS, MOST_WORK // (sources * k * decoder.multiplications))
    scores, into = scores.contiguous(), decoder.room_for_scores(sources * k)
    # Copies, which are overwritten.
    token, longer, log_prob, finished, present = (
        x.clone() for x in (beam.token, beam.length, beam.log_prob, beam.finished, beam.present)
    )
    inclusion = None if beam.log_inclusion is None else beam.log_inclusion.clone()
    row, parent = torch.empty((2, *shape), dtype=torch.int64, device="cpu")
    parents, words = torch.empty((2, most, *shape), dtype=torch.int64, device="cpu")
    state, trace, design = None, None, None
    if kind == "stratified":
        state = torch.stack([beam.state[name] for name in STATE])
        trace = torch.empty((most, *shape, len(STATE)), dtype=torch.float32, device="cpu")
    if kind == "conditional-poisson":
        odds = plan.rule.odds
        design = poisson.design_fields(k, k * plan.vocab_size, plan.power_sums, odds)
    generators: Any = streams.generator
    bits = [generator.get_state() for generator in generators]
    model, cache, scratch = decoder.begin(sources * k, most + 1)
    search: Any = _Search.of(
        model=model,
        cache=cache,
        rule=RULES.index(kind),
        full_share=plan.rule.full_share,
        design=design,
        random=bits,
        sources=sources,
        k=k,
        tokens=plan.vocab_size,
        length=plan.chunk_length,
        terms=plan.power_sums,
        pad=plan.pad,
        most=most,
        temperature=plan.temperature,
        ends=plan.ends,
        number=plan.ends.shape[0],
        token=token,
        longer=longer,
        parent=parent,
        log_prob=log_prob,
        inclusion=inclusion,
        finished=finished,
        present=present,
        state=state,
        scores=scores,
        into=into,
        row=row,
        parents=parents,
        words=words,
        trace=trace,
        scratch=scratch,
    )
    selected = compiled.take_steps(ctypes.addressof(search))
    for generator, after in zip(generators, bits, strict=True):
        generator.set_state(after)
    decoder.end(search.count)
    done = search.passed
    return StepsTaken(
        parents=parents[:done],
        tokens=words[:done],
        trace=None if trace is None else trace[:done],
        beam=replace(
            beam,
            token=token,
            length=longer,
            log_prob=log_prob,
            finished=finished,
            present=present,
            state={} if state is None else dict(zip(STATE, state, strict=True)),
            log_inclusion=inclusion,
        ),
        parent=parent if selected else None,
        scores=into[: search.count] if done else scores,
        row=row,
        seconds=dict(zip(PARTS, search.seconds, strict=True)),
    )


@functools.cache
def draws_like_torch() -> bool:
    """Return whether the state of a generator is what ``random.c`` takes it for."""
    generator, compiled = torch.Generator().manual_seed(1), library()
    bits, found = generator.get_state(), torch.empty(1000, dtype=torch.float64, device="cpu")
    if compiled is None or bits.numel() != STATE_BYTES:
        return False
    for count in (1, 999, 500):  # past the end of the state, which holds 312 numbers
        compiled.draw_uniform(address(bits), count, address(found))
        wanted = torch.empty(count, dtype=torch.float64, device="cpu").uniform_(generator=generator)
        if not torch.equal(found[:count], wanted) or not torch.equal(bits, generator.get_state()):
            return False
    return True
