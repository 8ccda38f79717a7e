"""Rehearses steps on made-up scores, so that kernels are compiled before they are needed.

The first search of a process takes long because a backend compiles kernels, one after another, when
they are first called. Those of the first step, of later steps and of the model do not wait for each
other if each group is called in a thread of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from cpsbs.models.base import FixedRowModel, TypedRowModel
from cpsbs.randomness import Streams
from cpsbs.search.beams import Hypotheses
from cpsbs.search.recursion import Transition


def rehearse(transition: Transition, model: FixedRowModel) -> Callable[[], None]:
    """Let the backend rehearse the steps of a search; return a function that waits until it has.

    Args:
        transition: the steps.
        model: the model, which has started and whose rows are not fixed yet.
    """
    if not isinstance(model, TypedRowModel) or not transition.recordable:
        return lambda: None
    settings, later = transition.settings, model.step_dtype
    device = torch.device(model.device)
    prepared = partial(_prepared, transition, _few(model.sources), model.vocab_size, device)
    steps = [
        partial(prepared, settings.design.roots(settings.k), torch.float32),
        partial(prepared, settings.k, later),
    ]
    key = (transition.key, model.vocab_size, later)
    return transition.backend.rehearse(key, steps)


def _few(sources: int) -> int:
    """Return a small number of sources that makes the compiler choose the same kernels.

    It specialises kernels to sizes that are divisible by 16.
    """
    return sources if sources < 16 else 16 + sources % 16


def _prepared(
    transition: Transition,
    sources: int,
    tokens: int,
    device: torch.device,
    parents: int,
    dtype: torch.dtype,
) -> Callable[[], None]:
    """Return a step from ``parents`` equal hypotheses of each source with random scores."""
    settings, backend = replace(transition.settings, joint=False), transition.backend
    random = torch.Generator(device).manual_seed(0)
    streams = Streams.split(0, sources, device, backend)
    roots = Hypotheses.roots(settings, streams, torch.arange(sources, device=device))
    beam = roots.rebuilt(
        [x[:, :1].repeat(1, parents) if x.ndim == 2 else x for x in roots.tensors()]
    )
    beam = replace(beam, log_prob=beam.log_prob - math.log(parents))
    size = (sources, parents, tokens)
    scores = torch.randn(size, generator=random, device=device).to(dtype)

    def take() -> None:
        backend.close(scores.flatten(0, 1), beam.present, beam.finished)
        transition(beam, scores, streams)

    return take
