"""Loads a model and its tokenizer through transformers, with every check before and after."""

from __future__ import annotations

import io
import json
import os
from contextlib import AbstractContextManager, nullcontext, redirect_stderr, suppress
from typing import Any

import torch

from cpsbs.extras import required
from cpsbs.loading.checkpoint import Checkpoint, find
from cpsbs.loading.checks import (
    DTYPES,
    check_model,
    check_settings,
    check_tokenizer_files,
    check_vocabulary,
    check_weight_files,
    check_weights,
    dtype_names,
    refuse_remote_code,
)


def pretrained(
    name: str | os.PathLike[str],
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
    trust_remote_code: bool,
    gguf_file: str | None = None,
    quantize: str | None = None,
) -> tuple[Any, Any]:
    """Return a transformers model on its device, and its tokenizer (see ``cpsbs.load``)."""
    required("transformers", "transformers")
    place = _device(device)
    number = dtype_on(place, dtype)
    _check_quantize(quantize, place, number)
    checkpoint, config, kind = _found(name, trust_remote_code, gguf_file)
    options = {**checkpoint.options, "trust_remote_code": trust_remote_code, "config": config}
    described = checkpoint.settings_file
    problem = f"weights cannot be loaded into the model of {described}"
    with checkpoint.explaining(problem), _progress_bars(checkpoint):
        model, loading = kind.from_pretrained(
            checkpoint.where,
            dtype=number,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # check_weights refuses these with a better message
            **_dequantized(checkpoint),
            **options,
        )
    check_weights(checkpoint, model, loading)
    check_model(checkpoint, model)
    tokenizer = _tokenizer(checkpoint, model, options)
    if quantize is not None:
        from cpsbs.models.transformers import int8

        int8.quantize(model)
    return model.to(place).eval(), tokenizer


def outlined(
    name: str | os.PathLike[str], trust_remote_code: bool, gguf_file: str | None = None
) -> tuple[Any, Any]:
    """Return a transformers model without weights, and its tokenizer (see ``cpsbs.text.outline``).

    The model is on the device "meta": it has shapes and a configuration, and cannot compute.
    """
    required("transformers", "transformers")
    checkpoint, config, kind = _found(name, trust_remote_code, gguf_file)
    with checkpoint.explaining(f"{checkpoint.settings_file} cannot be used"), torch.device("meta"):
        model = kind.from_config(config, trust_remote_code=trust_remote_code)
    options = {**checkpoint.options, "trust_remote_code": trust_remote_code, "config": config}
    return model.eval(), _tokenizer(checkpoint, model, options)


def configuration(
    name: str | os.PathLike[str], trust_remote_code: bool, gguf_file: str | None = None
) -> Any:
    """Return the configuration of a model, without loading anything else."""
    required("transformers", "transformers")
    return _config(find(name, gguf_file), trust_remote_code)


