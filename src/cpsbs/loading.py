"""Loading of pretrained models: a checkpoint is data, and what does not fit together is refused.

The files of a checkpoint were written by somebody else. transformers follows some of the names in
them, even to pickles, and samples happily from weights that do not belong to the configuration.
So the names are checked before anything is loaded, and the model afterwards.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from cpsbs.extras import required

EMBEDDED = Path(__file__).parent / "embedded"
"""The models that come with the package, a folder each."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""The types of numbers that a model can compute in."""

UNLIMITED = 10**9
"""From here on a maximal length means that there is none; transformers itself writes 10³⁰."""

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
"""The settings that name tokens: one, or several in a list, or in a list of lists."""

_OLD_BUFFERS = re.compile(r"\.(attn\.masked_bias|attention\.masked_bias|rotary_emb\.inv_freq)$")
"""Constants that older versions of transformers saved with the weights."""


def embedded_models() -> list[str]:
    """Return the names of the models that come with the package."""
    return sorted(folder.parent.name for folder in EMBEDDED.glob("*/config.json"))


def pretrained(
    name: str | os.PathLike[str],
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
    trust_remote_code: bool,
) -> tuple[Any, Any]:
    """Return a transformers model on its device, and its tokenizer (see ``cpsbs.load``)."""
    required("transformers", "transformers")
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    place = _device(device)
    number = dtype_on(place, dtype)
    checkpoint = _find(name)
    config = _config(checkpoint, trust_remote_code)
    _check_weight_files(checkpoint, config)
    _check_tokenizer_files(checkpoint, config)
    options = {**checkpoint.options, "trust_remote_code": trust_remote_code, "config": config}
    kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with _told(checkpoint, "weights cannot be loaded into the model that config.json describes"):
        model, loading = kind.from_pretrained(
            checkpoint.where,
            dtype=number,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # these are refused below, with a better message
            **options,
        )
    _check_keys(checkpoint, model, loading)
    _check_model(checkpoint, model)
    with _told(checkpoint, "tokenizer cannot be loaded"):
        tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint.where, **options)
    _check_sizes(checkpoint, model, tokenizer)
    return model.to(place).eval(), tokenizer


@dataclass(frozen=True)
class _Checkpoint:
    """The files of a model: a folder, or one commit of a repository on the hub."""

    name: str
    """What the caller asked for."""
    where: str
    """The folder, or the id on the hub."""
    revision: str | None = None
    """The commit, so that what is loaded is what was checked."""

    @property
    def options(self) -> dict[str, Any]:
        """The arguments by which transformers finds the same files."""
        return {} if self.revision is None else {"revision": self.revision}

    def file(self, name: str) -> Path | None:
        """Return where a file is, after a download if need be, or None if there is none."""
        from transformers.utils.hub import cached_file

        with _told(self, f"{name} cannot be found"):
            found = cached_file(
                self.where, name, _raise_exceptions_for_missing_entries=False, **self.options
            )
        return None if found is None else Path(found)

    def json(self, name: str) -> dict[str, Any] | None:
        """Return the object in a JSON file, or None if there is no such file."""
        file = self.file(name)
        if file is None:
            return None
        with _told(self, f"{name} cannot be read"):
            content = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError(f"it holds a {type(content).__name__}, not an object")
        return content

    def refuse(self, reason: str, cause: BaseException | None = None) -> NoReturn:
        """Raise an error that begins with the model's name."""
        raise ValueError(f"name is {_quoted(self.name)}, {reason}") from cause


@contextmanager
def _told(checkpoint: _Checkpoint, what: str) -> Iterator[None]:
    """Turn whatever goes wrong, for many reasons in many libraries, into one kind of error."""
    try:
        yield
    except Exception as error:
        if "trust_remote_code" in str(error):
            checkpoint.refuse(
                "which brings code of its own; it is run only with trust_remote_code", error
            )
        checkpoint.refuse(f"whose {what}: {_reason(error)}", error)


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split())
    told = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return told if len(told) <= 300 else f"{told[:300]}…"


def _quoted(value: object) -> str:
    """Return the value as Python writes it, shortened so that a message stays readable."""
    written = repr(value)
    return written if len(written) <= 300 else f"{written[:100]}… ({len(written):,} characters)"


