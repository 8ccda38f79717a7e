"""Layers that compute with fewer launches compute the same."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from cpsbs.backends.triton import fusing
from tests.backends.interpreted import Interpreter
from tests.backends.test_fixed_steps import Pair, build, held_by
from tests.backends.test_workspace import Notes


def check_wrong_layers() -> None:
    """What fused layers compute is compared; layers that somebody has changed are left alone."""
    notes, model = Notes(), build("llama", dtype=torch.float32)
    with patch.object(fusing, "_normed", lambda x, norm: 2 * x):
        pair = Pair(model)
        assert pair.fix(4)
    assert not held_by(pair)._fuses
    assert [note for note in notes.found if note.startswith("the layers of Llama")]
    pair.agree(3, atol=1e-4)
    model = build("llama", dtype=torch.float32)
    assert fusing.can_fuse(model)
    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda module, given, found: found + 1)
    assert not fusing.can_fuse(model)
    pair = Pair(model)
    assert pair.fix(4)
    pair.agree(2, atol=1e-4)


def test_layers_are_compared(interpreter: Interpreter) -> None:
    interpreter.run(check_wrong_layers)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_on_a_gpu(dtype: torch.dtype) -> None:
    """Weights that change in place are seen by recorded steps."""
    with torch.no_grad():
        model = build("llama", "cuda", dtype)
        pair = Pair(model, k=3)
        assert pair.fix(12)
        assert held_by(pair)._fuses
        error = 1e-3 if dtype == torch.float32 else 0.6  # of logits that are large
        pair.agree(4, atol=error)
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        pair.agree(4, atol=error)
