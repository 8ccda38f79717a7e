"""Defines linear layers with int8 weights, for CPUs.

Each output of a weight has a scale of its own, W ≈ s q with integers |q| ≤ 127. The inputs of a
product are rounded to eight bits when they arrive, each row with a scale of its own, so that what a
row gets does not depend on the other rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from cpsbs.backends.cpu.compiled import finished_rows, library, rounded_rows
from cpsbs.backends.cpu.products import PackedProduct, in_one_thread
from cpsbs.models.transformers.modules import modules_of

LARGEST = 127
"""The largest integer that an input is rounded to, and a weight where the processor has VNNI."""

LARGEST_WITHOUT_VNNI = 63
"""The largest integer of a weight elsewhere: a sum of two products must fit into 16 bits."""

ZERO = 128
"""What is added to the rounded inputs, because the kernels want them unsigned."""

BLOCK = 2**19
"""The most elements of a result to scale at a time, so that they are still in the cache."""


@dataclass(frozen=True)
class Int8Weight:
    """A weight matrix [out, in] as integers with a scale for each output."""

    values: Tensor
    """[out, in] int8."""
    scale: Tensor
    """[out] float32."""

    @staticmethod
    def of(weight: Tensor) -> Int8Weight:
        """Round a weight matrix to int8."""
        weight = weight.detach().float()
        largest = LARGEST if _has_vnni() else LARGEST_WITHOUT_VNNI
        scale = _largest_of_rows(weight) / largest
        values = (weight / scale).round().to(torch.int8)
        # oneDNN packs the numbers in the order in which they lie in memory, whatever the strides.
        return Int8Weight(values.contiguous(), scale[:, 0].contiguous())

    @staticmethod
    def below_each_other(weights: list[Int8Weight]) -> Int8Weight:
        """Return the matrix of all outputs of some weights."""
        if len(weights) == 1:
            return weights[0]
        values, scales = [w.values for w in weights], [w.scale for w in weights]
        return Int8Weight(torch.cat(values), torch.cat(scales))

    @property
    def shape(self) -> torch.Size:
        """The shape (out, in)."""
        return self.values.shape

    def packed(self, bias: Tensor | None, activation: str | None = None) -> PackedProduct | None:
        """Return the product with this weight by compiled loops, or None where it is impossible."""
        return PackedProduct.pack(self.values, bias, activation, self.scale)

    def __getstate__(self) -> dict[str, Tensor]:
        """Return what is copied and pickled: not the packed weights, which are addresses."""
        return {"values": self.values, "scale": self.scale}

    @cached_property
    def _compiled(self) -> PackedProduct | None:
        return self.packed(None)

    @cached_property
    def _packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """The weight in the layout of the kernels, its scales, and zeros."""
        packed: Tensor = torch.ops.onednn.qlinear_prepack(self.values, None)
        return packed, self.scale, torch.zeros(len(self.scale), dtype=torch.int32, device="cpu")

    def product(self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
        """Return x Wᵀ + b + residual for inputs x [..., in] and a residual [..., out]."""
        if x.dtype != torch.float32:  # all below reads its numbers as such
            added = None if residual is None else residual.float()
            return self.product(x.float(), bias, added).to(x.dtype)
        rows, outputs = x.reshape(-1, x.shape[-1]), len(self.scale)
        work = len(rows) * self.values.numel()
        if self._compiled is not None and library() is not None and in_one_thread(work // 4):
            added = None if residual is None else residual.reshape(len(rows), outputs)
            y = self._compiled(rows, added)
            return (y if bias is None else y.add_(bias)).view(*x.shape[:-1], outputs)
        given, scale = _rounded(rows)
        y = torch.empty((len(rows), outputs), dtype=torch.float32, device="cpu")
        more = None if residual is None else residual.reshape(y.shape).contiguous()
        height = max(1, BLOCK // outputs)
        for top in range(0, len(rows), height):
            part = slice(top, top + height)
            product, own = self._integer_product(given[part]), more if more is None else more[part]
            if not finished_rows(product, scale[part], bias, own, y[part]):
                torch.mul(product, scale[part], out=y[part])
                for addend in (bias, own):
                    if addend is not None:
                        y[part] += addend
        return y.view(*x.shape[:-1], outputs)

    def _integer_product(self, given: Tensor) -> Tensor:
        """Return [n, out] float32 the product of rounded inputs [n, in] with s q."""
        multiply: Any = torch.ops.onednn.qlinear_pointwise
        plain: tuple[Any, ...] = (None, 1.0, 0, torch.float32, "none", [], "")
        y: Tensor = multiply(given, 1.0, ZERO, *self._packed, *plain)
        return y


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [n, d] as unsigned bytes around ``ZERO``, and their scales [n, 1]."""
    found = rounded_rows(rows)
    if found is not None:
        return found
    scale = _largest_of_rows(rows) / LARGEST
    rounded = (rows / scale).round_().to(torch.int8)
    # In two's complement, to turn the first bit is to add 128.
    return rounded.view(torch.uint8).bitwise_xor_(ZERO), scale


def _largest_of_rows(x: Tensor) -> Tensor:
    """Return [n, 1] the largest absolute value of each row of x [n, d], and never zero."""
    return x.abs().amax(-1, keepdim=True).clamp_(min=1e-30)


def _has_vnni() -> bool:
    """Return whether the processor adds up products of eight bits in 32 bits."""
    supported: Any = getattr(torch.cpu, "_is_vnni_supported", None)
    return supported is not None and bool(supported())


class Int8Linear(nn.Module):
    """A linear layer with its weight [out, in] rounded to int8; no gradients go through it."""

    weight = None
    """There is none in float32; T5 asks for its dtype if there is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.quantized = Int8Weight.of(weight)
        self.bias = None if bias is None else bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b."""
        return self.quantized.product(x, self.bias)


def quantize(model: nn.Module) -> None:
    """Replace every linear layer of a float32 model on the CPU by one with int8 weights.

    These are ``torch.nn.Linear`` and the Conv1D of GPT-2, which stores its weight transposed.
    Embeddings, norms and biases stay as they are.

    Raises:
        ValueError: if torch has no int8 kernels for this processor.
    """
    from transformers.pytorch_utils import Conv1D

    if not int8_works():
        raise ValueError(
            "quantize is int8, but torch has no int8 kernels for this processor; leave it out"
        )
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                weight = child.weight
            elif type(child) is Conv1D:
                weight = child.weight.T
            else:
                continue
            setattr(module, name, Int8Linear(weight, child.bias).train(child.training))


def is_quantized(model: nn.Module) -> bool:
    """Return whether some layers of a model have int8 weights."""
    return any(isinstance(module, Int8Linear) for module in modules_of(model))


@functools.cache
def int8_works() -> bool:
    """Return whether torch has products with int8 weights here, and they are right."""
    x, weight = (
        torch.eye(3, 8, dtype=torch.float32, device="cpu") - 0.5,
        torch.arange(32.0, dtype=torch.float32, device="cpu").view(4, 8) - 16,
    )
    try:
        found = Int8Weight.of(weight).product(x, None)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.allclose(found, x @ weight.T, atol=2.0)
