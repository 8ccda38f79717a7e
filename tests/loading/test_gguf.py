"""GGUF files: the same model as in safetensors, with the same rules."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from typer.testing import CliRunner

import cpsbs
from cpsbs.cli.commands import app
from cpsbs.fingerprint import model_fingerprint
from tests.models import tiny
from tests.models.folders import hub_cache, tiny_folder

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOKENS = ["<pad>", "</s>", "<unk>", "▁", *"abcdefghijk"]  # as many as there are words
BYTE_LEVEL = ["<pad>", "</s>", "<｜begin▁text｜>", "Ġ", *"abcdefghi", "ab", "abc"]
IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])


def write_gguf(
    file: Path,
    model: Any,
    store: Callable[[np.ndarray[Any, Any]], dict[str, Any]] | None = None,
    byte_level: bool = False,
) -> None:
    """Write a Llama as llama.cpp does.

    Args:
        file: the file to write.
        model: the Llama, with as many tokens as there are words.
        store: how a matrix is written; by default as it is.
        byte_level: whether the tokenizer is one of bytes, as that of Llama 3, and adds its BOS, or
            one of SentencePiece, as that of Llama 2, and does not.
    """
    config = model.config
    out = gguf.GGUFWriter(str(file), "llama")
    out.add_name("tiny")
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_dimension_count(config.head_dim)
    out.add_rope_freq_base(10000.0)
    out.add_vocab_size(config.vocab_size)
    tokens = BYTE_LEVEL if byte_level else TOKENS
    out.add_tokenizer_model("gpt2" if byte_level else "llama")
    out.add_token_list([token.encode() for token in tokens])
    if byte_level:
        out.add_token_merges(["a b", "ab c"])
    else:
        out.add_token_scores([-float(i) for i in range(len(tokens))])
    out.add_token_types([3, 3, 3 if byte_level else 2] + [1] * (len(tokens) - 3))
    out.add_add_bos_token(byte_level)
    out.add_bos_token_id(config.bos_token_id)
    out.add_eos_token_id(config.eos_token_id)
    out.add_unk_token_id(2)
    out.add_pad_token_id(config.pad_token_id)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}

    def add(name: str, weight: np.ndarray[Any, Any]) -> None:
        kept = {"tensor": weight} if store is None or weight.ndim == 1 else store(weight)
        out.add_tensor(name, **kept)

    add("token_embd.weight", weights["model.embed_tokens.weight"])
    add("output_norm.weight", weights["model.norm.weight"])
    add("output.weight", weights["lm_head.weight"])
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for ours, theirs in PARTS.items():
            weight = weights[f"model.layers.{layer}.{ours}.weight"]
            if theirs in heads:  # llama.cpp interleaves the halves of every head
                split = weight.reshape(heads[theirs], 2, -1, weight.shape[1])
                weight = np.ascontiguousarray(split.swapaxes(1, 2)).reshape(weight.shape)
            add(f"blk.{layer}.{theirs}.weight", weight)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same Llama in safetensors and in GGUF, and a tokenizer beside them."""
    folder = tmp_path_factory.mktemp("gguf") / "llama"
    tiny_folder(folder, "llama")
    write_gguf(folder / "tiny.gguf", tiny.make("llama", len(TOKENS)))
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(original, tmp_path / "llama"))


@torch.no_grad()
def logits(model: cpsbs.TextModel) -> torch.Tensor:
    found: torch.Tensor = model.model(IDS).logits
    return found


def test_the_model_is_the_one_in_safetensors(original: Path) -> None:
    expected = cpsbs.load(original, device="cpu")
    found = cpsbs.load(original, device="cpu", gguf_file="tiny.gguf")
    torch.testing.assert_close(logits(found), logits(expected), rtol=1e-5, atol=1e-5)
    drawn = [m.beams(["the dog sees"], 3, max_length=5, seed=0) for m in (found, expected)]
    assert drawn[0].tokens(0) == drawn[1].tokens(0)
    assert found.name == f"{original}/tiny.gguf"


