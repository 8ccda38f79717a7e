"""Teacher forcing: the log-probabilities of a search computed again, with gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor

import cpsbs
from cpsbs import FunctionModel, TableModel, TransformersModel, log_prob, search
from cpsbs.gradients import token_scores
from tests.models import tiny

SETTINGS: list[dict[str, Any]] = [{}, {"temperature": 0.6}, {"temperature": 1.3, "nucleus": 0.8}]


def drawn(model: Any, k: int = 4, **settings: Any) -> cpsbs.Beams:
    return search(model, k, max_length=6, generator=0, entropy=True, **settings)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", tiny.MODELS)
def test_forced_log_probs_are_those_of_the_search(kind: str, settings: dict[str, Any]) -> None:
    model = tiny.make(kind)
    own = TransformersModel(model, **tiny.prompts(model))
    beams = drawn(own, **settings)
    found = token_scores(own, beams, entropy=True)
    assert found.entropy is not None
    assert found.log_prob.requires_grad
    expected = torch.where(beams.present, beams.log_prob, 0.0)
    torch.testing.assert_close(found.log_prob.sum(-1), expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(found.entropy.sum(-1), beams.entropy, atol=2e-4, rtol=1e-4)
    after = torch.arange(beams.sequences.shape[-1]) >= beams.lengths[..., None]
    assert bool((found.log_prob[after] == 0).all())


@pytest.mark.parametrize("kind", ["gpt2", "marian"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_blocks_and_checkpoints_change_nothing(kind: str, checkpoint: bool) -> None:
    model = tiny.make(kind)
    own = TransformersModel(model, **tiny.prompts(model))
    beams = drawn(own)

    def gradient(**options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        found = log_prob(own, beams, **options)
        (found * torch.arange(12).view(3, 4)).sum().backward()  # type: ignore[no-untyped-call]
        return found.detach(), torch.cat(
            [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        )

    for whole, blocks in zip(gradient(), gradient(block=200, checkpoint=checkpoint), strict=True):
        torch.testing.assert_close(whole, blocks, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_processors_apply_as_in_the_search(kind: str) -> None:
    model = tiny.make(kind)

    def allowed(source: int, ids: torch.Tensor) -> list[int]:
        return [source + 3, source + 7, 20, tiny.EOS]

    length = tiny.prompts(model)["input_ids"].shape[-1] if kind == "llama" else 1
    least = MinNewTokensLengthLogitsProcessor(length, 3, [tiny.EOS])
    own = TransformersModel(
        model,
        **tiny.prompts(model),
        prefix_allowed_tokens_fn=allowed,
        logits_processor=LogitsProcessorList([least]),
    )
    beams = drawn(own)
    found = log_prob(own, beams, block=1)
    torch.testing.assert_close(found, beams.log_prob, atol=2e-5, rtol=1e-5)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_gradients_reach_the_encoder_and_dropout_is_off() -> None:
    model = tiny.make("marian")
    model.config.dropout = 0.5
    for layer in model.modules():
        if hasattr(layer, "dropout"):
            layer.dropout = 0.5
    model.train()
    own = TransformersModel(model, **tiny.prompts(model))
    beams = drawn(own)
    found = log_prob(own, beams)
    torch.testing.assert_close(found, beams.log_prob, atol=2e-5, rtol=1e-5)
    assert model.training
    found.sum().backward()  # type: ignore[no-untyped-call]
    weight = model.get_encoder().layers[0].fc1.weight
    assert float(weight.grad.abs().sum()) > 0


def function_model(theta: torch.Tensor, sources: int = 1) -> FunctionModel:
    """A model whose scores depend on the length of the prefix and on its last token."""
    size = theta.shape[-1]

    def scores(prefix: torch.Tensor) -> torch.Tensor:
        last = prefix[:, -1] if prefix.shape[-1] else torch.zeros(len(prefix), dtype=torch.int64)
        return theta[prefix.shape[-1], last]

    return FunctionModel(scores, size, eos=0, sources=sources)


def test_any_differentiable_function_can_be_forced() -> None:
    theta = torch.randn(6, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theta.requires_grad_()
    model = function_model(theta, sources=2)
    beams = drawn(model)

    class Stepped:
        """The same model without ``force``."""

        def __getattr__(self, name: str) -> Any:
            if name == "force":
                raise AttributeError(name)
            return getattr(model, name)

    both = [log_prob(model, beams, checkpoint=True), log_prob(Stepped(), beams)]
    gradients = [torch.autograd.grad(x.sum(), theta)[0] for x in both]
    torch.testing.assert_close(both[0], beams.log_prob)
    torch.testing.assert_close(*both)
    torch.testing.assert_close(*gradients)
    assert float(gradients[0].abs().sum()) > 0


def test_functions_are_never_asked_what_follows_an_end() -> None:
    table = {(): [0.2, 0.8], (1,): [0.5, 0.5], (1, 1): [1.0, 0.0]}

    def scores(prefix: torch.Tensor) -> torch.Tensor:
        return torch.tensor([table[tuple(y)] for y in prefix.tolist()]).log()

    model = FunctionModel(scores, 2, eos=0)
    beams = search(model, 3, max_length=3, generator=0)
    torch.testing.assert_close(log_prob(model, beams), beams.log_prob)


def test_encoder_outputs_may_be_given_without_a_mask() -> None:
    model = tiny.make("t5")
    ids = tiny.prompts(model)["input_ids"][:1]
    with torch.no_grad():
        outputs = model.get_encoder()(input_ids=ids)
    own = TransformersModel(model, encoder_outputs=outputs)
    beams = drawn(own)
    torch.testing.assert_close(log_prob(own, beams), beams.log_prob, atol=2e-5, rtol=1e-5)


def test_divergences_are_finite_with_a_nucleus() -> None:
    first, second = (TableModel.random(4, 3, seed=s) for s in (1, 2))
    beams = search(first, 5, max_length=3, generator=0, nucleus=0.7)
    found = token_scores(first, beams, other=second)
    assert found.divergence is not None
    assert bool(found.divergence.isfinite().all())


def test_divergences_are_those_of_the_distributions() -> None:
    first, second = (TableModel.random(4, 3, seed=s) for s in (1, 2))
    beams = search(first, 100, max_length=3, generator=0)
    found = token_scores(first, beams, other=second)
    assert found.divergence is not None
    y = first.sequences(3), second.sequences(3)
    exact = sum(p * (math.log(p) - math.log(y[1][key])) for key, p in y[0].items())
    assert float((beams.log_prob.exp() * found.divergence.sum(-1)).sum()) == pytest.approx(exact)


def test_models_that_do_not_fit_are_refused() -> None:
    model = tiny.make("gpt2")
    own = TransformersModel(model, **tiny.prompts(model))
    beams = drawn(own)
    with pytest.raises(ValueError, match="model has 3 sources; it must have those of the beams, 2"):
        log_prob(own, beams[:2])
    with pytest.raises(ValueError, match="model is a GPT2LMHeadModel; it must be a model with"):
        log_prob(model, beams)
    with pytest.raises(ValueError, match="model and other are one object"):
        token_scores(own, beams, other=own)
    for block in (-1, 0):
        with pytest.raises(ValueError, match=f"block is {block}; it must be at least 1"):
            log_prob(own, beams, block=block)
