"""Turns options into beams, and beams into the records that commands print or store."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import tee
from typing import Unpack

from cpsbs.cli.inputs import check_utf8
from cpsbs.cli.ordered import Record
from cpsbs.cli.source import Batch
from cpsbs.designs import DEFAULT_DESIGN, ConditionalPoissonDesign, Design, design_named
from cpsbs.estimation.estimate import estimate
from cpsbs.estimation.functions import Entropy
from cpsbs.estimation.metrics import diversity, sentence_bleu
from cpsbs.extras import silence_transformers
from cpsbs.search.beams import Beams
from cpsbs.search.more import DEFAULT_MOST, Progress, refuse_replacement
from cpsbs.search.settings import SearchOptions, SearchSettings
from cpsbs.text import TextModel, load, outline


@dataclass(frozen=True)
class Target:
    """When to stop drawing more sequences for a text."""

    mass: float
    """The probability to capture."""
    most: int
    """The largest number of sequences."""

    def as_record(self) -> Record:
        """Return what the results of a command depend on."""
        return {"until_mass": self.mass, "most": self.most}


@dataclass(frozen=True)
class Draw:
    """The settings and the seed with which a command draws."""

    settings: SearchSettings
    seed: int

    def beams(self, model: TextModel, batch: Batch, **keep: Unpack[SearchOptions]) -> Beams:
        """Draw a beam for each text of a batch.

        Every text has a random stream of its own, which its number selects.
        """
        return next(self.beams_each(model, [batch], **keep))

    def beams_each(
        self, model: TextModel, batches: Iterable[Batch], **keep: Unpack[SearchOptions]
    ) -> Iterator[Beams]:
        """Draw the beams of one batch after another, as ``beams`` does for one."""
        prompts, numbers = tee(batches)
        return model.draw(
            (batch.prompts for batch in prompts),
            replace(self.settings, **keep),
            seed=self.seed,
            streams=(batch.numbers for batch in numbers),
        )

    def beams_until(
        self,
        model: TextModel,
        batches: Iterable[Batch],
        target: Target | None,
        progress: Progress,
        **keep: Unpack[SearchOptions],
    ) -> Iterator[Beams]:
        """Draw round after round for one batch after another; once without a target."""
        if target is None:
            yield from self.beams_each(model, batches, **keep)
            return
        drawn = replace(self.settings, **keep)
        for batch in batches:
            yield model.until(
                batch.prompts,
                target.mass,
                drawn.k,
                drawn.design,
                most=target.most,
                max_length=drawn.max_length,
                seed=self.seed,
                streams=batch.numbers,
                progress=progress,
                temperature=drawn.temperature,
                nucleus=drawn.nucleus,
                joint=drawn.joint,
            )

    @property
    def needs_joint(self) -> bool:
        """Whether the error of one beam's estimate needs joint inclusion probabilities."""
        return self.settings.design.needs_joint and self.settings.k > 1

    def repeated(self, repeat: int) -> Draw:
        """Return the same settings with another seed, far from those that people type."""
        return replace(self, seed=self.seed + repeat * 2**32)

    def with_design(self, design: Design) -> Draw:
        """Return the same settings with another design."""
        return replace(self, settings=replace(self.settings, design=design))


def check_draw(
    k: int, temperature: float, nucleus: float | None, max_length: int | None, seed: int
) -> None:
    """Raise a ``ValueError`` for invalid search options, before a model is loaded."""
    SearchSettings(k, design_named(DEFAULT_DESIGN), max_length or 1, temperature, nucleus)
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed is {seed}; it must be a 64-bit integer, from -2^63 to 2^63 - 1")


def draw_with(
    model: TextModel,
    k: int,
    design: Design,
    temperature: float,
    nucleus: float | None,
    max_length: int | None,
    seed: int,
) -> Draw:
    """Return the settings that the options give, with the model's usual length by default."""
    length = max_length or model.usual_length
    return Draw(SearchSettings(k, design, length, temperature, nucleus), seed)


