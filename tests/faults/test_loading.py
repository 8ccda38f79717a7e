"""Checkpoints that are broken, that do not fit together, or that want to run something."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import BertConfig, EncoderDecoderConfig, T5Config

import cpsbs
from cpsbs.fingerprint import model_fingerprint
from cpsbs.loading.loader import configuration
from tests.models.folders import WORDS, hub_cache, tiny_folder, with_settings

SIZE = len(WORDS) + 3

Copy = Callable[[str], Path]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {kind: tiny_folder(base / kind, kind) for kind in ("gpt2", "llama", "marian", "t5")}


@pytest.fixture
def copy(originals: dict[str, Path], tmp_path: Path) -> Copy:
    """A model's folder that a test may spoil."""

    def copied(kind: str) -> Path:
        return Path(shutil.copytree(originals[kind], tmp_path / kind, dirs_exist_ok=True))

    return copied


class Evil:
    """When it is unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a pickle that leaves a mark; in the end there must be none, and no torch.load."""
    mark = tmp_path / "mark"

    def write(file: Path) -> None:
        file.write_bytes(pickle.dumps(Evil(mark)))

    def refuse(*_: Any, **__: Any) -> None:
        called.append(True)
        raise AssertionError("torch.load was called")

    called: list[bool] = []
    write(tmp_path / "check")
    pickle.loads((tmp_path / "check").read_bytes())
    assert mark.exists()
    mark.unlink()
    monkeypatch.setattr(torch, "load", refuse)
    yield write
    assert not called
    assert not mark.exists()


def sharded(folder: Path, shard: Any, index: str = "model.safetensors.index.json") -> Path:
    """Replace the weights by an index that leads to one shard."""
    keys = load_file(folder / "model.safetensors").keys()
    (folder / "model.safetensors").rename(folder / "good.safetensors")
    content = {"metadata": {}, "weight_map": dict.fromkeys(keys, shard)}
    (folder / index).write_text(json.dumps(content))
    return folder


def reweighted(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Change the weights in the folder."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def drawn(folder: Path) -> list[list[int]]:
    beams = cpsbs.load(folder, device="cpu").beams(["the dog sees"], 3, max_length=5, seed=0)
    return beams.tokens(0)


# Nothing but safetensors


@pytest.mark.parametrize(
    "shard",
    [
        "good.bin",
        "../good.bin",
        "../good.safetensors",
        "..\\good.safetensors",
        "C:good.safetensors",
        "/tmp/good.safetensors",
        "below/good.safetensors",
        "good.safetensors\0.bin",
        "",
        3,
        None,
        ["good.safetensors"],
    ],
)
def test_an_index_leads_to_safetensors_files_beside_it_only(
    copy: Copy, evil: Any, shard: Any
) -> None:
    folder = sharded(copy("gpt2"), shard)
    for place in (folder, folder.parent):
        evil(place / "good.bin")
    with pytest.raises(ValueError, match=r"whose model\.safetensors\.index\.json leads to"):
        cpsbs.load(folder)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        "{}",
        '{"weight_map": {}, "metadata": {}}',
        '{"weight_map": ["a.safetensors"], "metadata": {}}',
        '{"weight_map": {"a": "a.safetensors"}}',
    ],
)
def test_an_index_of_another_shape_is_refused(copy: Copy, evil: Any, content: str) -> None:
    folder = copy("gpt2")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"whose model\.safetensors\.index\.json "):
        cpsbs.load(folder)


def test_shards_that_are_what_they_should_be_are_loaded(copy: Copy, evil: Any) -> None:
    whole = drawn(copy("gpt2"))
    assert drawn(sharded(copy("gpt2"), "good.safetensors")) == whole


@pytest.mark.parametrize("name", ["adapter_model.bin", "../good.safetensors", 5])
@pytest.mark.parametrize("level", ["top", "nested", "renamed"])
def test_the_config_names_safetensors_files_only(
    copy: Copy, evil: Any, name: Any, level: str
) -> None:
    folder = copy("gpt2")
    for place in (folder, folder.parent):
        evil(place / "adapter_model.bin")
        shutil.copy(folder / "model.safetensors", place / "good.safetensors")
    changes: dict[str, Any] = {"transformers_weights": name}
    if level == "nested":
        changes = {
            "model_type": "qwen3_5",
            "text_config": {"model_type": "qwen3_5_text", **changes},
        }
    elif level == "renamed":
        changes = {"attribute_map": {"transformers_weights": "other"}, "other": name}
    with_settings(folder, "config.json", **changes)
    with pytest.raises(ValueError, match=r"whose config\.json has the transformers_weights"):
        cpsbs.load(folder)


