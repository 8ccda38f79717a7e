"""From options to beams, and from beams to records: what is told of a text's sequences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import tee
from typing import Any

from cpsbs.cli.inputs import check_utf8
from cpsbs.cli.outputs import Record
from cpsbs.designs import ConditionalPoissonDesign, Design, design_named
from cpsbs.estimation.estimate import estimate
from cpsbs.estimation.functions import Entropy
from cpsbs.estimation.metrics import diversity, sentence_bleu
from cpsbs.extras import silence_transformers
from cpsbs.search.beams import Beams
from cpsbs.search.recursion import check_settings
from cpsbs.text import TextModel, load


@dataclass(frozen=True)
class Draw:
    """How sequences are drawn."""

    k: int
    design: Design
    temperature: float
    nucleus: float | None
    max_length: int
    seed: int

    def beams(self, model: TextModel, texts: list[str], numbers: list[int], **keep: Any) -> Beams:
        """Of some of the texts; each has its own stream of random numbers, by its number."""
        return next(self.beams_each(model, texts, [numbers], **keep))

    def beams_each(
        self, model: TextModel, texts: list[str], batches: Iterable[list[int]], **keep: Any
    ) -> Iterator[Beams]:
        """The same for some of the texts after the other."""
        numbers, again = tee(batches)
        return model.beams_each(
            ([texts[i] for i in batch] for batch in numbers),
            self.k,
            self.design,
            max_length=self.max_length,
            temperature=self.temperature,
            nucleus=self.nucleus,
            seed=self.seed,
            streams=again,
            **keep,
        )

    @property
    def tells_by_joint(self) -> bool:
        """Whether one beam tells its error only by joint inclusion probabilities."""
        return self.design.needs_joint and self.k > 1

    def again(self, repeat: int) -> Draw:
        """The same with other random numbers, of seeds that nobody types."""
        return replace(self, seed=self.seed + repeat * 2**32)


def check_draw(
    k: int, temperature: float, nucleus: float | None, max_length: int | None, seed: int
) -> None:
    """Refuse options that no search can have, before a model is loaded for it."""
    check_settings(k, max_length or 1, temperature, nucleus)
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed is {seed}; allowed are integers of 64 bits, -2^63 to 2^63 - 1")


def drawing(
    model: TextModel,
    k: int,
    design: Design,
    temperature: float,
    nucleus: float | None,
    max_length: int | None,
    seed: int,
) -> Draw:
    """Return how to draw as the options say, with the model's usual length if they do not."""
    return Draw(k, design, temperature, nucleus, max_length or model.usual_length, seed)


def chosen_design(name: str, anneal: float | None) -> Design:
    """By its name, annealed if that is asked for."""
    if anneal is None:
        return design_named(name)
    if name != ConditionalPoissonDesign.name:
        raise ValueError(f"--anneal is of conditional-poisson; --design is {name}")
    return ConditionalPoissonDesign(anneal=anneal)


def quiet_load(
    name: str, device: str | None, dtype: str | None, trust_remote_code: bool
) -> TextModel:
    """Return a model, without the noise that loading one makes."""
    check_utf8(name, "--model")
    silence_transformers()
    return load(name, device=device, dtype=dtype, trust_remote_code=trust_remote_code)


def sampled(
    beams: Beams,
    model: TextModel,
    texts: list[str],
    numbers: list[int],
    references: list[str] | None,
) -> list[Record]:
    """What is told of the sequences drawn for the texts with these numbers."""
    records = []
    entries = zip(numbers, model.texts(beams), beams.to_dict()["sources"], strict=True)
    for i, drawn, entry in entries:
        record = {"number": i, "text": texts[i], "texts": drawn}
        if references is not None:
            record["bleu"] = [sentence_bleu(y, references[i]) for y in drawn]
        records.append(record | entry | {"settings": dict(beams.settings)})
    return records


def compared(
    draw: Draw, model: TextModel, text: str, reference: str | None, likely: set[tuple[int, ...]]
) -> Record:
    """What one design does with a text; ``likely`` is what beam search finds."""
    beams = draw.beams(model, [text], [0], joint=draw.tells_by_joint, entropy=True)
    texts = model.texts(beams)[0]
    entry = beams.to_dict()["sources"][0]
    record: Record = {"design": beams.design, "text": text, "texts": texts, **entry}
    if reference is not None:
        record["bleu"] = [sentence_bleu(y, reference) for y in texts]
    different = dict(zip(map(tuple, beams.tokens(0)), entry["log_prob"], strict=True))
    record["distinct"] = len(different)
    record["shared"] = len(different.keys() & likely)
    record["captured"] = math.fsum(math.exp(log_p) for log_p in different.values())
    record["diversity"] = diversity(beams.tokens(0))
    record["entropy"] = None
    if draw.design.estimates:
        record["entropy"] = estimate(beams, Entropy(rao_blackwell=True)).to_dicts()[0]
    return record | {"settings": dict(beams.settings)}