def chosen_target(mass: float | None, most: int | None, design: Design) -> Target | None:
    """Return when to stop, if --until-mass is given; raise a ``ValueError`` for invalid options."""
    if mass is None:
        if most is not None:
            raise ValueError(f"--most is {most}, which needs --until-mass; give that too")
        return None
    if not 0 < mass <= 1:
        raise ValueError(f"--until-mass is {mass}; it must be above 0 and at most 1")
    refuse_replacement(design)
    return Target(mass, DEFAULT_MOST if most is None else most)


def chosen_design(name: str, anneal: float | None) -> Design:
    """Return the design of that name, annealed if that is asked for."""
    if anneal is None:
        return design_named(name)
    if name != ConditionalPoissonDesign.name:
        raise ValueError(f"--anneal needs --design conditional-poisson; --design is {name}")
    return ConditionalPoissonDesign(anneal=anneal)


@dataclass(frozen=True)
class ModelChoice:
    """The options that name a model: small enough to be sent to where it is loaded."""

    name: str
    device: str | None = None
    dtype: str | None = None
    trust_remote_code: bool = False
    gguf_file: str | None = None
    int8: bool = False

    def load(self) -> TextModel:
        """Load the model without the progress bars and warnings of transformers."""
        check_utf8(self.name, "--model")
        silence_transformers()
        return load(
            self.name,
            device=self.device,
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
            gguf_file=self.gguf_file,
            quantize="int8" if self.int8 else None,
        )

    def outline(self) -> TextModel:
        """Return the model without its weights, which tells what texts it can take."""
        check_utf8(self.name, "--model")
        silence_transformers()
        return outline(self.name, self.trust_remote_code, self.gguf_file)


def sample_records(beams: Beams, model: TextModel, batch: Batch) -> list[Record]:
    """Return a record for each text of a batch: the sequences drawn for it."""
    records = []
    entries = zip(model.texts(beams), beams.to_dict()["sources"], strict=True)
    for i, (drawn, entry) in enumerate(entries):
        record = {"number": batch.numbers[i], "text": batch.texts[i], "texts": drawn}
        if batch.references is not None:
            record["bleu"] = [sentence_bleu(y, batch.references[i]) for y in drawn]
        records.append(record | entry | {"settings": dict(beams.settings)})
    return records


def captured_mass(record: Record) -> float:
    """Return the probability that the different sequences of a record have together."""
    different = dict(zip(map(tuple, record["sequences"]), record["log_prob"], strict=True))
    return math.fsum(map(math.exp, different.values()))


def comparison_record(
    draw: Draw, model: TextModel, text: str, reference: str | None, likely: set[tuple[int, ...]]
) -> Record:
    """Return what one design draws for a text, to be compared with other designs.

    Args:
        draw: the settings, of which the design is compared.
        model: the model to draw from.
        text: the source text.
        reference: a reference translation to compute BLEU with, if there is one.
        likely: the sequences that beam search finds.
    """
    beams = draw.beams(model, Batch.alone(text), joint=draw.needs_joint, entropy=True)
    texts = model.texts(beams)[0]
    entry = beams.to_dict()["sources"][0]
    record: Record = {"design": beams.design, "text": text, "texts": texts, **entry}
    if reference is not None:
        record["bleu"] = [sentence_bleu(y, reference) for y in texts]
    different = set(map(tuple, beams.tokens(0)))
    record["distinct"] = len(different)
    record["shared"] = len(different & likely)
    record["captured"] = captured_mass(record)
    record["diversity"] = diversity(beams.tokens(0))
    record["entropy"] = None
    if draw.settings.design.estimates:
        record["entropy"] = estimate(beams, Entropy(rao_blackwell=True)).to_dicts()[0]
    return record | {"settings": dict(beams.settings)}
