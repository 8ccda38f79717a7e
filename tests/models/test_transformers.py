"""The search on transformers models, and as a decoding method of ``generate``."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

import cpsbs
from cpsbs import Beams, TransformersModel, search, split_seed
from tests.models.tiny import EOS, MODELS, PAD, alone, make, prompts, teacher_forced


def run(
    model: Any, inputs: dict[str, Any], design: str = "conditional-poisson", **kw: Any
) -> Beams:
    sources = len(inputs["input_ids"])
    settings: dict[str, Any] = {"k": 4, "max_length": 6, "generator": split_seed(0, sources), **kw}
    k = settings.pop("k")
    return search(TransformersModel(model, **inputs), k, design, **settings)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("design", cpsbs.DESIGNS)
def test_log_prob_is_the_teacher_forced_score(name: str, design: str) -> None:
    model = make(name)
    inputs = prompts(model)
    beams = run(model, inputs, design)
    for b in range(len(beams)):
        tokens = beams.tokens(b)
        assert len(tokens) == 4
        for y, log_p in zip(tokens, beams.log_prob[b].tolist(), strict=True):
            assert log_p == pytest.approx(teacher_forced(model, alone(inputs, b), y), abs=1e-4)
            assert EOS not in y[:-1]
            assert y[-1] == EOS or len(y) == 6


@pytest.mark.parametrize("name", MODELS)
def test_cache_batch_and_padding_do_not_matter(name: str) -> None:
    model = make(name)
    inputs = prompts(model)
    together = run(model, inputs)
    without = run(model, {**inputs, "use_cache": False})
    assert torch.equal(together.sequences, without.sequences)
    torch.testing.assert_close(together.log_prob, without.log_prob, rtol=0, atol=1e-4)
    assert together.log_inclusion is not None
    for b in range(len(together)):
        one = run(model, alone(inputs, b), generator=split_seed(0, 3)[b : b + 1])
        assert one.tokens(0) == together.tokens(b)
        assert one.log_inclusion is not None
        torch.testing.assert_close(
            one.log_inclusion[0], together.log_inclusion[b], rtol=0, atol=1e-3
        )


@pytest.mark.parametrize("name", MODELS)
def test_all_sequences_of_a_small_model(name: str) -> None:
    """V = 4 and T = 3: beams wide enough hold every sequence, and their probabilities sum to 1."""
    model = make(name, vocab_size=20, seed=3)
    model.generation_config.suppress_tokens = list(range(4, 20))
    inputs = alone(prompts(model), 1)
    beams = run(model, inputs, k=100, max_length=3)
    words = [v for v in range(4) if v != EOS]
    everything = {
        (*head, last)
        for n in range(3)
        for head in itertools.product(words, repeat=n)
        for last in ((EOS,) if n < 2 else range(4))
    }
    assert {tuple(y) for y in beams.tokens(0)} == everything
    assert float(beams.log_prob.exp()[beams.present].sum()) == pytest.approx(1, abs=1e-6)
    best = sorted(zip(beams.log_prob[0].tolist(), beams.tokens(0), strict=False), reverse=True)
    greedy = run(model, inputs, "top-k", k=1, max_length=3)
    assert greedy.tokens(0)[0][0] == max(range(4), key=lambda v: _first(best, v))


def _first(scored: list[tuple[float, list[int]]], token: int) -> float:
    return sum(math.exp(log_p) for log_p, y in scored if y[0] == token)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("k", [1, 3, 5])
def test_top_k_is_beam_search_by_brute_force(name: str, k: int) -> None:
    model = make(name, vocab_size=14, seed=1)
    inputs = alone(prompts(model), 0)
    beam: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(4):
        candidates = []
        for log_p, y in beam:
            if y and y[-1] == EOS:
                candidates.append((log_p, y))
                continue
            candidates += [(teacher_forced(model, inputs, [*y, v]), [*y, v]) for v in range(14)]
        beam = sorted(candidates, reverse=True)[:k]
    beams = run(model, inputs, "top-k", k=k, max_length=4)
    assert beams.tokens(0) == [y for _, y in beam]


def test_half_precision_models_are_normalised_in_float32() -> None:
    model = make("llama").bfloat16()
    inputs = prompts(model)
    beams = run(model, inputs, "independent", k=8, max_length=1)
    for b in range(3):
        with torch.no_grad():
            logits = model(**alone(inputs, b)).logits[0, -1].float()
        for y, log_p in zip(beams.tokens(b), beams.log_prob[b].tolist(), strict=True):
            assert log_p == pytest.approx(float(logits.log_softmax(-1)[y[0]]), abs=0.05)


# ---------------------------------------------------------------------- generate


@pytest.mark.parametrize("name", MODELS)
def test_generate_returns_what_the_search_finds(name: str) -> None:
    model = make(name)
    inputs = prompts(model)
    expected = search(
        TransformersModel(model, **inputs), 4, max_length=6, generator=split_seed(0, 3)
    )
    settings: dict[str, Any] = {"custom_generate": cpsbs.generate, "num_beams": 4}
    settings |= {"max_new_tokens": 6, "generator": split_seed(0, 3)}
    found = model.generate(**inputs, **settings, return_dict_in_generate=True)
    prompt = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[-1]
    assert torch.equal(found.sequences[:, prompt:], expected.sequences.flatten(0, 1))
    # Inside ``generate`` the encoder is that of transformers, which rounds in another order.
    own, assert_close = expected.log_prob.flatten(), torch.testing.assert_close
    assert_close(found.log_probs, own, rtol=1e-5, atol=1e-5)
    assert expected.log_inclusion is not None
    assert_close(found.log_inclusion, expected.log_inclusion.flatten(), rtol=1e-5, atol=1e-5)
    assert isinstance(found.beams, Beams)
    settings["generator"] = split_seed(0, 3)
    two = model.generate(**inputs, **settings, num_return_sequences=2)
    assert torch.equal(two[:, prompt:], expected.sequences[:, :2].flatten(0, 1))


class Forbid(LogitsProcessor):  # type: ignore[misc, unused-ignore]
    """Forbids a token, on whatever it is given."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, self.token] = -math.inf
        return scores


