"""Models loaded by name, and beams of texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import cpsbs
from cpsbs.models.transformers.int8 import int8_works
from cpsbs.text import EMBEDDED, demonstration, embedded_models
from tests.models.folders import causal_folder, encoder_folder


@pytest.fixture(scope="module")
def model() -> cpsbs.TextModel:
    return cpsbs.load("en-fr")


def test_the_embedded_model_translates(model: cpsbs.TextModel) -> None:
    beams = model.beams(["The dog is red."], k=4, design="top-k")
    assert model.texts(beams)[0][0] == "Le chien est rouge."
    assert model.model.dtype == torch.float32
    assert beams.settings["model"] == "en-fr"


def test_embedded_models_are_whole_and_small() -> None:
    assert embedded_models() == ["en-fr"]
    files = list((EMBEDDED / "en-fr").iterdir())
    assert sum(file.stat().st_size for file in files) <= 26e6
    assert max(file.stat().st_size for file in files) < 16e6
    assert {file.suffix for file in files} <= {".json", ".safetensors", ".md"}
    assert len(demonstration()) == 30


def test_a_text_gets_the_same_draw_in_any_batch(model: cpsbs.TextModel) -> None:
    texts = [english for english, _ in demonstration()[:4]]
    together = model.beams(texts, 3, temperature=0.5, seed=7)
    alone = model.beams([texts[2]], 3, temperature=0.5, seed=7, streams=[2])
    assert alone.tokens(0) == together.tokens(2)
    assert together.settings["seed"] == 7
    torch.testing.assert_close(alone.log_inclusion[0], together.log_inclusion[2], atol=1e-4, rtol=0)  # type: ignore[index]


def test_more_and_until_take_texts(model: cpsbs.TextModel) -> None:
    texts = ["The dog is red.", "The room was too warm."]
    first = model.beams(texts, 3, temperature=0.5, seed=0)
    beams = model.more(texts, first, 4, seed=0)
    assert beams.settings["model"] == "en-fr"
    assert [len(set(own)) for own in model.texts(beams)] == [7, 7]
    whole = model.until(texts, 0.95, 7, temperature=0.5, seed=0, streams=[4, 9], most=21)
    (alone,) = model.until(texts[1:], 0.95, 7, temperature=0.5, seed=0, streams=[9], most=21)
    assert alone.tokens(0) == whole.tokens(1)
    with pytest.raises(ValueError, match="texts is a single text"):
        model.until(texts[0])
    with pytest.raises(ValueError, match=r"texts\[0\] is empty"):
        model.more(["", "x"], first)
    with pytest.raises(ValueError, match="beams has 2 sources"):
        model.more(texts[:1], first)
    with pytest.raises(ValueError, match="under this model it is"):
        model.more(texts[::-1], first)


def test_a_seed_that_was_not_given_is_noted(model: cpsbs.TextModel) -> None:
    first = model.beams(["The dog is red."], 3)
    again = model.beams(["The dog is red."], 3, seed=first.settings["seed"])
    assert first.tokens(0) == again.tokens(0)


def test_hindsight_inclusion_takes_a_text_model(model: cpsbs.TextModel) -> None:
    texts = ["The dog is red."]
    beams = model.beams(texts, 2, "conditional-poisson", temperature=0.3, seed=0)
    found = cpsbs.hindsight_inclusion(model.repeated(texts), beams, runs=2)
    assert bool((found.log_value <= 0).all())


def test_a_causal_model_continues_prompts(tmp_path: Path) -> None:
    folder = str(causal_folder(tmp_path))
    model = cpsbs.load(folder)
    texts = ["the dog sees", "one old red house and"]
    both = model.beams(texts, 3, max_length=5, seed=0)
    assert both.sequences.shape[-1] <= 5
    alone = model.beams(texts[:1], 3, max_length=5, seed=0)
    assert alone.tokens(0) == both.tokens(0)
    message = r"texts\[0\] has 60 tokens; .* takes at most 59 with max_length = 5"
    with pytest.raises(ValueError, match=message):
        model.beams([" ".join(["dog"] * 60)], 3, max_length=5)


def test_a_model_of_ones_own_is_padded_on_the_right_side(tmp_path: Path) -> None:
    loaded = cpsbs.load(str(causal_folder(tmp_path)))
    loaded.tokenizer.padding_side, loaded.tokenizer.pad_token = "right", None
    own = cpsbs.TextModel("mine", loaded.model, loaded.tokenizer)
    texts = ["the dog sees", "one old red house and"]
    together = own.beams(texts, 3, max_length=4, seed=0)
    alone = own.beams(texts[:1], 3, max_length=4, seed=0)
    assert together.tokens(0) == alone.tokens(0)
    torch.testing.assert_close(together.log_prob[:1], alone.log_prob, atol=1e-5, rtol=0)


def test_weights_other_than_safetensors_are_refused(tmp_path: Path) -> None:
    folder = causal_folder(tmp_path)
    weights = folder / "model.safetensors"
    weights.rename(folder / "kept")
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors"):
        cpsbs.load(str(folder))


def test_models_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    encoder = encoder_folder(tmp_path / "encoder")
    with pytest.raises(ValueError, match="not a model that generates text"):
        cpsbs.load(encoder)
    folder = causal_folder(tmp_path / "causal")
    words = json.loads((folder / "tokenizer.json").read_text())
    words["model"]["vocab"] |= {f"word{i}": 100 + i for i in range(50)}
    (folder / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ValueError, match="whose tokenizer has 65 tokens, where the model has 15"):
        cpsbs.load(folder)
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match=r"whose weights cannot be loaded .* header too large"):
        cpsbs.load(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told() -> None:
    with pytest.raises(ValueError, match="device is cuda, but torch finds no GPU"):
        cpsbs.load("en-fr", device="cuda")


def test_bad_arguments_are_named(model: cpsbs.TextModel) -> None:
    with pytest.raises(ValueError, match="texts is a single text"):
        model.beams("The dog is red.")
    with pytest.raises(ValueError, match="texts is empty"):
        model.beams([])
    with pytest.raises(ValueError, match=r"texts\[1\] is empty"):
        model.beams(["Yes.", " "])
    with pytest.raises(ValueError, match=r"texts\[0\] has \d+ tokens; en-fr takes at most 256"):
        model.beams(["word " * 300])
    with pytest.raises(ValueError, match="max_length is 500; en-fr takes at most 256 tokens"):
        model.beams(["Yes."], max_length=500)
    wrong: Any
    for wrong in ("0", 1.5):
        with pytest.raises(ValueError, match=f"seed is {wrong!r}; it must be an integer"):
            model.beams(["Yes."], seed=wrong)
    with pytest.raises(ValueError, match=r"model is a TextModel, .* model.sequence_model\(texts\)"):
        cpsbs.search(model, 2, max_length=3)  # type: ignore[arg-type]


def test_results_say_that_weights_are_rounded() -> None:
    if not int8_works():
        pytest.skip("torch has no int8 kernels here")
    beams = cpsbs.load("en-fr", device="cpu", quantize="int8").beams(["Yes."], 1, max_length=2)
    assert beams.settings["model"] == "en-fr with int8 weights"


def test_an_unknown_model_is_told_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"nothing.*does not exist; it must be an embedded model .en-fr."
    ):
        cpsbs.load(str(tmp_path / "nothing"))


TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }} and {% endfor %}"
    "{% if add_generation_prompt %}the{% endif %}"
)


@pytest.fixture
def chat_model(tmp_path: Path) -> cpsbs.TextModel:
    model = cpsbs.load(str(causal_folder(tmp_path)))
    model.tokenizer.chat_template = TEMPLATE
    return model


def test_a_conversation_goes_through_the_chat_template(chat_model: cpsbs.TextModel) -> None:
    """It gets what the text that the template writes would get."""
    messages = [{"role": "user", "content": "one dog"}, {"role": "user", "content": "red cat"}]
    texts = ["one dog and red cat and the", "old house"]
    expected = chat_model.beams(texts, 3, max_length=5, seed=0)
    found = chat_model.beams([messages, "old house"], 3, max_length=5, seed=0)
    assert found.tokens(0) == expected.tokens(0)
    assert found.tokens(1) == expected.tokens(1)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "has no messages"),
        ([{"role": "user"}], 'a dictionary with a "role" and a "content"'),
        (["one dog"], 'a dictionary with a "role" and a "content"'),
    ],
)
def test_what_is_no_conversation_is_refused(
    messages: Any, reason: str, chat_model: cpsbs.TextModel
) -> None:
    with pytest.raises(ValueError, match=rf"texts\[1\] .*{reason}"):
        chat_model.beams(["one dog", messages], 3, max_length=5)


def test_a_tokenizer_without_chat_template_says_so(model: cpsbs.TextModel) -> None:
    with pytest.raises(ValueError, match="en-fr has no chat template"):
        model.beams([[{"role": "user", "content": "one dog"}]], 3)


def test_a_model_is_shown_in_a_line(model: cpsbs.TextModel) -> None:
    shown = repr(model)
    assert "\n" not in shown
    assert len(shown) < 100
    assert "'en-fr', MarianMTModel" in shown
    assert "float32 on cpu" in shown
