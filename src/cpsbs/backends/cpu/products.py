"""Products of rows with weight matrices by compiled loops (``products.c``).

For few rows most of the time of torch's products is that of the call, and with int8 weights it
needs three of them. These are as fast as torch's for many rows, and several times faster for few.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn.functional import pad

from cpsbs.backends.cpu.compiled import INTEGER, POINTER, Fields, address, library
from cpsbs.scores.memory import scratch_buffer

PANEL = 64
"""The number of outputs whose weights lie side by side; ``PANEL`` in ``products.h``."""

ACTIVATIONS = {
    None: 0,
    "relu": 1,
    "silu": 2,
    "swish": 2,
    "gelu_new": 3,
    "gelu_pytorch_tanh": 3,
    "gelu": 4,
}
"""The numbers of activations in ``products.c``, by the names of transformers."""

ZERO = 128
"""What is added to rounded inputs, because the processor multiplies unsigned with signed bytes."""


PARALLEL = 2**23
"""From how many multiplications on several threads of torch are faster than compiled loops."""


def in_one_thread(multiplications: int) -> bool:
    """Return whether compiled loops, which run in one thread, are the best for a product."""
    return multiplications < PARALLEL or torch.get_num_threads() == 1


def gated_rows(x: Tensor, activation: str) -> Tensor | None:
    """Return act(a) b for rows [a, b] of x [n, 2 d], or None where there is no library for it."""
    compiled = library()
    if compiled is None or activation not in ACTIVATIONS:
        return None
    x = x.contiguous()
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, size), dtype=torch.float32, device="cpu")
    compiled.gate_rows(address(x), rows, size, ACTIVATIONS[activation], address(out))
    return out


class _Product(Fields):
    """Mirrors the structure ``product`` of ``products.h``, field by field."""

    _fields_ = (
        *((name, POINTER) for name in ("weight", "scale", "correction", "bias")),
        *((name, INTEGER) for name in ("inputs", "outputs", "activation")),
    )


class PackedProduct:
    """x ↦ act(x Wᵀ + b) + residual for float32 rows x [n, in], with weights packed for it.

    ``pack`` makes one where that is possible.
    """

    def __init__(self, fields: Fields, inputs: int, outputs: int) -> None:
        self._fields, self.inputs, self._outputs = fields, inputs, outputs

    @staticmethod
    def pack(
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None = None,
        scale: Tensor | None = None,
    ) -> PackedProduct | None:
        """Return the product with a weight matrix, or None where there is no library for it.

        Args:
            weight: [out, in] float32, or int8 together with ``scale``.
            bias: [out] or None.
            activation: a name in ``ACTIVATIONS``.
            scale: [out] what integer weights are multiplied by.
        """
        compiled, (outputs, inputs) = library(), weight.shape
        if compiled is None or activation not in ACTIVATIONS or not weight.numel():
            return None
        if scale is None and not compiled.multiplies_floats():
            return None
        more, correction, group = (0, -outputs % PANEL), None, 1
        if scale is not None:
            group = 4  # of inputs, which are multiplied and added up by one instruction
            if not compiled.multiplies_bytes() or inputs % group:
                return None
            scale = pad(scale, more)
            correction = pad(-ZERO * weight.sum(1, dtype=torch.int32), more)
        panels = pad(weight.detach(), (0, 0, *more)).view(-1, PANEL, inputs // group, group)
        fields = _Product.of(
            weight=panels.transpose(1, 2),
            scale=scale,
            correction=correction,
            bias=None if bias is None else bias.detach(),
            inputs=inputs,
            outputs=outputs,
            activation=ACTIVATIONS[activation],
        )
        return PackedProduct(fields, inputs, outputs)

    @property
    def address(self) -> int:
        """Where other compiled functions find the product."""
        return ctypes.addressof(self._fields)

    def replace_bias(self, bias: Tensor) -> None:
        """Add another bias [out] from now on."""
        self._fields.replace(bias=bias)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return act(x Wᵀ + b) + residual for rows x [n, in] and a residual [n, out]."""
        assert x.dtype == torch.float32 and x.device.type == "cpu"  # noqa: PT018
        x = x.contiguous()
        residual = None if residual is None else residual.contiguous()
        rows = x.shape[0]
        out = torch.empty((rows, self._outputs), dtype=torch.float32, device="cpu")
        scratch = scratch_buffer(rows * (self.inputs + 4) // 8 + 1, x.device)
        compiled = library()
        assert compiled is not None
        given = (ctypes.addressof(self._fields), address(x), rows)
        compiled.multiply(*given, address(residual), address(out), address(scratch))
        return out