def test_an_index_that_the_config_names_is_checked_too(copy: Copy, evil: Any) -> None:
    folder = sharded(copy("gpt2"), "good.bin", "other.safetensors.index.json")
    evil(folder / "good.bin")
    with_settings(folder, "config.json", transformers_weights="other.safetensors.index.json")
    with pytest.raises(ValueError, match=r"whose other\.safetensors\.index\.json leads to"):
        cpsbs.load(folder)


def test_a_safetensors_file_that_the_config_names_is_loaded(copy: Copy, evil: Any) -> None:
    whole = drawn(copy("gpt2"))
    folder = copy("gpt2")
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert (
        drawn(with_settings(folder, "config.json", transformers_weights="other.safetensors"))
        == whole
    )


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf", "model.h5"])
def test_weights_of_other_kinds_are_refused(copy: Copy, evil: Any, name: str) -> None:
    folder = copy("gpt2")
    (folder / "model.safetensors").unlink()
    evil(folder / name)
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor .* safetensors only"):
        cpsbs.load(folder)


def test_adapters_are_refused(copy: Copy, evil: Any, originals: dict[str, Path]) -> None:
    folder = copy("gpt2")
    base = str(originals["gpt2"])
    with_settings(folder, "adapter_config.json", base_model_name_or_path=base, peft_type="LORA")
    evil(folder / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"which has an adapter_config\.json"):
        cpsbs.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"which has an adapter_config\.json"):
        cpsbs.load(folder)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize(
    "name", ["RagRetriever", "GPT2LMHeadModel", "AutoModelFast", "pipeline", 5]
)
def test_only_a_tokenizer_is_loaded_as_tokenizer(
    copy: Copy, evil: Any, file: str, name: Any
) -> None:
    folder = copy("gpt2")
    if file == "config.json":
        with_settings(folder, "tokenizer_config.json", tokenizer_class=None)
    with_settings(folder, file, tokenizer_class=name)
    with pytest.raises(ValueError, match="tokenizer_class"):
        cpsbs.load(folder)


@pytest.mark.parametrize(
    ("file", "setting", "elsewhere"),
    [
        ("config.json", "configuration_files", "../config.4.0.0.json"),
        ("tokenizer_config.json", "fast_tokenizer_files", "../tokenizer.4.0.0.json"),
    ],
)
def test_settings_for_other_versions_are_in_the_folder(
    copy: Copy, file: str, setting: str, elsewhere: str
) -> None:
    folder = copy("gpt2")
    source = "config.json" if file == "config.json" else "tokenizer.json"
    shutil.copy(folder / source, folder / elsewhere)
    with_settings(folder, file, **{setting: [elsewhere]})
    with pytest.raises(ValueError, match=f"{setting} .* names of .json files"):
        cpsbs.load(folder)


CODE = "import pathlib\npathlib.Path({mark!r}).touch()\nclass Own: pass\n"


def test_code_of_a_model_is_not_run(copy: Copy, evil: Any, tmp_path: Path) -> None:
    folder = copy("gpt2")
    (folder / "own.py").write_text(CODE.format(mark=str(tmp_path / "mark")))
    (folder / "custom_generate").mkdir()
    shutil.copy(folder / "own.py", folder / "custom_generate" / "generate.py")
    auto: dict[str, Any] = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    auto["AutoTokenizer"] = ["own.Own", "own.Own"]
    with_settings(folder, "tokenizer_config.json", auto_map=auto, tokenizer_class="Own")
    with_settings(folder, "config.json", auto_map=auto)
    assert drawn(folder)  # by the code of transformers, which knows a GPT-2
    with_settings(folder, "config.json", model_type="own")
    with pytest.raises(ValueError, match="which brings code of its own; it is run only with"):
        cpsbs.load(folder)


def test_code_of_a_part_of_a_model_is_not_run_nor_asked_for(
    copy: Copy, evil: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: "y")
    folder = copy("gpt2")
    code = tmp_path / "code"
    code.mkdir()
    (code / "own.py").write_text(CODE.format(mark=str(tmp_path / "mark")))
    config: Any = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(), T5Config())
    settings = config.to_dict()
    # transformers knows no T5 that is only a decoder.
    settings["decoder"] |= {
        "auto_map": {"AutoModelForCausalLM": "own.Own"},
        "_name_or_path": str(code),
        "name_or_path": str(code),
    }
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        cpsbs.load(folder)


