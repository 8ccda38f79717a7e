"""Draws what the page asks for: runs with their steps, many seeds, and what follows a prefix.

A page may change its mind while a search is running. Every search here therefore reports each of
its steps to a function, ``Watch``, that may raise ``Cancelled``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cpsbs.designs import DESIGNS, design_named
from cpsbs.estimation.estimate import estimate
from cpsbs.estimation.functions import Bleu, Chrf, Entropy, Length, Probability
from cpsbs.estimation.weights import WeightWarning
from cpsbs.explore.pieces import pieces_of
from cpsbs.explore.record import Document, Record
from cpsbs.explore.scene import Scene
from cpsbs.models.base import SequenceModel, eos_tokens
from cpsbs.models.prefixed import PrefixedModel
from cpsbs.models.wrapped import WrappedModel
from cpsbs.randomness import split_seed
from cpsbs.search.api import search
from cpsbs.search.beams import Beams
from cpsbs.search.more import until
from cpsbs.search.recursion import processed
from cpsbs.search.settings import SearchSettings
from cpsbs.text import Prompt, TextModel

ROWS = 100
"""About how many hypotheses are decoded at once when many seeds are drawn."""
EXACT_MASS = 1 - 1e-6
"""The probability that is captured before the bounds of E f count as its exact value."""
EXACT_MOST = 1000
"""The largest number of sequences that are drawn for that."""

SHOWN = (
    "function",
    "value",
    "standard_error",
    "interval_95",
    "bounds",
    "exact",
    "distinct",
    "effective_size",
    "captured",
    "sum_of_weights",
    "line",
)
"""What a document keeps of an estimate; see ``Estimate.to_dicts``."""

Watch = Callable[[int], None]
"""Called before every step of a search with the number of tokens so far; it may raise."""


class Cancelled(Exception):  # noqa: N818, it is not an error
    """Raised inside a search that nobody waits for any more."""


def ignore(_: int) -> None:
    """Watch a search without doing anything."""


class WatchedModel(WrappedModel):
    """A model that reports every step of a search.

    Args:
        model: the model.
        watch: called with the number of tokens so far.
    """

    def __init__(self, model: SequenceModel, watch: Watch) -> None:
        super().__init__(model)
        self._watch, self._length = watch, 0

    def start(self) -> Tensor:
        """Return the scores [sources, V] of the first token."""
        self._length = 0
        self._watch(0)
        return super().start()

    def advance(self, parent: Tensor, token: Tensor) -> Tensor:
        """Return the scores [rows, V] of the next token."""
        self._length += 1
        self._watch(self._length)
        return super().advance(parent, token)


@dataclass(frozen=True)
class Explorer:
    """Draws the runs of scenes from one model.

    Args:
        model: the model with its tokenizer.
        prompt: maps a text to what the model is given, such as a conversation with one message.
    """

    model: TextModel
    prompt: Callable[[str], Prompt] = str

    def document(self, scene: Scene) -> Document:
        """Return an empty document for a scene, if the model can take its text."""
        for reason in self.model.unusable([self.prompt(scene.text)], scene.max_length).values():
            raise ValueError(f"the text {reason}")
        prompt = self.prompt(scene.text)
        return Document(
            self.model.name,
            prompt,
            scene,
            eos_tokens(self.model.sequence_model([prompt])),
            partial(pieces_of, self.model.tokenizer),
            self.model.decode,
        )

    def draw(
        self,
        document: Document,
        design: str,
        seed: int,
        prefix: Sequence[int] = (),
        watch: Watch = ignore,
    ) -> None:
        """Add a run with all of its steps.

        Args:
            document: the document to add it to.
            design: the name of the design.
            seed: the seed of the run.
            prefix: tokens that every sequence begins with.
            watch: called before every step.
        """
        scene, settings = document.scene, document.scene.settings(design_named(design))
        model: SequenceModel = WatchedModel(
            self.model.sequence_model([self.prompt(scene.text)]), watch
        )
        below = None
        if prefix:
            if len(prefix) >= scene.max_length:
                raise ValueError(
                    f"prefix has {len(prefix)} tokens; it must have fewer than max_length = "
                    f"{scene.max_length}"
                )
            process = partial(processed, temperature=settings.temperature, nucleus=settings.nucleus)
            model = below = PrefixedModel(model, prefix, process)
            settings = replace(settings, max_length=scene.max_length - len(prefix))
        beams = _searched(model, settings, seed)
        log_prefix = 0.0 if below is None or below.log_prefix is None else float(below.log_prefix)
        values, found = self._estimate(scene, beams, prefix, log_prefix)
        document.add_run(
            beams,
            settings.design,
            values,
            # Below a prefix the weights are those of p(y | prefix), and E f is another number.
            None if prefix else found,
            prefix=prefix,
            log_prefix=log_prefix,
        )

    def redraw(
        self, document: Document, design: str, seeds: Sequence[int], watch: Watch = ignore
    ) -> None:
        """Add a run for each seed, without its steps; a seed gives the same beam as in ``draw``.

        All seeds are searched at once; ``together`` says how many that should be.
        """
        scene = document.scene
        settings = replace(scene.settings(design_named(design)), path=False)
        model = self.model.sequence_model([self.prompt(scene.text)] * len(seeds))
        streams = [split_seed(seed, [0], model.device)[0] for seed in seeds]
        beams = _searched(WatchedModel(model, watch), settings, streams)
        for number, seed in enumerate(seeds):
            own = replace(beams[number], settings={**beams.settings, "seed": seed})
            document.add_run(own, settings.design, *self._estimate(scene, own))

    def exact(self, document: Document, watch: Watch = ignore) -> None:
        """Note between which numbers E f certainly lies.

        Sequences are drawn, never one twice, until hardly anything is left of the distribution or
        there are ``EXACT_MOST``. Where the model can be enumerated, both numbers are the same.
        """
        scene = document.scene
        beams = until(
            WatchedModel(self.model.sequence_model([self.prompt(scene.text)]), watch),
            EXACT_MASS,
            ROWS,
            most=EXACT_MOST,
            max_length=scene.max_length,
            temperature=scene.temperature,
            nucleus=scene.nucleus,
            generator=0,
        )
        _, found = self._estimate(scene, beams)
        low, high = found["bounds"] or (None, None)
        document.exact = {
            "low": low,
            "high": high,
            "captured": found["captured"],
            "sequences": found["distinct"],
        }

    def _estimate(
        self, scene: Scene, beams: Beams, prefix: Sequence[int] = (), log_prefix: float = 0.0
    ) -> tuple[list[float], Record]:
        """Return f of the sequences of a beam, and the estimate of E f from it."""
        function = _function(scene)

        def decode(sequences: Sequence[Sequence[int]]) -> list[str]:
            return self.model.decode([[*prefix, *tokens] for tokens in sequences])

        values: list[float] = function.of_beams(beams, 0, decode).tolist()
        if scene.function == "entropy":
            values = [value - log_prefix for value in values]
        if scene.function == "length":
            values = [value + len(prefix) for value in values]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", WeightWarning)
            found = estimate(beams, function, decode=decode).to_dicts()[0]
        record = {name: found[name] for name in SHOWN}
        return values, record | {"warning": str(caught[0].message) if caught else None}


def design_summaries() -> list[Record]:
    """Return the designs that the page offers, with what it says of them."""
    return [
        {
            "name": name,
            "summary": design.summary,
            "distinct": design.distinct,
            "estimates": design.estimates,
            "tells_error": design.tells_error,
            "needs_joint": design.needs_joint,
        }
        for name, design in DESIGNS.items()
    ]


def together(scene: Scene) -> int:
    """Return how many seeds of a scene are best searched at once."""
    return max(1, ROWS // scene.k)


def _searched(
    model: SequenceModel, settings: SearchSettings, generator: int | list[torch.Generator]
) -> Beams:
    """Draw as the settings say."""
    return search(
        model,
        settings.k,
        settings.design,
        max_length=settings.max_length,
        temperature=settings.temperature,
        nucleus=settings.nucleus,
        generator=generator,
        joint=settings.joint,
        path=settings.path,
    )


def _function(scene: Scene) -> Any:
    """Return f as ``estimate`` takes it."""
    if scene.function == "bleu":
        return Bleu([scene.argument])
    if scene.function == "chrf":
        return Chrf([scene.argument])
    if scene.function == "contains":
        name = f"contains {scene.argument!r}"
        return Probability(lambda text: scene.argument in text, name)
    return Length() if scene.function == "length" else Entropy()
