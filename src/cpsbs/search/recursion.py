"""The recursion: Y_0 = {BOS}; Y_t = K of (Y_{t−1} ∘ V), picked by a design; return Y_T.

Everything is written for B sources at once: ``runs`` has the loop, ``step`` what is done in it, and
which of the model's rows belong to which hypotheses is the business of ``rows``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from cpsbs.backends import Backend, backend_for
from cpsbs.designs import Design, design_named
from cpsbs.models.base import SequenceModel
from cpsbs.randomness import Generators, Streams, fresh_seed
from cpsbs.search.beams import Beams
from cpsbs.search.loop import Plan, Run, Task, Tasks, collected

LEAST_TEMPERATURE = 1e-20
"""Scores that are divided by less than this overflow in float32."""


def search(
    model: SequenceModel,
    k: int,
    design: str | Design = "conditional-poisson",
    *,
    max_length: int,
    temperature: float = 1.0,
    nucleus: float | None = None,
    generator: Generators | Streams | int = None,
    joint: bool = False,
    entropy: bool = False,
    path: bool = False,
) -> Beams:
    """Draw K sequences for each of the model's sources.

    Args:
        model: see ``cpsbs.models``.
        k: K ≥ 1.
        design: by name or as an object; see ``cpsbs.designs``.
        max_length: T, the most tokens of a sequence.
        temperature: τ > 0 of the model, p_τ(y_t | ·) ∝ p(y_t | ·)^{1/τ}. The design's annealing is
            another thing.
        nucleus: keep, after each prefix, only the most probable tokens that make up this much of
            the mass (the paper uses 0.99); the rest is as if it had probability zero.
        generator: a seed or a generator, from which every source gets a stream of its own, by its
            number; or a generator for each source. Either way a source's draw does not depend on
            what else is in the batch (but for conditional Poisson with so large a K and so flat a
            distribution that a source of the batch makes more of all candidates be looked at one by
            one).
        joint: keep the joint inclusion probabilities along the path, for error bars.
        entropy: keep Σ_t H(p(· | y_<t)) along the path, for the Rao–Blackwellised entropy.
        path: keep every step.
    """
    given = [generator] if isinstance(generator, Sequence | Streams) else generator
    found = search_each(
        [model],
        k,
        design,
        max_length=max_length,
        temperature=temperature,
        nucleus=nucleus,
        generator=given,
        joint=joint,
        entropy=entropy,
        path=path,
    )
    return next(found)


def search_each(
    models: Iterable[SequenceModel],
    k: int,
    design: str | Design = "conditional-poisson",
    *,
    max_length: int,
    temperature: float = 1.0,
    nucleus: float | None = None,
    generator: int | torch.Generator | Iterable[Sequence[torch.Generator] | Streams] | None = None,
    joint: bool = False,
    entropy: bool = False,
    path: bool = False,
) -> Iterator[Beams]:
    """``search`` for many models, one after the other; the beams come in their order.

    On a GPU the sources of the next models take the places of sources that have ended, as soon as
    there are as many as the next model has, so that a long list goes through without gaps. It
    should hold one transformers model with inputs that get shorter, the first ones as many as the
    memory has room for, the others fewer at a time.

    Args:
        models: the next one is made and started while the ones before it go on.
        k: K ≥ 1.
        design: by name or as an object.
        max_length: T.
        temperature: τ.
        nucleus: truncation, if any.
        generator: a seed or a generator, from which all sources, counted through, get a stream
            each; or the generators of the sources for each model.
        joint: keep joint inclusion probabilities.
        entropy: keep entropies.
        path: keep every step.
    """
    chosen = design_named(design)
    check_settings(k, max_length, temperature, nucleus)
    plan = Plan(chosen, k, max_length, temperature, nucleus, joint, entropy, path)
    if generator is None or isinstance(generator, torch.Generator):
        generator = fresh_seed(generator)
    settings = {
        "design": repr(chosen),
        "k": k,
        "temperature": temperature,
        "nucleus": nucleus,
        "max_length": max_length,
        "seed": generator if isinstance(generator, int) else None,
    }
    return _beams(Tasks(_tasks(models, generator, settings)), plan)


def _tasks(
    models: Iterable[SequenceModel],
    generator: int | Iterable[Sequence[torch.Generator] | Streams],
    settings: Mapping[str, Any],
) -> Iterator[Task]:
    """The models with their streams of random numbers."""
    given = None if isinstance(generator, int) else iter(generator)
    count = 0
    for model in models:
        if not hasattr(model, "start"):
            raise ValueError(
                f"model is a {type(model).__name__}, which has no start(); "
                "a model of transformers goes into TransformersModel(model, **inputs)"
            )
        backend = backend_for(model.device)
        if isinstance(generator, int):
            numbers = range(count, count + model.sources)
            streams = Streams.split(generator, numbers, model.device, backend)
            count += model.sources
        else:
            assert given is not None
            streams = _streams(next(given, None), model, backend)
        name = getattr(model, "name", type(model).__name__)
        yield Task(model, streams, backend, {**settings, "model": name})


def _streams(
    given: Sequence[torch.Generator] | Streams | None, model: SequenceModel, backend: Backend
) -> Streams:
    if given is None:
        raise ValueError("generator has fewer entries than there are models")
    if isinstance(given, Streams):
        streams = given
    elif isinstance(given, Sequence):
        streams = Streams(given, model.sources, model.device, backend)
    else:
        raise ValueError(
            f"generator has a {type(given).__name__} for a model; it must have a list of them, one "
            "for each source"
        )
    if streams.rows not in (model.sources, None):
        raise ValueError(
            f"generator has {streams.rows} streams for a model of {model.sources} sources"
        )
    return streams


@torch.no_grad()
def _beams(tasks: Tasks, plan: Plan) -> Iterator[Beams]:
    """Of every task, in their order."""
    first = tasks.next()
    if first is None:
        return
    device, sources = torch.device(first.model.device), first.model.sources
    del first  # its buffers are not to be kept longer than it needs them
    progress = _progress(tasks, plan)
    goes_on = True
    while goes_on:
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                goes_on = next(progress, False)
                found = [collected(task, plan) for task in tasks.done()]
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"the GPU's memory is too small for {sources} sources with k = {plan.k}; "
                f"try {max(1, sources // 2)} at a time ({error})"
            ) from error
        yield from found


def _progress(tasks: Tasks, plan: Plan) -> Iterator[bool]:
    """True whenever some sources are through."""
    while tasks.next() is not None:
        for _ in Run(plan, tasks.begin()).go(tasks):
            yield True


def check_settings(k: int, max_length: int, temperature: float, nucleus: float | None) -> None:
    """Refuse what no search can have."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k is {k!r}; allowed are integers from 1 on")
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}; it must be at least 1")
    if not LEAST_TEMPERATURE <= temperature < math.inf:
        raise ValueError(
            f"temperature is {temperature}; allowed are finite numbers from {LEAST_TEMPERATURE} on "
            "(for the most probable sequences, use the design 'top-k')"
        )
    if nucleus is not None and not 0 < nucleus <= 1:
        raise ValueError(f"nucleus is {nucleus}; allowed are numbers above 0, up to 1, and None")
