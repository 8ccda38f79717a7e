"""The search as a decoding method of transformers' ``generate``.

    model.generate(**inputs, custom_generate=cpsbs.generate, num_beams=10, max_new_tokens=64,
                   generator=g)

What transformers prepares is honoured: attention masks, encoder outputs, processors, stopping
criteria, pad and end tokens. Processors act on the logits, and the result is normalised again,
unlike in transformers' own beam search; the distribution that is sampled from is that one, cut off
at the maximal length.

Refused are settings that would change the method or that the caller did not ask for: a length
penalty, ``top_k=50`` which comes with ``do_sample=True``, and whatever the checkpoint's generation
config brings along. A streamer and an assistant model never reach a decoding method of this kind:
transformers keeps them to itself, so they are without effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cpsbs.designs import Design
from cpsbs.extras import required
from cpsbs.models.transformers.adapter import TransformersModel
from cpsbs.models.transformers.inputs import NEUTRAL, inherited, refuse_empty
from cpsbs.models.transformers.moves import Moves, rows_of_value
from cpsbs.randomness import Generators
from cpsbs.search.beams import Beams
from cpsbs.search.recursion import search

required("transformers", "transformers")
from transformers.generation.utils import (  # noqa: E402
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
)


@dataclass
class StochasticBeamDecoderOnlyOutput(GenerateBeamDecoderOnlyOutput):
    """transformers' output for beams, and what the design knows of them; [B·n] as the sequences."""

    log_probs: Tensor | None = None
    log_inclusion: Tensor | None = None
    log_weight: Tensor | None = None
    beams: Beams | None = None


@dataclass
class StochasticBeamEncoderDecoderOutput(GenerateBeamEncoderDecoderOutput):
    """The same for encoder–decoder models."""

    log_probs: Tensor | None = None
    log_inclusion: Tensor | None = None
    log_weight: Tensor | None = None
    beams: Beams | None = None


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    generator: Generators = None,
    design: str | Design = "conditional-poisson",
    **model_kwargs: Any,
) -> Any:
    """Draw ``num_beams`` different sequences for each input; called by ``model.generate``.

    ``generator`` and ``design`` are given to ``model.generate``; see ``cpsbs.search`` for them. All
    ``num_beams`` sequences are returned, the most probable first, unless ``num_return_sequences``
    is another number than transformers' default of 1.
    """
    config = generation_config
    refuse_empty(input_ids)
    _refuse(model, config)
    k = config.num_beams
    # transformers has repeated every input K times.
    first = torch.arange(0, len(input_ids), k, device=input_ids.device)
    kwargs = {name: rows_of_value(value, Moves(first)) for name, value in model_kwargs.items()}
    inputs = TransformersModel.from_generate(
        model,
        input_ids=input_ids[first],
        config=config,
        processors=logits_processor,
        criteria=stopping_criteria,
        kwargs=kwargs,
    )
    beams = search(
        inputs,
        k,
        design,
        max_length=config.max_length - input_ids.shape[-1],
        generator=generator,
    )
    wanted = k if config.num_return_sequences == 1 else config.num_return_sequences
    return _output(model, config, inputs, beams, wanted)


def _refuse(model: Any, config: Any) -> None:
    if any(module.training for module in model.modules()):
        # The encoder, if there is one, has run already.
        raise ValueError(
            "model is in training mode, in which dropout changes its distribution at every call; "
            "call model.eval() before model.generate()"
        )
    if config.num_beams < max(1, config.num_return_sequences or 1):
        raise ValueError(
            f"num_beams is {config.num_beams}; it must be at least num_return_sequences = "
            f"{config.num_return_sequences}"
        )
    brought = inherited(model, config)
    if brought:
        settings = ", ".join(f"{name}={value}" for name, value in brought.items())
        instead = ", ".join(f"{name}={NEUTRAL[name]}" for name in brought)
        raise ValueError(
            f"model.generation_config brings {settings}, which changes the distribution; pass "
            f"{instead} to leave it out, or set it in model.generation_config to None and pass it"
        )
    if config.do_sample and config.top_k == NEUTRAL["top_k"]:
        raise ValueError(
            "top_k is 50, which transformers brings with do_sample=True; the design samples by "
            "itself: leave do_sample out, or pass top_k=0 (or another number) if you want its "
            "temperature or top_p"
        )
    if not config.do_sample and config.temperature not in (None, 1.0):
        raise ValueError(
            f"temperature is {config.temperature}, which transformers honours only with "
            "do_sample=True; pass do_sample=True and top_k=0 as well"
        )
    for name in ("length_penalty", "num_beam_groups", "diversity_penalty"):
        value = getattr(config, name, None)
        if value is not None and value != NEUTRAL[name]:
            raise ValueError(f"{name} is {value}; it has no meaning for samples, leave it out")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise ValueError(f"{name} is True; it is not available from stochastic beams")


def _output(model: Any, config: Any, inputs: TransformersModel, beams: Beams, wanted: int) -> Any:
    rows = beams.present[:, :wanted].flatten().nonzero()[:, 0]

    def flat(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[:, :wanted].flatten(0, 1)[rows]

    generated = flat(beams.sequences)
    assert generated is not None
    source = rows // min(wanted, beams.k)
    sequences = torch.cat([inputs.prompt[source], generated], dim=-1)
    if not config.return_dict_in_generate:
        return sequences
    kind: Any = (
        StochasticBeamEncoderDecoderOutput
        if model.config.is_encoder_decoder
        else StochasticBeamDecoderOnlyOutput
    )
    return kind(
        sequences=sequences,
        sequences_scores=flat(beams.log_prob),
        log_probs=flat(beams.log_prob),
        log_inclusion=flat(beams.log_inclusion),
        log_weight=flat(beams.log_weight),
        beams=beams,
    )
