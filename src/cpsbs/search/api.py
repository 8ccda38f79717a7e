"""``search`` and ``search_each``: draw sequences for the sources of one model, or of many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Unpack

import torch

from cpsbs.backends import Backend, backend_for
from cpsbs.designs import DEFAULT_DESIGN, Design, design_named
from cpsbs.models.base import FixedRowModel, SequenceModel, check_model_starts
from cpsbs.randomness import Generators, Streams, fresh_seed
from cpsbs.search import recursion
from cpsbs.search.beams import Beams
from cpsbs.search.parallel import threads_for
from cpsbs.search.recursion import Transition
from cpsbs.search.rehearsal import rehearse
from cpsbs.search.requests import Request, RequestQueue
from cpsbs.search.scheduler import Scheduler
from cpsbs.search.settings import SearchOptions, SearchSettings
from cpsbs.search.turns import Turn, Turns
from cpsbs.threads import map_in_threads

StreamsOfModels = int | torch.Generator | Iterable[Sequence[torch.Generator] | Streams] | None
"""A seed or a generator for all models, or the generators of the sources of each model."""


def search(
    model: SequenceModel,
    k: int,
    design: str | Design = DEFAULT_DESIGN,
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

    A source is one input of the model, such as a sentence to translate or a prompt to continue.

    Args:
        model: the model to draw from; see ``cpsbs.models``.
        k: K ≥ 1, the number of sequences to draw for each source.
        design: how K candidates are selected at every step, by name or as an object; see
            ``cpsbs.designs``.
        max_length: T, the largest number of tokens in a sequence. A sequence that has not ended by
            then is an outcome like any other.
        temperature: τ > 0, with p_τ(y_t | ·) ∝ p(y_t | ·)^{1/τ}. It changes the distribution that
            is sampled from, unlike the annealing of a design.
        nucleus: after each prefix keep only the most probable tokens that make up this much
            probability (the paper uses 0.99), and treat the others as impossible.
        generator: a seed or a generator, from which every source gets a random stream of its own
            by its index; or a list with a generator for each source. Either way a source's draw
            does not depend on what else is in the batch. (There is one exception: with conditional
            Poisson and a K so large and a distribution so flat that the head must grow, the head
            grows for the whole batch.)
        joint: keep joint inclusion probabilities along the path, from which some designs estimate
            their error.
        entropy: keep Σ_t H(p(· | y_<t)) along the path, for Rao–Blackwellised entropy.
        path: keep what was selected at every step.
    """
    settings = SearchSettings(
        k, design_named(design), max_length, temperature, nucleus, joint, entropy, path
    )
    given = [generator] if isinstance(generator, Sequence | Streams) else generator
    return next(search_models([model], settings, given))


def search_each(
    models: Iterable[SequenceModel],
    k: int,
    design: str | Design = DEFAULT_DESIGN,
    *,
    max_length: int,
    generator: StreamsOfModels = None,
    **options: Unpack[SearchOptions],
) -> Iterator[Beams]:
    """Draw K sequences for the sources of many models; the beams come in the models' order.

    On a GPU this is continuous batching: the sources of the next model take the places of sources
    that have ended as soon as all of them fit, so that the GPU stays busy. For that, all models
    must wrap the same transformers model. Put the longest inputs first, and make the first batch as
    large as the memory allows and the others smaller.

    Args:
        models: an iterable; the next model is taken from it and prefilled while the search of
            earlier ones is still running.
        k: as in ``search``.
        design: as in ``search``.
        max_length: as in ``search``.
        generator: a seed or a generator, from which the sources of all models, numbered
            consecutively, get a stream each; or the generators of the sources for each model.
        options: ``temperature``, ``nucleus``, ``joint``, ``entropy`` and ``path``, as in
            ``search``.
    """
    settings = SearchSettings(k, design_named(design), max_length, **options)
    return search_models(models, settings, generator)


def search_models(
    models: Iterable[SequenceModel], settings: SearchSettings, generator: StreamsOfModels
) -> Iterator[Beams]:
    """Draw sequences as the settings say; see ``search_each``."""
    if generator is None or isinstance(generator, torch.Generator):
        generator = fresh_seed(generator)
    elif not isinstance(generator, int | Iterable):
        raise ValueError(
            f"generator is {generator!r}; it must be a seed (an int), a torch.Generator, or a list "
            "with one generator for each source"
        )
    return _beams(RequestQueue(_requests(models, settings, generator)), settings)