def _device(device: str | torch.device | None) -> torch.device:
    """Return the device, or the best that there is, if torch can use it here."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    accelerators = _accelerators()
    with suppress(RuntimeError, TypeError):  # torch cannot read it: it is refused below
        place = torch.device(device)
        on_cpu = place.type == "cpu" and not place.index
        if on_cpu or f"{place.type}:{place.index or 0}" in accelerators:
            return place
    asks_for_gpu = str(device).partition(":")[0] in ("cuda", "mps", "xpu")
    why = ", but torch finds no GPU here" if asks_for_gpu and not accelerators else ""
    raise ValueError(f"device is {device}{why}; available: {', '.join(['cpu', *accelerators])}")


def _accelerators() -> list[str]:
    kind = torch.accelerator.current_accelerator()
    if kind is None or not torch.accelerator.is_available():
        return []
    return [f"{kind.type}:{i}" for i in range(torch.accelerator.device_count())]


def configuration(name: str | os.PathLike[str], trust_remote_code: bool) -> Any:
    """Return the configuration of a model, of which nothing else is loaded."""
    required("transformers", "transformers")
    return _config(_find(name), trust_remote_code)


def dtype_on(place: torch.device, dtype: str | torch.dtype | None) -> str | torch.dtype:
    """Return the type of numbers that a model computes in on a device; "auto" is as stored."""
    if dtype is None:
        return torch.float32 if place.type == "cpu" else "auto"
    if dtype == "auto":
        return "auto"
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in DTYPES:
        raise ValueError(f"dtype is {dtype}; allowed are auto, {_dtype_names()}")
    return found


def _dtype_names() -> str:
    return ", ".join(str(kind).removeprefix("torch.") for kind in DTYPES)


def _find(name: str | os.PathLike[str]) -> _Checkpoint:
    """Return the checkpoint of that name: an embedded one, a folder, or one on the hub."""
    allowed = (
        f"allowed are {', '.join(embedded_models())}, the folder of a model, or an id on the "
        "Hugging Face hub"
    )
    given = os.fspath(name) if isinstance(name, str | os.PathLike) else name
    if not isinstance(given, str):
        raise ValueError(f"name is {_quoted(given)}; {allowed}")
    if given in embedded_models():
        return _Checkpoint(given, str(EMBEDDED / given))
    if os.path.isdir(given):  # unlike pathlib it takes names of any kind
        return _Checkpoint(given, given)
    if os.path.exists(given):
        raise ValueError(
            f"name is {_quoted(given)}; {allowed} (this is a file; give the folder that it is in)"
        )
    if _looks_like_a_path(given):
        raise ValueError(f"name is {_quoted(given)}; {allowed} (there is no such folder)")
    from transformers.utils.hub import cached_file, extract_commit_hash

    try:
        config = cached_file(given, "config.json")
    except Exception as error:
        raise ValueError(
            f"name is {_quoted(given)}; {allowed} (there is no such folder, and on the hub it was "
            f"not found: {_reason(error)})"
        ) from error
    return _Checkpoint(given, given, extract_commit_hash(config, None))


def _looks_like_a_path(name: str) -> bool:
    """Whether it cannot be an id on the hub, which has at most one slash."""
    return (
        name.startswith((".", "~")) or name.count("/") > 1 or bool(re.search(r"^/|/$|[\\\0]", name))
    )


def _config(checkpoint: _Checkpoint, trust_remote_code: bool) -> Any:
    """Return the configuration, if nothing in it would run code that nobody trusts."""
    from transformers import AutoConfig

    if checkpoint.file("adapter_config.json") is not None:
        checkpoint.refuse(
            "which has an adapter_config.json: adapters are not loaded. Merge the adapter into "
            "the model that it belongs to (merge_and_unload in peft) and save that"
        )
    settings = checkpoint.json("config.json")
    if settings is None:
        checkpoint.refuse("which has no config.json: it is no folder of a transformers model")
    _check_plain(checkpoint, "config.json", "configuration_files", settings)
    # transformers ignores this one if it cannot read it.
    generation = checkpoint.json("generation_config.json") or {}
    for given in (settings, generation):
        _check_tokens(checkpoint, given, UNLIMITED)
    with _told(checkpoint, "config.json cannot be used"):
        config = AutoConfig.from_pretrained(
            checkpoint.where, trust_remote_code=trust_remote_code, **checkpoint.options
        )
    if not trust_remote_code:
        for level, part in enumerate(_parts(config)):
            kernel = getattr(part, "_attn_implementation", None)
            if isinstance(kernel, str) and "/" in kernel:
                checkpoint.refuse(
                    f"whose config.json asks for the attention {kernel!r}, which is code on the "
                    "hub; it is run only with trust_remote_code"
                )
            if level and getattr(part, "auto_map", None):
                # transformers does not pass our no on to the parts of a model, but asks the user.
                part.auto_map = {}
    return config


def _parts(config: Any) -> Iterator[Any]:
    """Yield the configuration and those inside it, of an encoder for example."""
    from transformers import PreTrainedConfig

    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _check_weight_files(checkpoint: _Checkpoint, config: Any) -> None:
    """Refuse weights that are not in safetensors, or not among the model's own files."""
    given = [getattr(part, "transformers_weights", None) for part in _parts(config)]
    named = [name for name in given if name is not None]
    for name in named:
        if not _is_plain(name, (".safetensors", ".safetensors.index.json")):
            checkpoint.refuse(
                f"whose config.json has the transformers_weights {_quoted(name)}; allowed is the "
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


def _check_index(checkpoint: _Checkpoint, index: str) -> None:
    """Refuse an index of shards that leads elsewhere."""
    content = checkpoint.json(index) or {}
    shards = content.get("weight_map")
    if not shards or not isinstance(shards, dict) or not isinstance(content.get("metadata"), dict):
        checkpoint.refuse(
            f"whose {index} lacks an object weight_map, from weights to files, or an object "
            "metadata"
        )
    for shard in shards.values():
        if not _is_plain(shard, (".safetensors",)):
            checkpoint.refuse(
                f"whose {index} leads to {_quoted(shard)}; allowed are names of .safetensors "
                "files in the same folder"
            )


def _is_plain(name: object, endings: tuple[str, ...]) -> bool:
    """Whether it is the name of a file of that kind, without a path, on any system."""
    return isinstance(name, str) and name.endswith(endings) and not re.search(r"[/\\:\0]", name)


def _check_plain(
    checkpoint: _Checkpoint, file: str, setting: str, settings: Mapping[str, Any]
) -> None:
    """Refuse a list of files for other versions of transformers that leads elsewhere."""
    names = settings.get(setting, [])
    if not isinstance(names, list) or not all(_is_plain(name, (".json",)) for name in names):
        checkpoint.refuse(
            f"whose {file} has the {setting} {_quoted(names)}; allowed are names of .json files "
            "in the same folder"
        )


def _check_tokenizer_files(checkpoint: _Checkpoint, config: Any) -> None:
    """Refuse what transformers would load in the place of a tokenizer, and odd limits."""
    from transformers import PreTrainedTokenizerBase
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    settings = checkpoint.json("tokenizer_config.json") or {}
    _check_plain(checkpoint, "tokenizer_config.json", "fast_tokenizer_files", settings)
    for name in (settings.get("tokenizer_class"), getattr(config, "tokenizer_class", None)):
        if name is None:
            continue
        kind = tokenizer_class_from_name(name) if isinstance(name, str) else object
        # A class that needs a package that is not installed says so when it is used.
        absent = kind is None or hasattr(kind, "_backends")
        if not absent and not (
            isinstance(kind, type) and issubclass(kind, PreTrainedTokenizerBase)
        ):
            checkpoint.refuse(f"whose tokenizer_class {_quoted(name)} is no class of tokenizers")
    length = settings.get("model_max_length")
    if length is not None and limit(length) is None and not _is_unlimited(length):
        checkpoint.refuse(
            f"whose tokenizer_config.json has the model_max_length {_quoted(length)}; allowed is a "
            "whole number of at least 1, or null"
        )


def limit(value: object) -> int | None:
    """Return a maximal number of tokens, or None where the value is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 1 <= value < UNLIMITED and value == int(value) else None


def _is_unlimited(value: object) -> bool:
    return isinstance(value, int | float) and value >= UNLIMITED


def _check_keys(checkpoint: _Checkpoint, model: Any, loading: Mapping[str, Any]) -> None:
    """Refuse weights that are not exactly those of the model in config.json."""
    misfit = "whose config.json does not fit its weights: "
    missing, surplus = sorted(loading["missing_keys"]), _surplus(model, loading)
    mismatched = sorted(loading["mismatched_keys"])
    if missing:
        checkpoint.refuse(
            f"{misfit}{_first(missing)} not in the weights, or it is no model that generates text"
        )
    if surplus:
        checkpoint.refuse(f"{misfit}{_first(surplus)} in the weights but not in the model")
    if mismatched:
        key, stored, wanted = mismatched[0]
        names = [key for key, *_ in mismatched]
        checkpoint.refuse(
            f"{misfit}{_first(names)} of other shapes; {key} has the shape {list(stored)}, and "
            f"config.json asks for {list(wanted)}"
        )


def _surplus(model: Any, loading: Mapping[str, Any]) -> list[str]:
    """Return the weights that the model has no place for, but for constants that it computes."""
    buffers = {name for name, _ in model.named_buffers()}
    modules = dict(model.named_modules())

    def is_constant(key: str) -> bool:
        if key in buffers or _OLD_BUFFERS.search(key):
            return True
        # The mask of causal attention was called a bias. A bias proper belongs to a module that
        # has weights itself, and not only in modules below it.
        above, _, own = key.rpartition(".")
        module = modules.get(above)
        return own == "bias" and module is not None and not module._parameters

    prefix = f"{model.base_model_prefix}."
    unexpected = sorted(loading["unexpected_keys"])
    return [key for key in unexpected if not (is_constant(key) or is_constant(prefix + key))]


def _first(names: list[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more are"


def _check_model(checkpoint: _Checkpoint, model: Any) -> None:
    """Refuse what would be sampled from without making sense."""
    if getattr(model, "_is_stateful", False):
        checkpoint.refuse(
            f"a {type(model).__name__}: models with a recurrent state cannot follow several "
            "hypotheses"
        )
    if model.dtype not in DTYPES:
        checkpoint.refuse(
            f"whose weights are {model.dtype}; give one of these as dtype: {_dtype_names()}"
        )
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and limit(positions) is None and not _is_unlimited(positions):
        checkpoint.refuse(
            f"whose config.json has the max_position_embeddings {_quoted(positions)}; allowed is "
            "a whole number of at least 1"
        )


def _check_sizes(checkpoint: _Checkpoint, model: Any, tokenizer: Any) -> None:
    """Refuse tokens that the model does not have."""
    size = model.get_input_embeddings().weight.shape[0]
    if not 1 < len(tokenizer) <= size:
        checkpoint.refuse(
            f"whose tokenizer has {len(tokenizer)} tokens for {size} of the model; does the folder "
            "have the right one?"
        )
    last = max(tokenizer.get_vocab().values())
    if last >= size:
        checkpoint.refuse(
            f"whose tokenizer has a token {last}, where the model has tokens from 0 to {size - 1}; "
            "does the folder have the right one?"
        )
    head = model.get_output_embeddings()
    outputs = size if head is None else head.weight.shape[0]
    for settings in (model.config.get_text_config(), model.generation_config):
        _check_tokens(checkpoint, settings.to_dict(), outputs)


def _check_tokens(checkpoint: _Checkpoint, settings: Mapping[str, Any], size: int) -> None:
    """Refuse settings that name something else than tokens of the model."""
    for setting, depth in _TOKENS.items():
        value = settings.get(setting)
        if value is None:
            continue
        if not all(_is_token(token, size) for token in _items(value, depth)):
            known = f" to {size - 1}" if size < UNLIMITED else ""
            checkpoint.refuse(
                f"whose config.json or generation_config.json has the {setting} {_quoted(value)}; "
                f"allowed are numbers of tokens, from 0{known}"
            )


def _is_token(value: object, size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size


def _items(value: object, depth: int) -> Iterator[object]:
    """Yield what is in lists of at most that depth."""
    if depth and isinstance(value, list):
        for item in value:
            yield from _items(item, depth - 1)
    else:
        yield value
