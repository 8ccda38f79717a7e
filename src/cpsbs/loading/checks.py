"""Refuses checkpoints whose files lead elsewhere, or whose parts do not fit together.

Every function raises a ``ValueError`` that names the model and says what is wrong with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from cpsbs.loading.checkpoint import Checkpoint, is_plain, quoted

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""The dtypes that a model can compute in."""

UNLIMITED = 10**9
"""A maximal length from here on means that there is none; transformers itself writes 10³⁰."""

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"

_TOKENS = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 1,
    "suppress_tokens": 1,
    "begin_suppress_tokens": 1,
    "bad_words_ids": 2,
}
"""The settings that name tokens, with how deep lists of tokens may be nested in each."""

_OLD_BUFFERS = re.compile(r"\.(attn\.masked_bias|attention\.masked_bias|rotary_emb\.inv_freq)$")
"""The constants that older versions of transformers saved with the weights."""


def check_settings(checkpoint: Checkpoint) -> None:
    """Refuse adapters, missing settings, and settings that lead to files elsewhere."""
    if checkpoint.file("adapter_config.json") is not None:
        checkpoint.refuse(
            "which has an adapter_config.json: adapters are not loaded. Merge the adapter into "
            "the model that it belongs to (merge_and_unload in peft) and save that"
        )
    if checkpoint.gguf is not None:  # whose settings only transformers can read
        return
    settings = checkpoint.json("config.json")
    if settings is None:
        checkpoint.refuse("which has no config.json: it is not the folder of a transformers model")
    _check_plain(checkpoint, "config.json", "configuration_files", settings)
    # transformers silently ignores a generation_config.json that it cannot read.
    generation = checkpoint.json("generation_config.json") or {}
    for given in (settings, generation):
        _check_tokens(checkpoint, given, UNLIMITED)


def refuse_remote_code(checkpoint: Checkpoint, config: Any) -> None:
    """Refuse a configuration that would run code from the hub."""
    for level, part in enumerate(_parts(config)):
        kernel = getattr(part, "_attn_implementation", None)
        if isinstance(kernel, str) and "/" in kernel:
            checkpoint.refuse(
                f"whose {checkpoint.settings_file} asks for the attention {kernel!r}, which is "
                "code on the hub; it is run only with trust_remote_code"
            )
        if level and getattr(part, "auto_map", None):
            # transformers does not pass trust_remote_code on to the parts of a model: it would
            # ask the user at the terminal.
            part.auto_map = {}


def _parts(config: Any) -> Iterator[Any]:
    """Yield the configuration and those nested in it, of an encoder for example."""
    from transformers import PreTrainedConfig

    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def check_weight_files(checkpoint: Checkpoint, config: Any) -> None:
    """Refuse weights that are not safetensors or GGUF, or not among the model's own files."""
    if checkpoint.gguf is not None:
        return
    given = [getattr(part, "transformers_weights", None) for part in _parts(config)]
    named = [name for name in given if name is not None]
    for name in named:
        if not is_plain(name, (".safetensors", ".safetensors.index.json")):
            checkpoint.refuse(
                f"whose config.json has the transformers_weights {quoted(name)}; it must be the "
                "name of a .safetensors file in the same folder"
            )
    indices = {name for name in named if name.endswith(".json")}
    if given[0] is None and checkpoint.file(_WEIGHTS) is None:
        if checkpoint.file(_INDEX) is None:
            checkpoint.refuse(
                f"which has neither {_WEIGHTS} nor {_INDEX}, and weights are read from "
                "safetensors only. If you trust its files, load it with transformers and save it "
                "with save_pretrained"
            )
        indices.add(_INDEX)
    for index in indices:
        _check_index(checkpoint, index)


def _check_index(checkpoint: Checkpoint, index: str) -> None:
    """Refuse an index of shards that names files elsewhere."""
    content = checkpoint.json(index) or {}
    shards = content.get("weight_map")
    if not shards or not isinstance(shards, dict) or not isinstance(content.get("metadata"), dict):
        checkpoint.refuse(
            f"whose {index} lacks an object weight_map, from weights to files, or an object "
            "metadata"
        )
    for shard in shards.values():
        if not is_plain(shard, (".safetensors",)):
            checkpoint.refuse(
                f"whose {index} leads to {quoted(shard)}; it must name .safetensors files in the "
                "same folder"
            )


def _check_plain(
    checkpoint: Checkpoint, file: str, setting: str, settings: Mapping[str, Any]
) -> None:
    """Refuse a list of files for other versions of transformers that names files elsewhere."""
    names = settings.get(setting, [])
    if not isinstance(names, list) or not all(is_plain(name, (".json",)) for name in names):
        checkpoint.refuse(
            f"whose {file} has the {setting} {quoted(names)}; it must be a list of names of .json "
            "files in the same folder"
        )