def _requests(
    models: Iterable[SequenceModel],
    settings: SearchSettings,
    generator: int | Iterable[Sequence[torch.Generator] | Streams],
) -> Iterator[Request]:
    """Yield a request for each model, with its backend and random streams."""
    seed = generator if isinstance(generator, int) else None
    given = None if isinstance(generator, int) else iter(generator)
    count = 0
    for model in models:
        check_model_starts(model)
        backend = backend_for(model.device)
        if given is None:
            assert seed is not None
            numbers = range(count, count + model.sources)
            streams = Streams.split(seed, numbers, model.device, backend)
            count += model.sources
        else:
            streams = _streams(next(given, None), model, backend)
        name = getattr(model, "name", type(model).__name__)
        label = {**settings.as_record(), "seed": seed, "model": name}
        yield Request(model, streams, backend, label)


def _streams(
    given: Sequence[torch.Generator] | Streams | None, model: SequenceModel, backend: Backend
) -> Streams:
    """Return the streams that were given for a model, if they fit."""
    if given is None:
        raise ValueError(
            "generator has fewer entries than there are models; it must have one for each"
        )
    if isinstance(given, Streams):
        streams = given
    elif isinstance(given, Sequence) and all(isinstance(x, torch.Generator) for x in given):
        streams = Streams(given, model.sources, model.device, backend)
    else:
        raise ValueError(
            f"generator has a {type(given).__name__} for a model; it must have a list with one "
            "generator for each source"
        )
    if streams.rows not in (model.sources, None):
        raise ValueError(
            f"generator has {streams.rows} streams for a model of {model.sources} sources; it must "
            "have one for each source"
        )
    return streams


@torch.no_grad()
def _beams(queue: RequestQueue, settings: SearchSettings) -> Iterator[Beams]:
    """Yield the beams of every request, in the order of the requests."""
    first = queue.peek()
    if first is None:
        return
    device = torch.device(first.model.device)
    threads = threads_for(first.model)
    del first  # so that its buffers are freed as soon as the search is done with them
    if threads > 1 and queue.several():
        turns = Turns()
        taken = map(turns.take, iter(queue.take, None))
        yield from map_in_threads(partial(_searched, settings), taken, threads)
        return
    try:
        yield from _one_after_another(queue, settings, device)
    finally:
        queue.abandon()


def _one_after_another(
    queue: RequestQueue, settings: SearchSettings, device: torch.device
) -> Iterator[Beams]:
    """Yield the beams of every request; on a GPU, later ones join those that are running."""
    progress = _progress(queue, settings)
    goes_on, again = True, False
    while goes_on:
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                goes_on = next(progress, False)
                found = [request.beams(settings) for request in queue.done()]
        except torch.OutOfMemoryError as error:
            if again:
                raise torch.OutOfMemoryError(_too_small(queue.sources, settings, error)) from error
            again, found = True, []
        else:
            again = False
        if again:
            # Outside of the handler, because the error refers to the buffers of the search.
            queue.begin_again()
            backend_for(device).release()
            progress = _progress(queue, settings)
        yield from found


def _too_small(sources: int, settings: SearchSettings, error: Exception) -> str:
    """Return what to say when the memory is too small even with nothing else in it."""
    given = f"{sources} sources with k = {settings.k}; try {sources // 2} at a time"
    if sources <= 1:
        given = f"one source with k = {settings.k} and max_length = {settings.max_length}"
    return f"the GPU's memory is too small for {given} ({error})"


@torch.no_grad()  # which holds for one thread
def _searched(settings: SearchSettings, turn: Turn) -> Beams:
    """Search the sources of a request that no others join, and return what was found."""
    with turn as request:
        recursion.run(request, settings)
        return request.beams(settings)


def _fix_rows(model: FixedRowModel, settings: SearchSettings, request: Request) -> bool:
    """Fix the rows of a model that has started, if that is possible."""
    transition = Transition.of(model, settings, request.backend)
    wait = rehearse(transition, model)
    try:
        return model.fix_rows(settings.k, settings.max_length - 1, request.backend)
    finally:
        wait()


def _progress(queue: RequestQueue, settings: SearchSettings) -> Iterator[bool]:
    """Work through the queue; yield True whenever some sources have ended."""
    while queue.peek() is not None:
        request = queue.begin()
        request.prefill()
        model = request.model
        if isinstance(model, FixedRowModel) and _fix_rows(model, settings, request):
            for _ in Scheduler(request, model, settings).run(queue):
                yield True
        else:
            recursion.run(request, settings)
            yield True
        del request, model