def test_processors_act_on_logits_and_the_rest_is_normalised() -> None:
    model = make("llama", vocab_size=6)
    inputs = {"input_ids": torch.tensor([[3, 4]])}
    forbid = LogitsProcessorList([Forbid(4)])
    settings: dict[str, Any] = {"custom_generate": cpsbs.generate, "num_beams": 40}
    found = model.generate(
        **inputs,
        **settings,
        max_new_tokens=1,
        logits_processor=forbid,
        return_dict_in_generate=True,
    )
    assert 4 not in found.sequences[:, 2:]
    assert float(found.log_probs.exp().sum()) == pytest.approx(1, abs=1e-6)
    warm = model.generate(
        **inputs,
        **settings,
        max_new_tokens=1,
        do_sample=True,
        top_k=0,
        temperature=0.5,
        return_dict_in_generate=True,
    )
    with torch.no_grad():
        exact = (model(**inputs).logits[0, -1] / 0.5).log_softmax(-1).double()
    plainly = model.generate(
        **inputs, **settings, max_new_tokens=1, temperature=0.5, return_dict_in_generate=True
    )
    for one in (warm, plainly):
        order = one.sequences[:, 2]
        torch.testing.assert_close(one.log_probs, exact[order], rtol=0, atol=1e-5)


def test_a_nucleus_needs_no_sampling_flag() -> None:
    model = make("gpt2", vocab_size=8)
    ids = torch.tensor([[3, 4]])
    found = model.generate(
        ids,
        custom_generate=cpsbs.generate,
        num_beams=8,
        max_new_tokens=1,
        top_p=0.5,
        return_dict_in_generate=True,
    )
    expected = cpsbs.search(
        cpsbs.TransformersModel(model, input_ids=ids), 8, max_length=1, nucleus=0.5, generator=0
    )
    assert found.beams.tokens(0) == expected.tokens(0)
    assert len(expected.tokens(0)) < 8