@pytest.mark.parametrize("setting", ["attn_implementation", "_attn_implementation"])
def test_kernels_on_the_hub_are_not_run(copy: Copy, evil: Any, setting: str) -> None:
    folder = with_settings(copy("gpt2"), "config.json", **{setting: "somebody/kernel"})
    with pytest.raises(ValueError, match="'somebody/kernel', which is code on the hub"):
        cpsbs.load(folder)


# The hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no network."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def test_a_model_of_the_hub_is_loaded_from_its_cache(copy: Copy, evil: Any, hub: Path) -> None:
    folder = sharded(copy("gpt2"), "good.safetensors")
    hub_cache(folder, hub, "some/model")
    model = cpsbs.load("some/model", device="cpu")
    assert model.name == "some/model"
    assert model_fingerprint(model.name, model.model.config) == f"some/model@{'a' * 40}"
    config = configuration(model.name, trust_remote_code=False)
    assert model_fingerprint(model.name, config) == f"some/model@{'a' * 40}"
    beams = model.beams(["the dog sees"], 3, max_length=5, seed=0)
    assert beams.tokens(0) == drawn(folder)


@pytest.mark.parametrize("shard", ["good.bin", "../good.bin", "../../blobs/good.bin"])
def test_a_model_of_the_hub_is_checked_like_a_folder(
    copy: Copy, evil: Any, hub: Path, shard: str
) -> None:
    folder = sharded(copy("gpt2"), shard)
    evil(folder / "good.bin")
    hub_cache(folder, hub, "some/model")
    with pytest.raises(ValueError, match=r"name is 'some/model', whose .* leads to"):
        cpsbs.load("some/model")


def test_other_files_of_the_hub_are_refused_as_in_a_folder(
    copy: Copy, evil: Any, hub: Path
) -> None:
    folder = copy("gpt2")
    evil(folder / "adapter_model.bin")
    with_settings(folder, "config.json", transformers_weights="adapter_model.bin")
    hub_cache(folder, hub, "some/named")
    with pytest.raises(ValueError, match=r"transformers_weights 'adapter_model\.bin'"):
        cpsbs.load("some/named")
    with_settings(folder, "adapter_config.json", base_model_name_or_path="some/named")
    hub_cache(folder, hub, "some/adapter")
    with pytest.raises(ValueError, match=r"which has an adapter_config\.json"):
        cpsbs.load("some/adapter")


def test_what_is_loaded_is_the_commit_that_was_checked(
    copy: Copy, evil: Any, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    hub_cache(copy("gpt2"), hub, "some/model")
    given: list[Any] = []
    original = AutoModelForCausalLM.from_pretrained

    def noting(*args: Any, **kwargs: Any) -> Any:
        given.append(kwargs["revision"])
        return original(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", noting)
    cpsbs.load("some/model")
    assert given == ["a" * 40]


# Weights and config


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("marian", "decoder_layers"),
        ("marian", "encoder_layers"),
        ("gpt2", "n_layer"),
        ("llama", "num_hidden_layers"),
        ("t5", "num_decoder_layers"),
    ],
)
@pytest.mark.parametrize("layers", [1, -1, 3])
def test_another_number_of_layers_is_refused(
    copy: Copy, kind: str, setting: str, layers: int
) -> None:
    folder = with_settings(copy(kind), "config.json", **{setting: layers})
    with pytest.raises(ValueError, match=r"config\.json"):
        cpsbs.load(folder)


def test_the_first_weight_that_does_not_fit_is_named_and_the_others_counted(copy: Copy) -> None:
    folder = with_settings(copy("marian"), "config.json", decoder_layers=1)
    weights = load_file(folder / "model.safetensors")
    others = [key for key in weights if ".decoder.layers.1." in key]
    message = (
        f"whose config.json does not fit its weights: {min(others)} and {len(others) - 1} more "
        "are in the weights but not in the model"
    )
    with pytest.raises(ValueError, match=message):
        cpsbs.load(folder)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "marian",
            {"vocab_size": 20, "decoder_vocab_size": 20},
            r"has the shape \[1, 15\], and config.json asks for \[1, 20\]",
        ),
        ("gpt2", {"vocab_size": 14}, r"transformer.wte.weight is|transformer.wte.weight and"),
        ("gpt2", {"n_positions": 128}, r"transformer.wpe.weight is of other shapes"),
        ("llama", {"intermediate_size": 40}, "of other shapes"),
        ("t5", {"d_ff": 40}, "of other shapes"),
        ("t5", {"is_gated_act": True, "feed_forward_proj": "gated-gelu"}, "not in the weights"),
        ("marian", {"is_encoder_decoder": False}, "not in the weights"),
    ],
)
def test_shapes_and_parts_that_do_not_fit_are_refused(
    copy: Copy, kind: str, changes: dict[str, Any], message: str
) -> None:
    folder = with_settings(copy(kind), "config.json", **changes)
    with pytest.raises(ValueError, match=f"config.json does not fit its weights: .*({message})"):
        cpsbs.load(folder)