def _config(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    """Return the configuration, unless it would run code that the caller does not trust."""
    from transformers import AutoConfig

    check_settings(checkpoint)
    with checkpoint.explaining(f"{checkpoint.settings_file} cannot be used"):
        config = AutoConfig.from_pretrained(
            checkpoint.where, trust_remote_code=trust_remote_code, **checkpoint.options
        )
    if not trust_remote_code:
        refuse_remote_code(checkpoint, config)
    if checkpoint.revision is not None:
        # For fingerprints; transformers noted it here itself in some releases, and no longer does.
        config._commit_hash = checkpoint.revision
    return config


def _found(
    name: str | os.PathLike[str], trust_remote_code: bool, gguf_file: str | None
) -> tuple[Checkpoint, Any, Any]:
    """Return a checkpoint whose files may be loaded, its configuration, and the class to use."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    if gguf_file is not None:
        for package in ("gguf", "accelerate"):  # transformers needs both to read GGUF files
            required(package, "gguf")
    checkpoint = find(name, gguf_file)
    config = _config(checkpoint, trust_remote_code)
    check_weight_files(checkpoint, config)
    check_tokenizer_files(checkpoint, config)
    kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return checkpoint, config, kind


def _tokenizer(checkpoint: Checkpoint, model: Any, options: dict[str, Any]) -> Any:
    """Return the tokenizer, if it belongs to the model."""
    from transformers import AutoTokenizer

    with checkpoint.explaining("tokenizer cannot be loaded"), _progress_bars(checkpoint):
        tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint.where, **options)
        if checkpoint.gguf is not None:
            _name_special_tokens(tokenizer, options["config"])
            if checkpoint.file("tokenizer.json") is None:  # it was made from the GGUF file
                _drop_added_tokens(tokenizer, model.get_input_embeddings().weight.shape[0])
    check_vocabulary(checkpoint, model, tokenizer)
    return tokenizer


def _dequantized(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the option that unpacks quantised GGUF weights, which is the only way to use them.

    Otherwise recent versions of transformers download kernels from the hub, which is remote code.
    """
    if checkpoint.gguf is None:
        return {}
    try:
        from transformers import GgufConfig
    except ImportError:  # before that class existed, weights were always unpacked
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _progress_bars(checkpoint: Checkpoint) -> AbstractContextManager[Any]:
    """Hide progress bars where transformers should not show any; its GGUF reader shows them."""
    from transformers.utils import logging

    if checkpoint.gguf is None or logging.is_progress_bar_enabled():
        return nullcontext()
    return redirect_stderr(io.StringIO())


def _name_special_tokens(tokenizer: Any, config: Any) -> None:
    """Give the tokenizer the special tokens of the configuration.

    For Llama, transformers makes the first special token of a GGUF file the last one, too.
    """
    for name in ("bos_token", "eos_token"):
        token = getattr(config, f"{name}_id", None)
        if isinstance(token, int) and 0 <= token < len(tokenizer):
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token))


def _drop_added_tokens(tokenizer: Any, size: int) -> None:
    """Remove the tokens that the tokenizer has beyond those of its GGUF file.

    Recent versions of transformers add the special tokens that a class of tokenizers has by
    default, such as ``<s>`` or ``<|endoftext|>``, to a file that calls its own otherwise. The model
    has no embedding for them, and a text that spells one out would be encoded as that token.

    Args:
        tokenizer: the tokenizer, which is changed in place.
        size: the number of tokens of the model.
    """
    if len(tokenizer) <= size:
        return
    from tokenizers import Tokenizer

    stored = json.loads(tokenizer.backend_tokenizer.to_str())
    stored["added_tokens"] = [token for token in stored["added_tokens"] if token["id"] < size]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(stored))
    if tokenizer.add_bos_token or tokenizer.add_eos_token:
        tokenizer.update_post_processor()  # it may have added one that is gone


def _device(device: str | torch.device | None) -> torch.device:
    """Return the device if torch can use it here; by default a GPU if there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    accelerators = _accelerators()
    with suppress(RuntimeError, TypeError):  # torch cannot parse it: it is refused below
        place = torch.device(device)
        on_cpu = place.type == "cpu" and not place.index
        if on_cpu or f"{place.type}:{place.index or 0}" in accelerators:
            return place
    asks_for_gpu = str(device).partition(":")[0] in ("cuda", "mps", "xpu")
    why = ", but torch finds no GPU here" if asks_for_gpu and not accelerators else ""
    raise ValueError(f"device is {device}{why}; available: {', '.join(['cpu', *accelerators])}")


def _check_quantize(quantize: str | None, place: torch.device, dtype: str | torch.dtype) -> None:
    """Raise a ValueError unless weights can be rounded as asked for."""
    if quantize is None:
        return
    if quantize != "int8":
        raise ValueError(f"quantize is {quantize!r}; allowed are None and 'int8'")
    if place.type != "cpu" or dtype != torch.float32:
        raise ValueError(
            f"quantize is 'int8', but the device is {place} and the dtype {dtype}; int8 weights "
            "need the CPU and float32"
        )


def _accelerators() -> list[str]:
    kind = torch.accelerator.current_accelerator()
    if kind is None or not torch.accelerator.is_available():
        return []
    return [f"{kind.type}:{i}" for i in range(torch.accelerator.device_count())]


def dtype_on(place: torch.device, dtype: str | torch.dtype | None) -> str | torch.dtype:
    """Return the dtype that a model computes in on a device; "auto" means as stored."""
    if dtype is None:
        return torch.float32 if place.type == "cpu" else "auto"
    if dtype == "auto":
        return "auto"
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in DTYPES:
        raise ValueError(f"dtype is {dtype}; allowed are auto, {dtype_names()}")
    return found
