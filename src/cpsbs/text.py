"""From texts to beams: a transformers model with its tokenizer, loaded by name.

    model = cpsbs.load("en-fr")  # comes with the package
    beams = model.beams(["A man rides a bicycle."], k=10, seed=0)
    model.texts(beams)

``cpsbs.loading`` does the loading; this module turns texts into tokens, and tokens into texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import tee
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cpsbs.backends import backend_for
from cpsbs.decisions.decision import Decisions
from cpsbs.decisions.mbr import DEFAULT_ROUNDS
from cpsbs.decisions.plan import DEFAULT_CANDIDATES, DEFAULT_SIZE, DEFAULT_TEMPERATURE, Plan
from cpsbs.designs import DEFAULT_DESIGN, Design, design_named
from cpsbs.estimation.inclusion import Models
from cpsbs.loading import EMBEDDED as EMBEDDED
from cpsbs.loading import embedded_models as embedded_models
from cpsbs.loading import limit, outlined, pretrained
from cpsbs.models.transformers.adapter import TransformersModel
from cpsbs.models.transformers.int8 import is_quantized
from cpsbs.prompts import Messages as Messages
from cpsbs.prompts import Prompt as Prompt
from cpsbs.prompts import prompt_tokens
from cpsbs.randomness import Streams, chosen_seed
from cpsbs.search.api import search_models
from cpsbs.search.beams import Beams
from cpsbs.search.more import (
    DEFAULT_MOST,
    Progress,
    check_target,
    draw_until,
    more,
    refuse_replacement,
    round_streams,
)
from cpsbs.search.settings import SearchOptions, SearchSettings
from cpsbs.windows import WINDOW, beams_in_order, first_window

DEFAULT_MAX_LENGTH = 128
"""The default for the largest number of new tokens, if the model has room for them."""


def demonstration() -> list[tuple[str, str]]:
    """Return some English sentences with French references, written for this package."""
    lines = (EMBEDDED / "demonstration.tsv").read_text(encoding="utf-8").splitlines()
    return [(english, french) for english, french in (line.split("\t") for line in lines)]


@dataclass(frozen=True, eq=False, repr=False)
class TextModel:
    """A transformers model with its tokenizer: texts go in, beams and texts come out."""

    name: str
    model: Any
    """A transformers model, decoder-only or encoder–decoder."""
    tokenizer: Any

    def __post_init__(self) -> None:
        self.model.eval()  # with dropout there is no one distribution to sample from

    def __repr__(self) -> str:
        millions = sum(p.numel() for p in self.model.parameters()) / 1e6
        kind, dtype = type(self.model).__name__, str(self.model.dtype).removeprefix("torch.")
        return (
            f"TextModel({self.name!r}, {kind}, {millions:,.1f}M parameters, "
            f"{dtype}{self._rounding} on {self.model.device})"
        )

    @property
    def quantize(self) -> str | None:
        """How the weights of linear layers are rounded: "int8", or None."""
        return "int8" if is_quantized(self.model) else None

    @property
    def _rounding(self) -> str:
        """What is said of rounded weights behind a name; empty where none are rounded."""
        return "" if self.quantize is None else f" with {self.quantize} weights"

    @property
    def longest(self) -> int | None:
        """The largest number of tokens that the model takes, or None if it has no stated limit.

        For a decoder-only model the prompt and what follows count together.
        """
        stated = (
            getattr(self.model.config, "max_position_embeddings", None),
            getattr(self.tokenizer, "model_max_length", None),
        )
        return min(filter(None, map(limit, stated)), default=None)

    @property
    def usual_length(self) -> int:
        """The default for the largest number of new tokens, which leaves room for a prompt."""
        if self.longest is None:
            return DEFAULT_MAX_LENGTH
        room = self.longest if self.is_encoder_decoder else self.longest // 2
        return min(DEFAULT_MAX_LENGTH, room)

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether a text is a source to translate, rather than the beginning of what is sampled."""
        return bool(self.model.config.is_encoder_decoder)

    def room(self, max_length: int) -> int | None:
        """Return the largest number of tokens that a prompt may have, or None without a limit."""
        if self.longest is None:
            return None
        return self.longest if self.is_encoder_decoder else self.longest - max_length

    def beams(
        self,
        texts: Sequence[Prompt],
        k: int = 10,
        design: str | Design = DEFAULT_DESIGN,
        *,
        max_length: int | None = None,
        seed: int | None = None,
        streams: Sequence[int] | None = None,
        **options: Unpack[SearchOptions],
    ) -> Beams:
        """Draw K sequences for every text.

        Args:
            texts: sources to translate or texts to continue. For a chat model an entry may be a
                list of messages, ``[{"role": "user", "content": "…"}]``, which goes through the
                tokenizer's chat template.
            k: K, the number of sequences to draw for each text.
            design: how the sequences are drawn, by name or as an object.
            max_length: the largest number of new tokens; by default ``usual_length``.
            seed: the seed of the random numbers. By default a fresh one is taken and noted in
                ``beams.settings``.
            streams: the number of each text's random stream, by default its index in the list. A
                text of a long list gets the same draw in any batch if its number stays the same.
            options: ``temperature`` (default 1), ``nucleus``, ``joint``, ``entropy`` and ``path``:
                see ``cpsbs.search``.
        """
        return next(
            self.beams_each(
                [texts],
                k,
                design,
                max_length=max_length,
                seed=seed,
                streams=None if streams is None else [streams],
                **options,
            )
        )

    def beams_each(
        self,
        batches: Iterable[Sequence[Prompt]],
        k: int = 10,
        design: str | Design = DEFAULT_DESIGN,
        *,
        max_length: int | None = None,
        seed: int | None = None,
        streams: Iterable[Sequence[int]] | None = None,
        **options: Unpack[SearchOptions],
    ) -> Iterator[Beams]:
        """Draw K sequences for every text of every batch; the beams come in the batches' order.

        On a GPU the texts of later batches take the places of texts that have ended (continuous
        batching, see ``cpsbs.search_each``): put the longest texts first, and make the batches
        after the first one smaller. The arguments are those of ``beams``; without ``streams``
        the texts of all batches are numbered consecutively.
        """
        length = self.usual_length if max_length is None else max_length
        settings = SearchSettings(k, design_named(design), length, **options)
        return self.draw(batches, settings, seed=seed, streams=streams)

    def draw(
        self,
        batches: Iterable[Sequence[Prompt]],
        settings: SearchSettings,
        *,
        seed: int | None = None,
        streams: Iterable[Sequence[int]] | None = None,
    ) -> Iterator[Beams]:
        """Draw as ``beams_each`` does, with all settings in one value."""
        chosen = chosen_seed(seed)
        device, backend = self.model.device, backend_for(self.model.device)
        prompts, numbers = iter(batches), streams
        if numbers is None:
            prompts, again = tee(prompts)
            numbers = _consecutive(again)

        def models() -> Iterator[TransformersModel]:
            for batch in prompts:
                yield self._checked_model(batch, settings.max_length)

        generators = (Streams.split(chosen, own, device, backend) for own in numbers)
        found = search_models(models(), settings, generators)
        return (replace(beams, settings={**beams.settings, "seed": chosen}) for beams in found)

    def stream(
        self,
        texts: Iterable[Prompt],
        k: int = 10,
        design: str | Design = DEFAULT_DESIGN,
        *,
        max_length: int | None = None,
        seed: int | None = None,
        batch_size: int = 64,
        window: int = WINDOW,
        **options: Unpack[SearchOptions],
    ) -> Iterator[Beams]:
        """Draw K sequences for every text of any iterable, also of an endless one.

        The beams come one text at a time, in the order of the texts, with the draws that ``beams``
        of all texts would give. Only a window of texts is held in memory and sorted by length; the
        first one is small, so that results come early. A text that the model cannot take raises a
        ``ValueError`` before anything of its window is drawn.

        Args:
            texts: the texts, each as for ``beams``.
            k: as for ``beams``.
            design: as for ``beams``.
            max_length: as for ``beams``.
            seed: as for ``beams``.
            batch_size: the number of texts to decode at once.
            window: the largest number of batches of a window.
            options: as for ``beams``.
        """
        if isinstance(texts, str):
            raise ValueError("texts is a single text; it must be an iterable of texts: [text]")
        for name, value in (("batch_size", batch_size), ("window", window)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        length = self.usual_length if max_length is None else max_length
        settings = SearchSettings(k, design_named(design), length, **options)
        chosen = chosen_seed(seed)
        return beams_in_order(
            texts,
            lambda batches, streams: self.draw(batches, settings, seed=chosen, streams=streams),
            lambda held: self.unusable(held, length),
            batch_size,
            first_window(batch_size, self.model.device),
            window * batch_size,
        )

    def more(
        self,
        texts: Sequence[Prompt],
        beams: Beams,
        k: int = 10,
        design: str | Design | None = None,
        *,
        seed: int | None = None,
        joint: bool = False,
        entropy: bool | None = None,
    ) -> Beams:
        """Draw K further sequences for every text, none of which is in the beams.

        The result has all sequences, with weights that are unbiased together; see ``cpsbs.more``.

        Args:
            texts: the texts that the beams were drawn for.
            beams: the result of ``beams``, ``until`` or this method. Temperature, nucleus and
                maximal length are theirs.
            k: K, the number of sequences to add for each text.
            design: how they are drawn; by default as those of the beams.
            seed: as for ``beams``. It may be the one that the beams were drawn with.
            joint: see ``cpsbs.more``.
            entropy: see ``cpsbs.more``.
        """
        made = beams.settings if isinstance(beams, Beams) else {}  # ``more`` says what is wrong
        model = self._checked_model(texts, made.get("max_length", 1))
        return more(model, beams, k, design, generator=seed, joint=joint, entropy=entropy)

    def until(
        self,
        texts: Sequence[Prompt],
        mass: float = 0.95,
        k: int = 10,
        design: str | Design = DEFAULT_DESIGN,
        *,
        most: int = DEFAULT_MOST,
        max_length: int | None = None,
        seed: int | None = None,
        streams: Sequence[int] | None = None,
        progress: Progress | None = None,
        **options: Unpack[SearchOptions],
    ) -> Beams:
        """Draw K sequences at a time for every text, until they have a given probability together.

        No sequence is drawn twice, and the weights are unbiased; see ``cpsbs.until``.

        Args:
            texts: as for ``beams``.
            mass: the probability to capture, above 0 and at most 1.
            k: K, the number of sequences of a round.
            design: how they are drawn, by name or as an object; one without replacement.
            most: the largest number of sequences for a text.
            max_length: as for ``beams``.
            seed: as for ``beams``.
            streams: as for ``beams``.
            progress: a function that is called after each round with the captured probability [B]
                of every text.
            options: ``temperature`` (default 1), ``nucleus``, ``joint`` and ``entropy``: see
                ``cpsbs.until``.
        """
        length = self.usual_length if max_length is None else max_length
        settings = SearchSettings(k, design_named(design), length, **options)
        check_target(mass, most)
        refuse_replacement(settings.design)
        model = self._checked_model(texts, length)
        chosen, of_rounds = round_streams(model, seed, streams)
        return draw_until(model, settings, mass, most, chosen, of_rounds, progress)

    def mbr(
        self,
        texts: Sequence[Prompt],
        utility: Any = "chrf",
        *,
        candidates: str = DEFAULT_CANDIDATES,
        k: int = DEFAULT_SIZE,
        design: str = DEFAULT_DESIGN,
        temperature: float = DEFAULT_TEMPERATURE,
        nucleus: float | None = None,
        max_length: int | None = None,
        seed: int | None = None,
        confidence: float | None = None,
        rounds: int = DEFAULT_ROUNDS,
        weights: str | None = None,
    ) -> Decisions:
        """Choose for every text the candidate with the largest expected utility; see ``cpsbs.mbr``.

        Args:
            texts: as for ``beams``.
            utility: as for ``cpsbs.mbr``.
            candidates: a sum of parts: ``beam:16`` are the 16 sequences of beam search,
                ``stratified:16`` 16 that are drawn by a design, ``evidence`` those of the evidence.
            k: the number of sequences of the evidence.
            design: the design of the evidence.
            temperature: the temperature of the evidence.
            nucleus: the nucleus truncation of the evidence.
            max_length: as for ``beams``.
            seed: as for ``beams``.
            confidence: how sure a decision must be; unclear ones get more evidence.
            rounds: the largest number of rounds of evidence, with ``confidence``.
            weights: "probability" weights the evidence by the model's probabilities instead of by
                the design's weights; see ``cpsbs.mbr``.
        """
        plan = Plan.parse(
            candidates, k, design=design, confidence=confidence, rounds=rounds, weights=weights
        )
        length = self.usual_length if max_length is None else max_length
        settings = plan.evidence_settings(length, temperature, nucleus)
        chosen, numbers = chosen_seed(seed), list(range(len(texts)))

        def draw(numbers: list[int], settings: SearchSettings, seed_offset: int) -> Beams:
            batch = [texts[i] for i in numbers]
            return next(self.draw([batch], settings, seed=chosen + seed_offset, streams=[numbers]))

        drawn = [
            draw(numbers, settings if part is None else part.settings(settings), offset)
            for offset, part in plan.searches
        ]
        return plan.decide(drawn, numbers, draw, settings, utility, self.decode)

    def sequence_model(self, texts: Sequence[Prompt]) -> TransformersModel:
        """Return the model with these texts as its sources."""
        return self._sequence_model(self.tokens(texts))

    def _checked_model(self, texts: Sequence[Prompt], max_length: int) -> TransformersModel:
        """Return the model with these texts as its sources, if it can take them."""
        if isinstance(texts, str):
            raise ValueError("texts is a single text; it must be a list of texts: [text]")
        tokens = self.tokens(texts)
        self._check(texts, tokens, max_length)
        return self._sequence_model(tokens)

    @property
    def _padding(self) -> int:
        """A token to pad prompts with; nothing attends to it."""
        names = ("pad_token_id", "eos_token_id")
        known = (getattr(self.tokenizer, name, None) for name in names)
        return next((token for token in known if isinstance(token, int)), 0)

    def tokens(self, texts: Sequence[Prompt]) -> list[list[int]]:
        """Return the tokens of every prompt, with the special tokens that belong to it."""
        return prompt_tokens(self.tokenizer, self.name, texts)

    def _sequence_model(self, tokens: list[list[int]]) -> TransformersModel:
        # The prompt of a decoder-only model must end where the model continues it.
        side = "right" if self.is_encoder_decoder else "left"

        def padded(rows: list[Tensor], value: int) -> Tensor:
            return pad_sequence(rows, True, value, padding_side=side).to(self.model.device)

        ids = [torch.tensor(row, dtype=torch.int64, device="cpu") for row in tokens]
        model = TransformersModel(
            self.model,
            input_ids=padded(ids, self._padding),
            attention_mask=padded([torch.ones_like(row) for row in ids], 0),
        )
        model.name = self.name + self._rounding
        return model

    def repeated(self, texts: Sequence[Prompt]) -> Models:
        """Return a function that makes a model of the texts at given indices, which may repeat.

        ``monte_carlo_inclusion`` and ``hindsight_inclusion`` take such a function.
        """

        def of(numbers: Tensor) -> TransformersModel:
            return self.sequence_model([texts[i] for i in numbers.tolist()])

        return of

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Return lists of tokens as texts, without special tokens."""
        if len(sequences) == 0:  # which transformers takes for one sequence without tokens
            return []
        texts: list[str] = self.tokenizer.batch_decode(sequences, skip_special_tokens=True)
        return texts

    def texts(self, beams: Beams) -> list[list[str]]:
        """Return the sequences of every source as texts."""
        return beams.decode(self.decode)

    def unusable(self, texts: Sequence[Prompt], max_length: int) -> dict[int, str]:
        """Return, by index, what is wrong with the texts that the model cannot take."""
        return self._unusable(texts, self.tokens(texts), max_length)

    def _unusable(
        self, texts: Sequence[Prompt], tokens: list[list[int]], max_length: int
    ) -> dict[int, str]:
        if self.longest is not None and max_length > self.longest:
            raise ValueError(
                f"max_length is {max_length}; {self.name} takes at most {self.longest} tokens"
            )
        room = self.room(max_length)
        wrong = {}
        for i, (text, own) in enumerate(zip(texts, tokens, strict=True)):
            if isinstance(text, str) and not text.strip():
                wrong[i] = "is empty"
            elif room is not None and len(own) > room:
                beside = "" if self.is_encoder_decoder else f" with max_length = {max_length}"
                wrong[i] = f"has {len(own)} tokens; {self.name} takes at most {room}{beside}"
        return wrong

    def _check(self, texts: Sequence[Prompt], tokens: list[list[int]], max_length: int) -> None:
        if not texts:
            raise ValueError("texts is empty; it must hold at least one text")
        for i, reason in self._unusable(texts, tokens, max_length).items():
            raise ValueError(f"texts[{i}] {reason}")


def _consecutive(batches: Iterable[Sequence[Prompt]]) -> Iterator[range]:
    """Yield the numbers of the texts of each batch, counted through all batches."""
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
    gguf_file: str | None = None,
    quantize: str | None = None,
) -> TextModel:
    """Load a model and its tokenizer, sequence-to-sequence or causal.

    Weights are read from safetensors or GGUF files only. A checkpoint whose parts do not fit
    together is refused with a ``ValueError``.

    Args:
        name: an embedded model (``en-fr``), a folder, or an id on the Hugging Face hub.
        device: where the model computes; a GPU if there is one, else the CPU.
        dtype: float32, float16, bfloat16 or float64, or "auto" for what the weights are stored in;
            float32 on a CPU and "auto" elsewhere if it is None.
        trust_remote_code: whether a model may bring code of its own, which would be run.
        gguf_file: the name of a GGUF file in the folder or repository, which is loaded instead of
            safetensors files, with quantised weights unpacked.
        quantize: "int8" rounds the weights of linear layers to eight bits, and their inputs while
            they are computed. On a CPU that is faster; no gradients go through it.
    """
    model, tokenizer = pretrained(name, device, dtype, trust_remote_code, gguf_file, quantize)
    return TextModel(_full_name(name, gguf_file), model, tokenizer)


def outline(
    name: str | Path, trust_remote_code: bool = False, gguf_file: str | None = None
) -> TextModel:
    """Load a model without its weights, which takes little time and memory.

    It tells how texts are tokenized and which of them the model can take, but draws nothing. The
    arguments are those of ``load``.
    """
    model, tokenizer = outlined(name, trust_remote_code, gguf_file)
    return TextModel(_full_name(name, gguf_file), model, tokenizer)


def _full_name(name: str | Path, gguf_file: str | None) -> str:
    return str(name) if gguf_file is None else f"{name}/{gguf_file}"
