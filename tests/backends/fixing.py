"""A backend that does on a CPU what others do on a GPU, where the tests can compare: its steps have
a fixed shape, and what is computed ahead is computed in another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from cpsbs.backends.base import Backend, FixedSteps, OrdinarySteps
from cpsbs.backends.cpu import backend
from cpsbs.backends.triton.fixed_steps import begin


class FixingBackend(Backend):
    """The reference with steps of fixed shape, on every device."""

    def __init__(self) -> None:
        self.rehearsed: list[Hashable] = []
        """What was rehearsed, by any search."""

    def fixed_steps(
        self,
        model: Any,
        inputs: Callable[[], Mapping[str, Any]],
        k: int,
        steps: int,
        reference: Callable[[], OrdinarySteps],
    ) -> FixedSteps | None:
        return begin(model, inputs(), k, steps, reference)

    def compute_ahead(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with torch.no_grad():
                return compute()

        return ASIDE.submit(run).result

    def rehearse(
        self, key: Hashable, steps: Sequence[Callable[[], Callable[[], None]]]
    ) -> Callable[[], None]:
        self.rehearsed.append(key)

        def run(prepare: Callable[[], Callable[[], None]]) -> None:
            with torch.no_grad():
                prepare()()

        begun = [ASIDE.submit(run, prepare) for prepare in steps]

        def wait() -> None:
            for step in begun:
                step.result()

        return wait


ASIDE = ThreadPoolExecutor(1)
FIXING = FixingBackend()


def fix_rows_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let searches on a CPU use this backend."""
    monkeypatch.setattr(backend, "COMPILED", FIXING)
