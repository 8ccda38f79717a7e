"""Products with int8 weights are close to those in float32, and rows do not depend on others."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import cpsbs
from cpsbs import TransformersModel
from cpsbs.backends.cpu import compiled, products
from cpsbs.models.transformers import int8
from cpsbs.models.transformers.int8 import Int8Linear, Int8Weight, int8_works, quantize
from tests.models.tiny import prompts
from tests.models.wide import MAKERS, wide


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def _either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not int8_works():
        pytest.skip("torch has no int8 kernels for this processor")
    if request.param == "torch":
        for module in (compiled, products, int8):
            monkeypatch.setattr(module, "library", lambda: None)
    elif compiled.library() is None:
        pytest.skip("there is no C compiler")


@pytest.mark.parametrize("shape", [(1, 7, 5), (3, 40, 33), (64, 256, 768)])
def test_a_product_is_close(shape: tuple[int, int, int]) -> None:
    n, inputs, outputs = shape
    random = torch.Generator().manual_seed(0)
    x, w, b = (
        torch.randn(s, generator=random) for s in ((n, inputs), (outputs, inputs), (outputs,))
    )
    x[0] *= 1000  # a large row does not make others coarse
    weight, residual = Int8Weight.of(w), torch.randn((n, outputs), generator=random)
    found, exact = weight.product(x, b, residual), x @ w.T + b + residual
    error = (found - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(error.max()) < 0.03
    torch.testing.assert_close(weight.product(x[-1:], b, residual[-1:]), found[-1:])
    assert torch.equal(weight.product(x[:, None], None)[:, 0], weight.product(x, None))


@pytest.mark.parametrize("threads", [1, 2])
def test_weights_may_lie_transposed(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of GPT-2 do; with several threads, large products are oneDNN's."""
    monkeypatch.setattr(int8, "in_one_thread", lambda _: threads == 1)
    random = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=random) for s in ((20, 64), (64, 48)))
    found, exact = Int8Weight.of(w.T).product(x, None), x @ w
    assert float((found - exact).norm() / exact.norm()) < 0.03


def test_rows_of_zeros_and_large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn((9, 16), generator=torch.Generator().manual_seed(0))
    x[4] = 0
    weight = Int8Weight.of(torch.randn((20, 16), generator=torch.Generator().manual_seed(1)))
    whole = weight.product(x, None)
    assert not whole[4].any()
    monkeypatch.setattr(int8, "BLOCK", 40)
    torch.testing.assert_close(weight.product(x, None), whole)


def test_a_model_is_loaded_with_int8_weights() -> None:
    text = ["The room was too warm."]
    model = cpsbs.load("en-fr", device="cpu", quantize="int8")
    assert any(isinstance(module, Int8Linear) for module in model.model.modules())
    found = model.beams(text, 3, "top-k")
    assert model.texts(found)[0][0] == "La pièce était trop chaude."
    exact = cpsbs.load("en-fr", device="cpu").beams(text, 3, "top-k")
    assert abs(float(found.log_prob[0, 0] - exact.log_prob[0, 0])) < 0.1


@pytest.mark.parametrize("name", MAKERS)
@torch.no_grad()
def test_all_linear_layers_of_all_architectures_are_rounded(name: str) -> None:
    """T5 asks for the dtype of a weight, and GPT-2 stores weights transposed."""
    model = wide(name)
    wrapped = TransformersModel(model, **prompts(model))
    exact = wrapped.start().softmax(-1)
    quantize(model)
    kinds = {type(module).__name__ for module in model.modules()}
    assert "Int8Linear" in kinds
    assert not kinds & {"Linear", "Conv1D"}
    wrapped = TransformersModel(model, **prompts(model))
    wrapped._may_be_direct = False
    found = wrapped.start().softmax(-1)
    assert float((found - exact).abs().max()) < 0.1
    assert not torch.equal(found, exact)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quantize": "int4"}, r"quantize is 'int4'; allowed are None and 'int8'"),
        ({"quantize": "int8", "dtype": "bfloat16"}, "int8 weights need the CPU and float32"),
    ],
)
def test_what_cannot_be_rounded_is_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cpsbs.load("en-fr", device="cpu", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_inputs_of_other_dtypes_are_converted(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    x, w = torch.randn((3, 16), generator=random), torch.randn((20, 16), generator=random)
    weight = Int8Weight.of(w)
    found = weight.product(x.to(dtype), None)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), weight.product(x, None), rtol=0.02, atol=0.1)


@pytest.mark.parametrize("inputs", [64, 62])
def test_biases_of_other_dtypes_are_converted(inputs: int) -> None:
    random = torch.Generator().manual_seed(0)
    x, w, b = (
        torch.randn(s, generator=random).bfloat16() for s in ((200, inputs), (48, inputs), (48,))
    )
    found, expected = Int8Linear(w, b)(x), Int8Linear(w.float(), b.float())(x.float())
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.1)


def test_what_is_no_number_stays_so() -> None:
    x = torch.randn((4, 48), generator=torch.Generator().manual_seed(0))
    weight = Int8Weight.of(torch.randn((20, 48), generator=torch.Generator().manual_seed(1)))
    expected = weight.product(x, None)
    x[1, 7], x[2, 40] = float("nan"), float("inf")
    found = weight.product(x, None)
    assert not found[1].isfinite().any()
    assert not found[2].isfinite().any()
    assert torch.equal(found[[0, 3]], expected[[0, 3]])


def test_a_model_can_be_copied_and_pickled_after_a_search() -> None:
    model = cpsbs.load("en-fr", device="cpu", quantize="int8")
    expected = model.beams(["Yes."], 2, "top-k")
    for again in (copy.deepcopy(model.model), pickle.loads(pickle.dumps(model.model))):
        found = cpsbs.TextModel("again", again, model.tokenizer).beams(["Yes."], 2, "top-k")
        assert torch.equal(found.sequences, expected.sequences)
        assert torch.equal(found.log_prob, expected.log_prob)
