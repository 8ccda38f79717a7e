"""Lets a model compute its logits in the buffer that the search reads, instead of copying them.

``python -m benchmarks.ablations logits`` measures what that saves. Without it, ``Logits.of`` is the
call of the model alone, and everything below ``Logits`` goes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cpsbs.backends.triton import kernels

aten: Any = torch.ops.aten


class Logits:
    """The buffer [rows, V] in which every step of a model leaves its logits.

    When a model runs for the first time, its matrix products and sums are counted, and it is noted
    which of them made the logits. From then on that one operation of a step writes into the buffer.
    For the model it is a result like any other, and nothing else is written there before the step
    is over. Should the model compute in another way than the first time, its logits are copied.
    """

    def __init__(self) -> None:
        self.scores: Tensor | None = None
        self._last: int | None = None
        """The number of the operation that made the logits, if it is of a known kind."""

    def of(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Run the model and return the logits of the last token, for ``keep``."""
        mode = _Redirect(self.scores, self._last)
        with mode:
            logits: Tensor = model(**inputs, return_dict=True).logits[:, -1]
        if self.scores is None:
            self._last = mode.made.get(logits.data_ptr())
        return logits

    def keep(self, logits: Tensor) -> None:
        """Copy the logits into the buffer, if they are not there already."""
        if self.scores is None:
            with torch.inference_mode(False):
                self.scores = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        same = logits.data_ptr() == self.scores.data_ptr() and logits.shape == self.scores.shape
        if not (same and logits.is_contiguous()):
            self.scores.copy_(logits)


class _Redirect(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Counts matrix products and sums, and lets the one numbered ``last`` write into ``scores``."""

    def __init__(self, scores: Tensor | None, last: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._scores, self._last, self._count = scores, last, 0
        self.made: dict[int, int] = {}
        """The number of the operation whose result is at each address. Later results replace those
        that have been freed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (aten.mm.default, aten.addmm.default, aten.add.Tensor):
            return func(*args, **kwargs)
        number, self._count = self._count, self._count + 1
        if self._scores is not None and number == self._last:
            return _into(self._scores, func, args, kwargs)
        result = func(*args, **kwargs)
        self.made[result.data_ptr()] = number
        return result


def _into(scores: Tensor, func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation, inside of ``scores`` if it has their shape."""
    if func is not aten.add.Tensor:
        size = (args[-2].shape[0], args[-1].shape[1])
        if size != scores.shape or args[-1].dtype != scores.dtype:
            return func(*args, **kwargs)
        return (aten.addmm if func is aten.addmm.default else aten.mm).out(
            *args, **kwargs, out=scores
        )
    x, y = args
    tokens = scores.shape[-1]
    is_bias = (
        isinstance(x, Tensor)
        and isinstance(y, Tensor)
        and not kwargs
        and x.dtype == y.dtype == scores.dtype
        and x.device == y.device == scores.device
        and x.numel() == scores.numel()
        and x.shape[-1] == tokens
        and y.numel() == tokens == y.shape[-1]
        and y.ndim <= x.ndim
        and x.is_contiguous()
        and y.is_contiguous()
    )
    if not is_bias:
        return func(*args, **kwargs)
    if kernels.usable(x.device) and scores.dtype != torch.float64:
        from cpsbs.backends.triton.kernels.logits import add_bias

        add_bias(scores, x.view(scores.shape), y.view(tokens))
    else:
        torch.add(x.view(scores.shape), y.view(tokens), out=scores)
    return scores.view(x.shape)