def test_one_surplus_weight_is_refused(copy: Copy) -> None:
    def change(weights: dict[str, Any]) -> None:
        weights["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)

    folder = reweighted(copy("llama"), change)
    with pytest.raises(ValueError, match=r"q_proj\.bias is in the weights but not in the model"):
        cpsbs.load(folder)


@pytest.mark.parametrize(
    ("kind", "key", "shape"),
    [
        ("gpt2", "transformer.h.0.attn.bias", (1, 1, 64, 64)),
        ("gpt2", "transformer.h.0.attn.masked_bias", ()),
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", (4,)),
        ("llama", "model.layers.1.self_attn.bias", (1, 1, 64, 64)),
        ("t5", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight", (32, 4)),
    ],
)
def test_constants_that_were_saved_once_are_harmless(
    copy: Copy, kind: str, key: str, shape: tuple[int, ...]
) -> None:
    before = drawn(copy(kind))
    assert (
        drawn(reweighted(copy(kind), lambda weights: weights.update({key: torch.ones(shape)})))
        == before
    )


@pytest.mark.parametrize(
    ("kind", "source", "copies"),
    [
        ("gpt2", "transformer.wte.weight", ["lm_head.weight"]),
        ("t5", "shared.weight", ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]),
        ("marian", "model.shared.weight", ["model.encoder.embed_tokens.weight", "lm_head.weight"]),
    ],
)
def test_tied_weights_may_be_stored_more_than_once(
    copy: Copy, kind: str, source: str, copies: list[str]
) -> None:
    def change(weights: dict[str, Any]) -> None:
        assert not set(copies) & weights.keys()
        weights.update({key: weights[source].clone() for key in copies})

    before = drawn(copy(kind))
    assert drawn(reweighted(copy(kind), change)) == before


def test_all_tiny_models_are_loaded(originals: dict[str, Path]) -> None:
    for folder in originals.values():
        assert len(drawn(folder)) == 3


# Settings


@pytest.mark.parametrize("length", ["big", -5, 0, 1.5, float("nan"), [64], {}, True])
def test_a_maximal_length_that_is_none_is_refused(copy: Copy, length: Any) -> None:
    folder = with_settings(copy("gpt2"), "tokenizer_config.json", model_max_length=length)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json has the model_max_length"):
        cpsbs.load(folder)


@pytest.mark.parametrize(
    ("length", "longest"),
    [(None, 64), (10**30, 64), (1e30, 64), (32, 32), (32.0, 32), (float("inf"), 64)],
)
def test_a_maximal_length_may_be_absent_or_huge(copy: Copy, length: Any, longest: int) -> None:
    folder = with_settings(copy("gpt2"), "tokenizer_config.json", model_max_length=length)
    model = cpsbs.load(folder)
    assert model.longest == longest
    assert isinstance(model.longest, int)


SETTINGS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("value", [SIZE, -1, "1"])
def test_tokens_outside_the_vocabulary_are_refused(
    copy: Copy, file: str, setting: str, value: Any
) -> None:
    folder = copy("marian")
    if file == "config.json":
        (folder / "generation_config.json").unlink()
    with_settings(folder, file, **{setting: value})
    with pytest.raises(ValueError, match=f"config.json.*({setting}|Padding_idx)"):
        cpsbs.load(folder)


@pytest.mark.parametrize("value", [[1, SIZE], [1, "2"], [-1], [[1]], {"a": 1}])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_lists_of_final_tokens_are_checked(copy: Copy, file: str, value: Any) -> None:
    folder = with_settings(copy("llama"), file, eos_token_id=value)
    with pytest.raises(ValueError, match=r"config\.json .*eos_token_id"):
        cpsbs.load(folder)


def test_a_list_of_final_tokens_is_taken(copy: Copy) -> None:
    folder = with_settings(copy("llama"), "config.json", eos_token_id=[1, 2])
    model = cpsbs.load(with_settings(folder, "generation_config.json", eos_token_id=[1, 2]))
    assert model.sequence_model(["the dog"]).eos == (1, 2)


@pytest.mark.parametrize("setting", ["suppress_tokens", "begin_suppress_tokens", "bad_words_ids"])
def test_forbidden_tokens_outside_the_vocabulary_are_refused(copy: Copy, setting: str) -> None:
    tokens: Any = [[SIZE]] if setting == "bad_words_ids" else [SIZE]
    folder = with_settings(copy("llama"), "generation_config.json", **{setting: tokens})
    with pytest.raises(
        ValueError, match=rf"generation_config\.json has the {setting} .* from 0 to 14"
    ):
        cpsbs.load(folder)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "marian"])