def test_quantised_weights_are_unpacked(folder: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0

    def quantised(weight: np.ndarray[Any, Any]) -> dict[str, Any]:
        if weight.shape[1] % 32:
            return {"tensor": weight}
        return {"tensor": gguf.quants.quantize(weight, kind), "raw_dtype": kind}

    write_gguf(folder / "q8.gguf", tiny.make("llama", len(TOKENS)), quantised)
    assert (folder / "q8.gguf").stat().st_size < 0.7 * (folder / "tiny.gguf").stat().st_size
    found = cpsbs.load(folder, device="cpu", gguf_file="q8.gguf")
    assert found.model.dtype == torch.float32
    expected = logits(cpsbs.load(folder, device="cpu"))
    assert 0 < (logits(found) - expected).abs().max() < 0.3 * expected.std()


def test_the_file_alone_is_enough(folder: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(folder / "tiny.gguf", alone)
    model = cpsbs.load(alone, device="cpu", gguf_file="tiny.gguf")
    assert model.tokenizer("a cab").input_ids == [3, 4, 3, 6, 4, 5]
    assert model.decode([[3, 6, 4, 5, 3, 4, 1]]) == ["cab a"]
    assert (model.tokenizer.bos_token_id, model.tokenizer.eos_token_id) == (2, 1)
    assert torch.equal(logits(model), logits(cpsbs.load(folder, device="cpu")))


def test_only_tokens_of_the_file_are_tokens(tmp_path: Path) -> None:
    """The names of this file's special tokens are not those that a tokenizer has by default."""
    write_gguf(tmp_path / "tiny.gguf", tiny.make("llama", len(BYTE_LEVEL)), byte_level=True)
    model = cpsbs.load(tmp_path, device="cpu", gguf_file="tiny.gguf")
    assert len(model.tokenizer) == len(BYTE_LEVEL)
    assert (model.tokenizer.bos_token_id, model.tokenizer.eos_token_id) == (2, 1)
    # Some releases of transformers ignore that the file asks for its BOS.
    assert model.tokenizer("abc ab").input_ids in ([2, 14, 3, 13], [14, 3, 13])
    assert model.decode([[13, 3, 14, 1]]) == ["ab abc"]
    spelled_out = model.tokenizer("<s><|endoftext|>").input_ids
    assert max(spelled_out, default=0) < len(BYTE_LEVEL)


def test_a_file_of_that_name_in_the_working_directory_is_not_taken(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    write_gguf(other / "tiny.gguf", tiny.make("llama", len(TOKENS), seed=1))
    monkeypatch.chdir(other)
    found = logits(cpsbs.load(folder, device="cpu", gguf_file="tiny.gguf"))
    assert torch.equal(found, logits(cpsbs.load(folder, device="cpu")))


def test_a_repository_on_the_hub(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "config.json").unlink()  # repositories of GGUF files have none
    hub_cache(folder, tmp_path / "hub", "somebody/model")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = cpsbs.load("somebody/model", device="cpu", gguf_file="tiny.gguf")
    assert model.name == "somebody/model/tiny.gguf"
    assert model_fingerprint(model.name, model.model.config) == f"{model.name}@{'a' * 40}"
    with pytest.raises(ValueError, match=r"other\.gguf was not found"):
        cpsbs.load("somebody/model", device="cpu", gguf_file="other.gguf")


@pytest.mark.parametrize(
    "name", ["../llama/tiny.gguf", "/tmp/tiny.gguf", "tiny.bin", "sub\\tiny.gguf", "", ".", 3]
)
def test_the_file_is_one_in_the_folder(folder: Path, name: Any) -> None:
    with pytest.raises(ValueError, match=r"gguf_file is .*; it must be the name of a \.gguf file"):
        cpsbs.load(folder, device="cpu", gguf_file=name)


def test_what_is_wrong_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no file 'other.gguf' .* it has tiny.gguf"):
        cpsbs.load(folder, device="cpu", gguf_file="other.gguf")
    with pytest.raises(ValueError, match="it has no GGUF files"):
        cpsbs.load("en-fr", device="cpu", gguf_file="other.gguf")
    with pytest.raises(ValueError, match=r"which is a file.* as gguf_file"):
        cpsbs.load(folder / "tiny.gguf", device="cpu")
    (folder / "broken.gguf").write_bytes((folder / "tiny.gguf").read_bytes()[:300])
    with pytest.raises(ValueError, match=r"broken\.gguf cannot be used"):
        cpsbs.load(folder, device="cpu", gguf_file="broken.gguf")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="adapters are not loaded"):
        cpsbs.load(folder, device="cpu", gguf_file="tiny.gguf")
    for package in ("gguf", "accelerate"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(ImportError, match=rf"{package} is not .*cpsbs\[gguf\]"):
                cpsbs.load(folder, device="cpu", gguf_file="tiny.gguf")


def test_a_tokenizer_that_brings_code_is_not_run(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (folder / "code.py").write_text(f"open({str(mark)!r}, 'w')\n")
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["code.Mine", null]}}'
    )
    with pytest.raises(ValueError, match="only with trust_remote_code"):
        cpsbs.load(folder, device="cpu", gguf_file="tiny.gguf")
    assert not mark.exists()


def test_another_file_is_another_model(folder: Path) -> None:
    shutil.copy(folder / "tiny.gguf", folder / "other.gguf")
    names = (str(folder), f"{folder}/tiny.gguf", f"{folder}/other.gguf")
    before = [model_fingerprint(name, None) for name in names]
    assert len(set(before)) == 3
    (folder / "other.gguf").write_bytes(b"changed")
    after = [model_fingerprint(name, None) for name in names]
    assert after[1] == before[1]
    assert after[2] != before[2]


def test_the_command_line_loads_it(original: Path) -> None:
    arguments = ["sample", "the dog", "-m", str(original), "-k", "2", "--max-length", "4", "--json"]
    plain, found = (
        CliRunner().invoke(app, [*arguments, *more]) for more in ([], ["--gguf", "tiny.gguf"])
    )
    assert found.exit_code == 0, found.stderr
    assert found.stderr == plain.stderr == ""
    name = f'"model": "{original}'
    assert found.stdout.replace("/tiny.gguf", "") == plain.stdout
    assert f'{name}/tiny.gguf"' in found.stdout
