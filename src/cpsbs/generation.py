"""The search as a decoding method of transformers' ``generate``.

    model.generate(**inputs, custom_generate=cpsbs.generate, num_beams=10, max_new_tokens=64,
                   temperature=0.5, generator=g)

All that transformers prepares is honoured: attention masks, encoder outputs, logits processors,
stopping criteria, pad and end tokens. Unlike in transformers' own beam search, processors act on
the logits and the result is normalised again; the search samples from that distribution, cut off at
the maximal length. ``temperature`` and ``top_p`` need no ``do_sample=True``.

Settings that would change the method, or that the caller did not ask for, are refused: a length
penalty, the ``top_k=50`` that comes with ``do_sample=True``, and whatever the checkpoint's
generation config brings along. A streamer or an assistant model has no effect, because transformers
does not hand them to a decoding method of this kind.

With ``return_dict_in_generate=True`` the output also holds ``log_probs``, ``log_inclusion`` and
``log_weight`` of the returned sequences, and the ``beams`` themselves, for ``cpsbs.estimate``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cpsbs.designs import DEFAULT_DESIGN, Design
from cpsbs.extras import required
from cpsbs.models.transformers.adapter import TransformersModel
from cpsbs.models.transformers.inputs import NEUTRAL, inherited, refuse_empty
from cpsbs.models.transformers.moves import Moves, rows_of_value
from cpsbs.randomness import Generators
from cpsbs.search.api import search
from cpsbs.search.beams import Beams

required("transformers", "transformers")
from transformers.generation.utils import (  # noqa: E402
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
)


@dataclass
class StochasticBeamDecoderOnlyOutput(GenerateBeamDecoderOnlyOutput):
    """transformers' output for beams, with the probabilities and weights of the B·n sequences."""

    log_probs: Tensor | None = None
    log_inclusion: Tensor | None = None
    log_weight: Tensor | None = None
    beams: Beams | None = None


@dataclass
class StochasticBeamEncoderDecoderOutput(GenerateBeamEncoderDecoderOutput):
    """transformers' output for beams of encoder–decoder models, with probabilities and weights."""

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
    design: str | Design = DEFAULT_DESIGN,
    **model_kwargs: Any,
) -> Any:
    """Draw ``num_beams`` sequences for each input, as ``model.generate`` asks.

    Pass ``generator`` and ``design`` to ``model.generate``; ``cpsbs.search`` describes them. All
    ``num_beams`` sequences are returned, the most probable first, unless ``num_return_sequences``
    differs from transformers' default of 1.
    """
    config = generation_config
    refuse_empty(input_ids)
    _refuse(model, config)
    k = config.num_beams
    # transformers has repeated every input K times; the search needs it once.
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
        # With do_sample=True transformers has put both into the processors.
        temperature=1.0 if config.do_sample or config.temperature is None else config.temperature,
        nucleus=None if config.do_sample or config.top_p == 1.0 else config.top_p,
        generator=generator,
    )
    wanted = k if config.num_return_sequences == 1 else config.num_return_sequences
    return _output(model, config, inputs, beams, wanted)


def _refuse(model: Any, config: Any) -> None:
    """Raise a ``ValueError`` for settings that would change the method or its distribution."""
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
            "top_k is 50, which transformers sets by default with do_sample=True; leave do_sample "
            "out (temperature and top_p work without it), or pass top_k=0 or another number"
        )
    for name in ("top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"):
        value = getattr(config, name, None)
        if not config.do_sample and value is not None and value != NEUTRAL[name]:
            raise ValueError(
                f"{name} is {value}, which transformers applies only with do_sample=True; pass "
                "that as well, with top_k=0 unless you want to truncate to the top k"
            )
    for name in ("length_penalty", "num_beam_groups", "diversity_penalty"):
        value = getattr(config, name, None)
        if value is not None and value != NEUTRAL[name]:
            raise ValueError(f"{name} is {value}; it has no meaning for samples: leave it out")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise ValueError(f"{name} is True, but a search keeps none of that: leave it out")


def _output(model: Any, config: Any, inputs: TransformersModel, beams: Beams, wanted: int) -> Any:
    """Return what ``model.generate`` returns: sequences, or an output object that has them."""
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