@pytest.mark.parametrize("value", ["64", 0, -1, 64.5, [64]])
def test_odd_numbers_of_positions_are_refused(copy: Copy, kind: str, value: Any) -> None:
    setting = "n_positions" if kind == "gpt2" else "max_position_embeddings"
    folder = with_settings(copy(kind), "config.json", **{setting: value})
    with pytest.raises(ValueError, match=r"config\.json"):
        cpsbs.load(folder)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_settings_that_are_no_json_object_are_told(copy: Copy, file: str, content: bytes) -> None:
    folder = copy("gpt2")
    (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"whose {file} cannot be read"):
        cpsbs.load(folder)


# Files


@pytest.mark.parametrize("part", [0.0, 0.1, 0.9])
def test_a_tokenizer_that_is_cut_is_told(copy: Copy, part: float) -> None:
    file = copy("gpt2") / "tokenizer.json"
    content = file.read_bytes()
    file.write_bytes(content[: int(part * len(content))])
    with pytest.raises(ValueError, match="whose tokenizer cannot be loaded"):
        cpsbs.load(file.parent)


def test_a_tokenizer_with_tokens_that_the_model_lacks_is_refused(copy: Copy) -> None:
    folder = copy("gpt2")
    words = json.loads((folder / "tokenizer.json").read_text())
    words["model"]["vocab"]["the"] = SIZE
    (folder / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ValueError, match="has a token 15, where the model has tokens from 0 to 14"):
        cpsbs.load(folder)


@pytest.mark.parametrize("spoil", ["cut", "empty", "header", "tiny", "text"])
def test_weights_that_cannot_be_read_are_told(copy: Copy, spoil: str) -> None:
    file = copy("gpt2") / "model.safetensors"
    content = file.read_bytes()
    spoilt = {
        "cut": content[: len(content) // 2],
        "empty": b"",
        "header": content[:8] + b"\xff" * 100 + content[108:],
        "tiny": content[:4],
        "text": b"version https://git-lfs.github.com/spec/v1",
    }
    file.write_bytes(spoilt[spoil])
    with pytest.raises(ValueError, match=r"whose weights cannot be loaded .*Safetensor"):
        cpsbs.load(file.parent)


def test_folders_without_what_a_model_needs_are_told(copy: Copy, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"which has no config\.json"):
        cpsbs.load(empty)
    for kind in ("gpt2", "marian"):
        folder = copy(kind)
        for file in folder.glob("tokenizer*"):
            file.unlink()
        with pytest.raises(ValueError, match="tokenizer"):
            cpsbs.load(folder)


def test_names_that_are_no_folder_are_told(
    copy: Copy, tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="which is a file"):
        cpsbs.load(copy("gpt2") / "model.safetensors")
    for name in (
        "./smol",
        "../smol",
        "~/smol",
        "/smol",
        "smol/",
        "a/b/c",
        "C:\\smol",
        "a\0b",
        "." * 5,
    ):
        with pytest.raises(ValueError, match=r"this folder does not exist; .*en-fr"):
            cpsbs.load(name)
    for name in ("smol", "some/model", "", "a b", "x" * 10_000):
        with pytest.raises(ValueError, match=r"there is no such folder, .* on the hub"):
            cpsbs.load(name)
    for odd in (None, 5, b"en-fr"):
        with pytest.raises(ValueError, match="en-fr"):
            cpsbs.load(odd)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["x" * 10_000, "x/" * 5_000])
