"""A backend whose steps have a fixed shape on a CPU too, where the tests can compare them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from cpsbs.backends.base import Backend, FixedSteps, OrdinarySteps
from cpsbs.backends.cpu import backend
from cpsbs.backends.triton.fixed_steps import begin


class FixingBackend(Backend):
    """The reference with steps of fixed shape, on every device."""

    def fixed_steps(
        self,
        model: Any,
        inputs: Callable[[], Mapping[str, Any]],
        k: int,
        steps: int,
        reference: Callable[[], OrdinarySteps],
    ) -> FixedSteps | None:
        return begin(model, inputs(), k, steps, reference)


FIXING = FixingBackend()


def fix_rows_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let searches on a CPU use this backend."""
    monkeypatch.setattr(backend, "COMPILED", FIXING)