def check_tokenizer_files(checkpoint: Checkpoint, config: Any) -> None:
    """Refuse classes that are not tokenizers, and maximal lengths that are not numbers."""
    from transformers import PreTrainedTokenizerBase
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    settings = checkpoint.json("tokenizer_config.json") or {}
    _check_plain(checkpoint, "tokenizer_config.json", "fast_tokenizer_files", settings)
    for name in (settings.get("tokenizer_class"), getattr(config, "tokenizer_class", None)):
        if name is None:
            continue
        kind = tokenizer_class_from_name(name) if isinstance(name, str) else object
        # A class that needs a package that is not installed raises an error when it is used.
        absent = kind is None or hasattr(kind, "_backends")
        if not absent and not (
            isinstance(kind, type) and issubclass(kind, PreTrainedTokenizerBase)
        ):
            checkpoint.refuse(f"whose tokenizer_class {quoted(name)} is not a class of tokenizers")
    length = settings.get("model_max_length")
    if length is not None and limit(length) is None and not _is_unlimited(length):
        checkpoint.refuse(
            f"whose tokenizer_config.json has the model_max_length {quoted(length)}; it must be a "
            "whole number of at least 1, or null"
        )


def limit(value: object) -> int | None:
    """Return a maximal number of tokens, or None where the value is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 1 <= value < UNLIMITED and value == int(value) else None


def _is_unlimited(value: object) -> bool:
    return isinstance(value, int | float) and value >= UNLIMITED


def check_weights(checkpoint: Checkpoint, model: Any, loading: Mapping[str, Any]) -> None:
    """Refuse weights that are not exactly those of the model that the configuration describes."""
    described = checkpoint.settings_file
    misfit = f"whose {described} does not fit its weights: "
    missing, surplus = sorted(loading["missing_keys"]), _surplus(model, loading)
    mismatched = sorted(loading["mismatched_keys"])
    if missing:
        checkpoint.refuse(
            f"{misfit}{_first(missing)} not in the weights, or it is not a model that generates "
            "text"
        )
    if surplus:
        checkpoint.refuse(f"{misfit}{_first(surplus)} in the weights but not in the model")
    if mismatched:
        key, stored, wanted = mismatched[0]
        names = [key for key, *_ in mismatched]
        checkpoint.refuse(
            f"{misfit}{_first(names)} of other shapes; {key} has the shape {list(stored)}, and "
            f"{described} asks for {list(wanted)}"
        )


def _surplus(model: Any, loading: Mapping[str, Any]) -> list[str]:
    """Return the weights that the model has no place for, except constants that it computes."""
    buffers = {name for name, _ in model.named_buffers()}
    modules = dict(model.named_modules())

    def is_constant(key: str) -> bool:
        if key in buffers or _OLD_BUFFERS.search(key):
            return True
        # The mask of causal attention used to be called a bias. A true bias belongs to a module
        # that has weights itself, and not only in its submodules.
        above, _, own = key.rpartition(".")
        module = modules.get(above)
        return own == "bias" and module is not None and not module._parameters

    prefix = f"{model.base_model_prefix}."
    unexpected = sorted(loading["unexpected_keys"])
    return [key for key in unexpected if not (is_constant(key) or is_constant(prefix + key))]


def _first(names: list[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more are"


def check_model(checkpoint: Checkpoint, model: Any) -> None:
    """Refuse a model that the search cannot use."""
    if getattr(model, "_is_stateful", False):
        checkpoint.refuse(
            f"a {type(model).__name__}: a model with a recurrent state cannot follow several "
            "hypotheses"
        )
    if model.dtype not in DTYPES:
        checkpoint.refuse(
            f"whose weights are {model.dtype}; give one of these as dtype: {dtype_names()}"
        )
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and limit(positions) is None and not _is_unlimited(positions):
        checkpoint.refuse(
            f"whose {checkpoint.settings_file} has the max_position_embeddings "
            f"{quoted(positions)}; it must be a whole number of at least 1"
        )


def dtype_names() -> str:
    """Return the names of the dtypes that a model can compute in, separated by commas."""
    return ", ".join(str(kind).removeprefix("torch.") for kind in DTYPES)


def check_vocabulary(checkpoint: Checkpoint, model: Any, tokenizer: Any) -> None:
    """Refuse a tokenizer, or settings, with tokens that the model does not have."""
    size = model.get_input_embeddings().weight.shape[0]
    if not 1 < len(tokenizer) <= size:
        checkpoint.refuse(
            f"whose tokenizer has {len(tokenizer)} tokens, where the model has {size}; does the "
            "folder hold the right tokenizer?"
        )
    last = max(tokenizer.get_vocab().values())
    if last >= size:
        checkpoint.refuse(
            f"whose tokenizer has a token {last}, where the model has tokens from 0 to {size - 1}; "
            "does the folder hold the right tokenizer?"
        )
    head = model.get_output_embeddings()
    outputs = size if head is None else head.weight.shape[0]
    for settings in (model.config.get_text_config(), model.generation_config):
        _check_tokens(checkpoint, settings.to_dict(), outputs)


def _check_tokens(checkpoint: Checkpoint, settings: Mapping[str, Any], size: int) -> None:
    """Refuse settings that should name tokens and do not."""
    files = "config.json or generation_config.json"
    for setting, depth in _TOKENS.items():
        value = settings.get(setting)
        if value is None:
            continue
        if not all(_is_token(token, size) for token in _items(value, depth)):
            known = f" to {size - 1}" if size < UNLIMITED else ""
            checkpoint.refuse(
                f"whose {files if checkpoint.gguf is None else checkpoint.settings_file} has the "
                f"{setting} {quoted(value)}; tokens are numbers from 0{known}"
            )


def _is_token(value: object, size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size


def _items(value: object, depth: int) -> Iterator[object]:
    """Yield the items of lists that are nested at most that deep."""
    if depth and isinstance(value, list):
        for item in value:
            yield from _items(item, depth - 1)
    else:
        yield value