def test_messages_about_long_names_are_short(hub: Path, name: str) -> None:
    with pytest.raises(ValueError, match="characters") as caught:
        cpsbs.load(name)
    assert len(str(caught.value)) < 1000


# Devices and types


@pytest.mark.parametrize(
    "device",
    ["xpu", "cuda:99", "meta", "nonsense", "cpu:5", "", torch.device("meta"), 3.5, "mps:7"],
)
def test_devices_that_are_not_there_are_refused(device: Any) -> None:
    with pytest.raises(ValueError, match=f"device is {device}.*; available: cpu"):
        cpsbs.load("en-fr", device=device)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_the_cpu_is_always_there(copy: Copy, device: Any) -> None:
    assert cpsbs.load(copy("gpt2"), device=device).model.device.type == "cpu"


@pytest.mark.parametrize(
    "dtype", ["int8", "nonsense", "float8_e4m3fn", "", "nn", "complex64", torch.int8, 5]
)
def test_types_that_no_model_computes_in_are_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match=f"dtype is {dtype}; allowed are auto, float32, float16"):
        cpsbs.load("en-fr", dtype=dtype)


@pytest.mark.parametrize("dtype", ["float64", torch.bfloat16, "auto"])
def test_types_that_a_model_computes_in_are_taken(copy: Copy, dtype: Any) -> None:
    expected = {"float64": torch.float64, "auto": torch.float32}.get(dtype, dtype)
    assert cpsbs.load(copy("gpt2"), device="cpu", dtype=dtype).model.dtype == expected


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "nonsense"])
def test_types_that_no_model_computes_in_are_refused_in_a_checkpoint(
    copy: Copy, dtype: str
) -> None:
    folder = with_settings(copy("gpt2"), "config.json", dtype=dtype)
    with pytest.raises(ValueError, match=r"config\.json|torch.float8_e4m3fn"):
        cpsbs.load(folder, dtype="auto")


# Texts


class Odd:
    """A tokenizer that has little more than it needs."""

    def __init__(self, tokenizer: Any, **attributes: Any) -> None:
        self.tokenizer = tokenizer
        vars(self).update(attributes)

    def __call__(self, texts: list[str], **options: Any) -> Any:
        return self.tokenizer(texts, **options)

    def batch_decode(self, *args: Any, **kwargs: Any) -> Any:
        return self.tokenizer.batch_decode(*args, **kwargs)


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"model_max_length": "big"},
        {"model_max_length": None, "pad_token_id": None, "eos_token_id": None},
        {"model_max_length": float("nan"), "pad_token_id": [1]},
        {"model_max_length": float("inf")},
        {"model_max_length": -1},
    ],
)
def test_odd_tokenizers_do_no_harm(copy: Copy, attributes: dict[str, Any]) -> None:
    loaded = cpsbs.load(copy("gpt2"), device="cpu")
    model = cpsbs.TextModel("mine", loaded.model, Odd(loaded.tokenizer, **attributes))
    assert model.longest == 64
    assert model.usual_length == 32
    assert model.room(10) == 54
    beams = model.beams(["the dog sees", "one"], 2, max_length=3, seed=0)
    assert model.texts(beams) == loaded.texts(beams)


def test_no_sequences_are_no_texts(copy: Copy) -> None:
    model = cpsbs.load(copy("gpt2"))
    assert model.decode([]) == []
    assert model.decode([[]]) == [""]


def test_texts_that_are_none_are_refused(copy: Copy) -> None:
    model = cpsbs.load(copy("gpt2"))
    with pytest.raises(ValueError, match="texts is empty; it must hold at least one text"):
        model.beams([])
    with pytest.raises(ValueError, match=r"texts\[1\] is a int; it must be a string"):
        model.beams(["the dog", 5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"texts\[0\] is not Unicode text"):
        model.beams(["\ud800"])


def test_a_tokenizer_that_fails_on_a_text_is_told(copy: Copy) -> None:
    folder = copy("gpt2")
    words = json.loads((folder / "tokenizer.json").read_text())
    words["model"]["vocab"] = {"the": 3}
    words["added_tokens"] = []
    (folder / "tokenizer.json").write_text(json.dumps(words))
    with_settings(folder, "tokenizer_config.json", unk_token=None)
    model = cpsbs.load(folder)
    with pytest.raises(ValueError, match=r"the tokenizer of .* cannot tokenize .*: .*\[UNK\]"):
        model.beams(["the dog"])
