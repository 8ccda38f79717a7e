"""Computes products with weight matrices that are prepared once for many steps on a CPU.

A step multiplies a few rows with every weight of the model. Compiled loops do that with packed
weights, and add the bias, the residual or the activation while they write the result. Where there
is no compiler, oneDNN does it nearly as well; torch brings it, under names that it uses for
compiled models. Where these are missing, ``torch.nn.functional.linear`` takes their place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cpsbs.backends.cpu.products import ACTIVATIONS as COMPILED_ACTIVATIONS
from cpsbs.backends.cpu.products import PackedProduct, in_one_thread
from cpsbs.models.transformers.int8 import Int8Linear, Int8Weight

ACTIVATIONS: dict[str, tuple[str, str, Callable[[Tensor], Tensor]]] = {
    "relu": ("relu", "", functional.relu),
    "silu": ("swish", "", functional.silu),
    "swish": ("swish", "", functional.silu),
    "gelu": ("gelu", "none", functional.gelu),
    "gelu_new": ("gelu", "tanh", functools.partial(functional.gelu, approximate="tanh")),
    "gelu_pytorch_tanh": ("gelu", "tanh", functools.partial(functional.gelu, approximate="tanh")),
}
"""Activations by the names of transformers: oneDNN's name and variant, and torch's function."""


class Product:
    """x ↦ act(x Wᵀ + b) for rows x [n, in], or x Wᵀ + b + residual.

    Args:
        weights: weight matrices [out, in] with their biases [out] or None, one below the other.
        activation: a name in ``ACTIVATIONS``, or None.
        copy: whether the weights may be copied into another layout.
    """

    def __init__(
        self,
        weights: list[tuple[Tensor | Int8Weight, Tensor | None]],
        activation: str | None = None,
        copy: bool = True,
    ) -> None:
        name, variant = "none", ""
        self._act: Callable[[Tensor], Tensor] | None = None
        if activation is not None:
            name, variant, self._act = ACTIVATIONS[activation]
        self._attributes: tuple[Any, ...] = (name, [], variant)
        self._bias = _below_each_other(weights)
        self._int8: Int8Weight | None = None
        self._plain: list[Tensor] = []
        self._copy = copy
        self.compiled: PackedProduct | None = None
        """The product by compiled loops, with bias and activation; None if there is none."""
        fuses = activation in COMPILED_ACTIVATIONS
        given = [weight for weight, _ in weights]
        self.inputs, self.outputs = given[0].shape[1], sum(weight.shape[0] for weight in given)
        quantized = [weight for weight in given if isinstance(weight, Int8Weight)]
        if quantized:
            self._int8 = Int8Weight.below_each_other(quantized)
            self.compiled = self._int8.packed(self._bias, activation) if fuses else None
            return
        self._plain = [weight.detach() for weight in given if isinstance(weight, Tensor)]
        if copy and fuses:
            self.compiled = PackedProduct.pack(self._joined(), self._bias, activation)

    def _joined(self) -> Tensor:
        """Return the weights [out, in], one below the other."""
        return self._plain[0] if len(self._plain) == 1 else torch.cat(self._plain)

    @cached_property
    def _weight(self) -> Tensor:
        return self._joined()

    @cached_property
    def _packed(self) -> Any:
        """The weights as oneDNN packs them; None if it cannot, or they must not be copied."""
        if not self._copy or not self._plain or not onednn_packs():
            return None
        return torch.ops.mkldnn._reorder_linear_weight(self._joined(), None)

    def add_bias(self, bias: Tensor) -> None:
        """Add another bias [out]."""
        bias = bias.detach()
        self._bias = bias if self._bias is None else self._bias + bias
        if self.compiled is not None:
            self.compiled.replace_bias(self._bias)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the product for the rows x; ``residual`` [n, out] only without an activation."""
        if self.compiled is not None and in_one_thread(x.shape[0] * self.inputs * self.outputs):
            return self.compiled(x, residual)
        if self._packed is not None:
            products: Any = torch.ops.mkldnn._linear_pointwise
            if residual is not None:
                added: Tensor = products.binary(x, residual, self._packed, self._bias, "add")
                return added
            product: Tensor = products(x, self._packed, self._bias, *self._attributes)
            return product
        if self._int8 is not None:
            y = self._int8.product(x, self._bias, residual)
        else:
            y = functional.linear(x, self._weight, self._bias)
            y = y if residual is None else y.add_(residual)
        return y if self._act is None else self._act(y)


def product_of(*layers: Any, activation: str | None = None, copy: bool = True) -> Product:
    """Return the product with the weights of some ``Linear`` layers, one below the other."""
    weights: list[tuple[Tensor | Int8Weight, Tensor | None]] = [
        (layer.quantized if isinstance(layer, Int8Linear) else layer.weight, layer.bias)
        for layer in layers
    ]
    return Product(weights, activation, copy)


def _below_each_other(weights: list[tuple[Tensor | Int8Weight, Tensor | None]]) -> Tensor | None:
    """Return the biases [out] of all weights, zero where one has none; None if all have none."""
    if all(bias is None for _, bias in weights):
        return None
    every = [
        torch.zeros(weight.shape[0], dtype=torch.float32, device="cpu")
        if bias is None
        else bias.detach()
        for weight, bias in weights
    ]
    return every[0] if len(every) == 1 else torch.cat(every)


@functools.cache
def onednn_packs() -> bool:
    """Return whether torch has oneDNN's products with packed weights here, and they are right."""
    x, weight, bias = (
        torch.eye(3, 5, dtype=torch.float32, device="cpu"),
        torch.arange(20.0, dtype=torch.float32, device="cpu").view(4, 5),
        torch.arange(4.0, dtype=torch.float32, device="cpu"),
    )
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        products: Any = torch.ops.mkldnn._linear_pointwise
        found = products(x, packed, bias, "relu", [], "")
        added = products.binary(x, found, packed, bias, "add")
    except (AttributeError, RuntimeError, TypeError):
        return False
    wanted = functional.linear(x, weight, bias)
    return torch.allclose(found, wanted.relu()) and torch.allclose(added, wanted + found)
