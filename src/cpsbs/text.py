"""From texts to beams: a transformers model with its tokenizer, loaded by name.

model = cpsbs.load("en-fr")                          # comes with the package
beams = model.beams(["A man rides a bicycle."], k=10, seed=0)
model.texts(beams)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import tee
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cpsbs.backends import backend_for
from cpsbs.designs import Design
from cpsbs.estimation.inclusion import Models
from cpsbs.loading import EMBEDDED as EMBEDDED
from cpsbs.loading import embedded_models as embedded_models
from cpsbs.loading import limit, pretrained
from cpsbs.models.transformers.adapter import TransformersModel
from cpsbs.randomness import Streams, fresh_seed
from cpsbs.search.beams import Beams
from cpsbs.search.recursion import search_each

MAX_LENGTH = 128
"""The most new tokens where nothing is said, if the model has room for them."""


def demonstration() -> list[tuple[str, str]]:
    """Some English sentences with French references, written for this package."""
    lines = (EMBEDDED / "demonstration.tsv").read_text(encoding="utf-8").splitlines()
    return [(english, french) for english, french in (line.split("\t") for line in lines)]


@dataclass(frozen=True, eq=False)
class TextModel:
    """A model that continues or translates texts."""

    name: str
    model: Any
    """A transformers model, decoder-only or encoder–decoder."""
    tokenizer: Any

    def __post_init__(self) -> None:
        self.model.eval()  # with dropout there is no one distribution to sample from

    @property
    def longest(self) -> int | None:
        """The most tokens that the model takes, or None if neither it nor the tokenizer says so.

        For a decoder-only model the prompt and what follows count together.
        """
        stated = (
            getattr(self.model.config, "max_position_embeddings", None),
            getattr(self.tokenizer, "model_max_length", None),
        )
        return min(filter(None, map(limit, stated)), default=None)

    @property
    def usual_length(self) -> int:
        """The most new tokens, where nothing is said; a prompt needs room too."""
        if self.longest is None:
            return MAX_LENGTH
        return min(MAX_LENGTH, self.longest if self.is_encoder_decoder else self.longest // 2)

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether a text is a source to be translated, not the beginning of what is sampled."""
        return bool(self.model.config.is_encoder_decoder)

    def room(self, max_length: int) -> int | None:
        """The most tokens a text may have, if there is a limit."""
        if self.longest is None:
            return None
        return self.longest if self.is_encoder_decoder else self.longest - max_length

    def beams(
        self,
        texts: Sequence[str],
        k: int = 10,
        design: str | Design = "conditional-poisson",
        *,
        max_length: int | None = None,
        temperature: float = 1.0,
        nucleus: float | None = None,
        seed: int | None = None,
        streams: Sequence[int] | None = None,
        joint: bool = False,
        entropy: bool = False,
        path: bool = False,
    ) -> Beams:
        """Draw K sequences for every text; the arguments are those of ``search``.

        Args:
            texts: sources to translate, or beginnings to continue.
            k: K.
            design: by name or as an object.
            max_length: the most new tokens; ``usual_length`` if it is None.
            temperature: of the model.
            nucleus: truncation to the most probable tokens, if any.
            seed: for the random numbers; a fresh one is taken, and noted, if it is None.
            streams: the number of each text's stream of random numbers; its place in the list, if
                not said. With it, a text of a long list gets what it would get in another batch.
            joint: keep joint inclusion probabilities, for error bars.
            entropy: keep the entropies of the steps, for the Rao–Blackwellised entropy.
            path: keep every step.
        """
        return next(
            self.beams_each(
                [texts],
                k,
                design,
                max_length=max_length,
                temperature=temperature,
                nucleus=nucleus,
                seed=seed,
                streams=None if streams is None else [streams],
                joint=joint,
                entropy=entropy,
                path=path,
            )
        )

    def beams_each(
        self,
        batches: Iterable[Sequence[str]],
        k: int = 10,
        design: str | Design = "conditional-poisson",
        *,
        max_length: int | None = None,
        temperature: float = 1.0,
        nucleus: float | None = None,
        seed: int | None = None,
        streams: Iterable[Sequence[int]] | None = None,
        joint: bool = False,
        entropy: bool = False,
        path: bool = False,
    ) -> Iterator[Beams]:
        """``beams`` for one batch of texts after the other, in their order.

        On a GPU the texts of later batches take the places of texts that are through (see
        ``search_each``): give the longest texts first, and after the first batch smaller ones.
        Without ``streams`` the texts are counted through.
        """
        length = self.usual_length if max_length is None else max_length
        chosen = fresh_seed(None) if seed is None else seed
        backend = backend_for(self.model.device)
        texts, numbers = iter(batches), streams
        if numbers is None:
            texts, again = tee(texts)
            numbers = _counted_through(again)

        def models() -> Iterator[TransformersModel]:
            for batch in texts:
                if isinstance(batch, str):
                    raise ValueError("texts is one text; it must be a list of them: [text]")
                tokens = self._tokens(batch)
                self._check(batch, tokens, length)
                yield self._sequence_model(tokens)

        found = search_each(
            models(),
            k,
            design,
            max_length=length,
            temperature=temperature,
            nucleus=nucleus,
            generator=(Streams.split(chosen, own, self.model.device, backend) for own in numbers),
            joint=joint,
            entropy=entropy,
            path=path,
        )
        return (replace(beams, settings={**beams.settings, "seed": chosen}) for beams in found)

    def sequence_model(self, texts: Sequence[str]) -> TransformersModel:
        """What the search asks for next tokens: the model with these texts, for one search."""
        return self._sequence_model(self._tokens(texts))

    @property
    def _padding(self) -> int:
        """A token that nothing attends to."""
        names = ("pad_token_id", "eos_token_id")
        known = (getattr(self.tokenizer, name, None) for name in names)
        return next((token for token in known if isinstance(token, int)), 0)

    def _tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of every text, with those that the tokenizer adds."""
        for i, text in enumerate(texts):
            _check_text(i, text)
        if not texts:
            return []
        try:
            tokens: list[list[int]] = self.tokenizer(list(texts)).input_ids
        except Exception as error:  # the library behind it has no kinds of errors
            raise ValueError(f"the tokenizer of {self.name} cannot split texts: {error}") from error
        return tokens

    def _sequence_model(self, tokens: list[list[int]]) -> TransformersModel:
        # A prompt must end where the model goes on.
        side = "right" if self.is_encoder_decoder else "left"

        def padded(rows: list[Tensor], value: int) -> Tensor:
            return pad_sequence(rows, True, value, padding_side=side).to(self.model.device)

        ids = [torch.tensor(row, dtype=torch.int64, device="cpu") for row in tokens]
        model = TransformersModel(
            self.model,
            input_ids=padded(ids, self._padding),
            attention_mask=padded([torch.ones_like(row) for row in ids], 0),
        )
        model.name = self.name
        return model

    def repeated(self, texts: Sequence[str]) -> Models:
        """From numbers of texts to a model of them, as ``hindsight_inclusion`` wants it."""

        def of(numbers: Tensor) -> TransformersModel:
            return self.sequence_model([texts[i] for i in numbers.tolist()])

        return of

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Return lists of tokens as texts, without the tokens that are no text."""
        if len(sequences) == 0:  # which transformers takes for one sequence without tokens
            return []
        texts: list[str] = self.tokenizer.batch_decode(sequences, skip_special_tokens=True)
        return texts

    def texts(self, beams: Beams) -> list[list[str]]:
        """The sequences of every source as texts."""
        return beams.decode(self.decode)

    def unusable(self, texts: Sequence[str], max_length: int) -> dict[int, str]:
        """By number, what is wrong with the texts that cannot be taken."""
        return self._unusable(texts, self._tokens(texts), max_length)

    def _unusable(
        self, texts: Sequence[str], tokens: list[list[int]], max_length: int
    ) -> dict[int, str]:
        if self.longest is not None and max_length > self.longest:
            raise ValueError(
                f"max_length is {max_length}; {self.name} takes at most {self.longest} tokens"
            )
        room = self.room(max_length)
        wrong = {}
        for i, (text, own) in enumerate(zip(texts, tokens, strict=True)):
            if not text.strip():
                wrong[i] = "is empty"
            elif room is not None and len(own) > room:
                wrong[i] = f"has {len(own)} tokens; {self.name} takes {room}"
        return wrong

    def _check(self, texts: Sequence[str], tokens: list[list[int]], max_length: int) -> None:
        if not texts:
            raise ValueError("texts is empty; it must hold at least one text")
        for i, reason in self._unusable(texts, tokens, max_length).items():
            raise ValueError(f"texts[{i}] {reason}")


def _check_text(number: int, text: object) -> None:
    """Refuse what no tokenizer takes."""
    if not isinstance(text, str):
        raise ValueError(f"texts[{number}] is a {type(text).__name__}; it must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"texts[{number}] is not Unicode text: {error}") from error


def _counted_through(batches: Iterable[Sequence[str]]) -> Iterator[range]:
    """The numbers of the texts."""
    first = 0
    for batch in batches:
        yield range(first, first + len(batch))
        first += len(batch)


def load(
    name: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> TextModel:
    """Load a model and its tokenizer, sequence-to-sequence or causal.

    Weights are read from safetensors files only. A checkpoint whose parts do not fit together is
    refused with a ``ValueError``.

    Args:
        name: an embedded model (``en-fr``), a folder, or an id on the Hugging Face hub.
        device: where the model computes; a GPU if there is one, else the CPU.
        dtype: float32, float16, bfloat16 or float64, or "auto" for what the weights are stored in;
            float32 on a CPU and "auto" elsewhere if it is None.
        trust_remote_code: whether a model may bring code of its own, which would be run.
    """
    model, tokenizer = pretrained(name, device, dtype, trust_remote_code)
    return TextModel(str(name), model, tokenizer)
