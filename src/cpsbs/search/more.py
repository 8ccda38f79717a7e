"""``more`` and ``until``: further sequences, none of which was found before."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cpsbs.backends import backend_for
from cpsbs.designs import DEFAULT_DESIGN, Design, design_named
from cpsbs.models.base import SequenceModel, check_model_starts
from cpsbs.randomness import Generators, Streams, fresh_seed, round_seed
from cpsbs.search.beams import Beams
from cpsbs.search.rounds import Rounds
from cpsbs.search.settings import SearchSettings

DEFAULT_MOST = 1000
"""The default for the largest number of sequences that ``until`` draws for a source."""

Progress = Callable[[Tensor], None]
"""Called after each round with [B] the captured probability of every source, on the CPU."""


def more(
    model: SequenceModel,
    beams: Beams,
    k: int,
    design: str | Design | None = None,
    *,
    generator: Generators | int = None,
    joint: bool = False,
    entropy: bool | None = None,
) -> Beams:
    """Draw K further sequences for each source, none of which is in the beams.

    They are drawn from the residual distribution: the model's, given that the sequence is none of
    those that are held. The result has all sequences, the old ones and the new ones, the most
    probable first. The old ones count as picked with certainty, with the weight p(y); the new ones
    have the design's weights, times the probability that the old ones leave. The weights are
    unbiased together, whatever the old sequences are and however they were found, also by beam
    search: only the new ones are random, given the old. Where nothing is left, the result holds
    everything there is, and estimates from it are exact; where fewer than K sequences are left,
    places stay empty.

    The model evaluates the prefixes of the old sequences again, one row for each, and is then
    searched; ``until`` goes on from round to round without the first part.

    Deciding whether to draw more by looking at what the latest draw has captured biases the
    estimate a little, because the decision then depends on that draw; see ``until``.

    Args:
        model: the model that the beams were drawn from, with the same sources. It is started again.
        beams: the result of ``search``, of ``until`` or of this function. Temperature, nucleus and
            maximal length are theirs.
        k: K ≥ 1, the number of sequences to add for each source.
        design: how they are drawn, by name or as an object; by default as those of the beams. It
            must be one without replacement. With one that has no weights, such as "top-k", the
            result has none either.
        generator: as in ``search``. A seed may be the one that the beams were drawn with; every
            round makes other random numbers of it.
        joint: keep the joint inclusion probabilities of the new sequences, from which some designs
            estimate their error.
        entropy: keep Σ_t H(p(· | y_<t)) along the path of all sequences, for Rao–Blackwellised
            entropy; by default if the beams have it.
    """
    if not isinstance(beams, Beams):
        raise ValueError(f"beams is a {type(beams).__name__}; it must be the result of a search")
    made = beams.settings
    missing = [name for name in ("max_length", "temperature", "nucleus") if name not in made]
    if missing:
        raise ValueError(
            f"beams.settings has no {', '.join(missing)}; pass beams that a search of cpsbs made"
        )
    given = beams.made_by if design is None else design
    if given is None:
        raise ValueError(
            "design is None, and the beams do not know theirs; it must be a design without "
            f"replacement, such as {DEFAULT_DESIGN!r}"
        )
    keeps = beams.entropy is not None if entropy is None else entropy
    settings = SearchSettings(
        k,
        design_named(given),
        made["max_length"],
        made["temperature"],
        made["nucleus"],
        joint,
        keeps,
    )
    refuse_replacement(settings.design)
    check_model_starts(model)
    if len(beams) != model.sources:
        raise ValueError(
            f"beams has {len(beams)} sources; it must have those of the model, {model.sources}"
        )
    seed, streams = round_streams(model, generator)
    return draw_more(model, beams, settings, seed, streams)


def until(
    model: SequenceModel,
    mass: float = 0.95,
    k: int = 10,
    design: str | Design = DEFAULT_DESIGN,
    *,
    most: int = DEFAULT_MOST,
    max_length: int,
    temperature: float = 1.0,
    nucleus: float | None = None,
    generator: Generators | int = None,
    joint: bool = False,
    entropy: bool = False,
    progress: Progress | None = None,
) -> Beams:
    """Draw K sequences at a time until those found have a given probability together.

    No sequence is drawn twice. A source is done when its sequences have captured ``mass``, when
    nothing is left, or when it has ``most`` sequences, and then no longer takes part.

    *The latest round is drawn after the target is reached.* If a source stopped as soon as its
    draw has captured enough, it would keep the draws that captured much and draw again after those
    that captured little: the weights of that last draw would be biased. So a source whose captured
    probability has reached the target draws one more round, decided on before that round is drawn,
    and then stops. The weights of the result are exactly unbiased. They are those of ``more``: p(y)
    for all rounds but the latest. A design without weights, such as "top-k", stops at once.

    Args:
        model: the model to draw from; see ``cpsbs.models``. It is started once in every round.
        mass: the probability to capture, above 0 and at most 1. With 1, rounds go on until nothing
            is left.
        k: K ≥ 1, the number of sequences of a round.
        design: how they are drawn, by name or as an object. It must be one without replacement.
        most: the largest number of sequences for a source.
        max_length: as in ``search``.
        temperature: as in ``search``.
        nucleus: as in ``search``.
        generator: as in ``search``. With a seed, the first round is the draw of ``search`` with
            that seed, and the others are those of ``more`` with the same seed.
        joint: as in ``more``.
        entropy: as in ``search``.
        progress: a function that is called after each round with the captured probability [B] of
            every source.

    Returns:
        All sequences, the most probable first. Sources may have different numbers of them; places
        after the last one are empty.
    """
    settings = SearchSettings(
        k, design_named(design), max_length, temperature, nucleus, joint, entropy
    )
    refuse_replacement(settings.design)
    check_target(mass, most)
    check_model_starts(model)
    seed, streams = round_streams(model, generator)
    return draw_until(model, settings, mass, most, seed, streams, progress)


def check_target(mass: float, most: int) -> None:
    """Raise a ValueError if ``until`` cannot aim at this."""
    if not 0 < mass <= 1:
        raise ValueError(f"mass is {mass}; it must be above 0 and at most 1")
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ValueError(f"most is {most!r}; it must be an integer of at least 1")


RoundStreams = Callable[[int], Streams]
"""From the number of a round, which is 1 for the first, to its random streams."""


def round_streams(
    model: SequenceModel, generator: Generators | int, numbers: Sequence[int] | None = None
) -> tuple[int | None, RoundStreams]:
    """Return the seed, if there is one, and the streams of every round.

    Args:
        model: the model, whose sources get a stream each.
        generator: as in ``search``.
        numbers: the numbers of the sources' streams, by default 0, 1, …
    """
    device = torch.device(model.device)
    backend = backend_for(device)
    if isinstance(generator, Sequence):
        given = generator
        return None, lambda _: Streams(given, model.sources, device, backend)
    seed = generator if isinstance(generator, int) else fresh_seed(generator)
    own = range(model.sources) if numbers is None else numbers
    return seed, lambda number: Streams.split(round_seed(seed, number), own, device, backend)


def draw_more(
    model: SequenceModel,
    beams: Beams,
    settings: SearchSettings,
    seed: int | None,
    streams: RoundStreams,
) -> Beams:
    """Draw as ``more`` does, with all settings in one value."""
    rounds = Rounds(model, settings)
    rounds.give(beams)
    number = int(beams.settings.get("rounds", 1)) + 1
    active = rounds.log_left > -math.inf
    if bool(active.any()):
        rounds.draw(settings.k, streams(number), active, hold=settings.entropy)
    label = {
        **beams.settings,
        "design": repr(settings.design),
        "seed": _both(beams.settings, seed),
        "model": _name(model),
        "rounds": number,
    }
    return rounds.beams(label, beams.k + settings.k)


def draw_until(
    model: SequenceModel,
    settings: SearchSettings,
    mass: float,
    most: int,
    seed: int | None,
    streams: RoundStreams,
    progress: Progress | None,
) -> Beams:
    """Draw as ``until`` does, with all settings in one value."""
    rounds, number, count = Rounds(model, settings), 0, 0
    target = math.log1p(-mass) if mass < 1 else -math.inf
    done = rounds.log_left.isneginf()
    while count < most and not bool(done.all()):
        reached = rounds.log_left <= target
        if not settings.design.estimates:
            done = done | reached
        if bool(done.all()):
            break
        number += 1
        k = min(settings.k, most - count)
        rounds.draw(k, streams(number), ~done)
        count += k
        # Whether this was a source's last round was decided before it was drawn.
        done = done | reached | rounds.log_left.isneginf()
        if progress is not None:
            progress(-torch.expm1(rounds.log_left.cpu()))
    label: dict[str, Any] = {
        **settings.as_record(),
        "seed": seed,
        "model": _name(model),
        "rounds": number,
        "mass": mass,
    }
    return rounds.beams(label)


def refuse_replacement(design: Design) -> None:
    """Raise a ValueError if a design may draw a sequence twice."""
    if not design.distinct:
        raise ValueError(
            f"design is {design!r}, which may draw a sequence twice; it must be one without "
            f"replacement, such as {DEFAULT_DESIGN!r}"
        )


def _name(model: SequenceModel) -> str:
    return str(getattr(model, "name", type(model).__name__))


def round_seeds(made: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the seeds of all rounds of beams with these settings, None where it is not known."""
    seed = made.get("seed")
    if isinstance(seed, list | tuple):
        return tuple(seed)
    return (seed,) * int(made.get("rounds") or 1)


def _both(made: Mapping[str, Any], seed: int | None) -> Any:
    """Return the seed of all rounds, or a tuple with one for each if they differ.

    Args:
        made: how the beams of earlier rounds were made.
        seed: the seed of the next round.
    """
    every = (*round_seeds(made), seed)
    return seed if all(own == seed for own in every) else every