def test_stopping_criteria_and_several_ends() -> None:
    model = make("gpt2", vocab_size=8)

    def stop(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids[:, -1] == 5

    found = model.generate(
        input_ids=torch.tensor([[3, 4]]),
        custom_generate=cpsbs.generate,
        num_beams=30,
        max_new_tokens=3,
        eos_token_id=[1, 2],
        stopping_criteria=StoppingCriteriaList([stop]),
        return_dict_in_generate=True,
        generator=torch.Generator().manual_seed(0),
    )
    ends: Counter[int] = Counter()
    for y in found.beams.tokens(0):
        assert not {1, 2, 5} & set(y[:-1])
        ends[y[-1]] += 1
    assert {1, 2, 5} <= set(ends)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_sample": True}, "top_k is 50, which transformers sets by default"),
        ({"top_k": 5}, "top_k is 5, which transformers applies only with do_sample=True"),
        ({"length_penalty": 2.0}, "length_penalty is 2.0"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores is True"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences"),
    ],
)
def test_what_cannot_be_honoured_is_refused(settings: dict[str, Any], message: str) -> None:
    model = make("llama")
    arguments: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 3, **settings}
    with pytest.raises(ValueError, match=message):
        model.generate(torch.tensor([[3, 4]]), custom_generate=cpsbs.generate, **arguments)


@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_a_length_beyond_the_last_position_is_refused(name: str) -> None:
    model = make(name)
    most = model.config.max_position_embeddings
    endless = TransformersModel(model, **prompts(model), min_new_tokens=99, max_new_tokens=99)
    message = rf"max_position_embeddings is {most}, which .*max_length must not exceed"
    with pytest.raises(ValueError, match=message):
        search(endless, 2, max_length=most + 5, generator=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.5}, "temperature is 0.5, which transformers ignores without do_sample"),
        ({"top_p": 0.9}, "top_p is 0.9, which transformers ignores"),
        ({"num_beams": 4}, "num_beams is 4; leave it out: the search takes k"),
    ],
)
def test_inputs_without_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformersModel(make("gpt2"), input_ids=torch.tensor([[3, 4]]), **settings)


def test_what_a_checkpoint_brings_along_is_refused_or_set_back() -> None:
    model = make("llama")
    inputs = {"input_ids": torch.tensor([[3, 4]])}
    plain = run(model, inputs)
    model.generation_config.repetition_penalty = 1.7
    assert torch.equal(run(model, inputs).sequences, plain.sequences)
    with pytest.raises(ValueError, match=r"brings repetition_penalty=1\.7"):
        model.generate(**inputs, custom_generate=cpsbs.generate, num_beams=3, max_new_tokens=3)
    model.generate(
        **inputs,
        custom_generate=cpsbs.generate,
        num_beams=3,
        max_new_tokens=3,
        repetition_penalty=1.0,
    )
    model.generation_config.min_new_tokens = 4
    with pytest.raises(ValueError, match=r"model.generation_config sets min_new_tokens"):
        run(model, inputs)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_can_be_searched_again(name: str) -> None:
    model = make(name)
    again = TransformersModel(model, **prompts(model))
    first, second = (search(again, 3, max_length=5, generator=0) for _ in range(2))
    assert again.pad == PAD
    assert first.sequences.equal(second.sequences)
    assert first.log_prob.equal(second.log_prob)


def test_a_model_with_a_filled_cache_holds_one_search() -> None:
    model = make("llama")
    ids = torch.tensor([[5, 6, 7]])
    cache = model(input_ids=ids[:, :2], use_cache=True).past_key_values
    once = TransformersModel(model, input_ids=ids, past_key_values=cache)
    search(once, 2, max_length=3)
    with pytest.raises(ValueError, match="one search"):
        search(once, 2, max_length=3)
