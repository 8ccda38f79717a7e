"""What grows in kept memory is what transformers' cache holds, and the search is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

from cpsbs import Beams, TransformersModel, search
from cpsbs.models.transformers import growing
from cpsbs.models.transformers.growing import GrowingLayer, let_grow
from cpsbs.models.transformers.moves import Moves
from tests.models.tiny import make, prompts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layers_hold_what_transformers_holds(dtype: torch.dtype) -> None:
    """Over more tokens than there is room for, with fewer rows, then more; two orders in a row."""
    random = torch.Generator().manual_seed(0)

    def states(rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys = torch.randn((rows, 2, tokens, 4), generator=random).to(dtype)
        values = torch.randn((rows, tokens, 2, 3), generator=random).to(dtype)
        return keys, values.transpose(1, 2)

    expected, cache = DynamicCache(), DynamicCache()
    for layer in range(3):
        given = states(9, 5)
        for each in (expected, cache):
            each.update(*given, layer)
    layers: Any = cache.layers
    prompt = [x for layer in layers for x in (layer.keys, layer.values)]
    before = [x.clone() for x in prompt]
    let_grow(cache)
    assert all(type(layer) is GrowingLayer for layer in cache.layers)
    rows = 9
    for step in range(50):
        if step % 7 != 3:
            for _ in range(1 + step % 2):
                count = {0: 2, 1: 12}.get(step, max(2, rows - step % 3))
                order: Any = torch.randint(rows, (count,), generator=random)
                rows = count
                for each in (expected, cache):
                    each.reorder_cache(order)
        for layer in range(3):
            given = states(rows, 1)
            wanted, found = expected.update(*given, layer), cache.update(*given, layer)
            for x, y in zip(wanted, found, strict=True):
                assert y.is_contiguous()
                assert torch.equal(x, y)
        assert cache.get_seq_length() == expected.get_seq_length() == step + 6
    # Others may hold on to what was there before.
    assert all(torch.equal(x, y) for x, y in zip(prompt, before, strict=True))


def test_memory_is_used_again() -> None:
    cache = DynamicCache()
    for layer in range(4):
        cache.update(torch.zeros(6, 2, 5, 4), torch.zeros(6, 2, 5, 4), layer)
    let_grow(cache)
    seen = set()
    order: Any = torch.arange(6)
    for _ in range(60):
        cache.reorder_cache(order)
        for layer in range(4):
            for x in cache.update(torch.zeros(6, 2, 1, 4), torch.zeros(6, 2, 1, 4), layer):
                seen.add(x.data_ptr())
    # 8 tensors and a spare one, made anew every 16 steps or so; not 480.
    assert len(seen) < 80


@pytest.mark.parametrize("name", ["llama", "gpt2", "marian", "bart", "t5"])
@pytest.mark.parametrize("k", [1, 4])
def test_a_search_is_the_same(name: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when hypotheses end, so that the rows of sources move together."""
    model = make(name)
    eos = list(range(1, 9))
    monkeypatch.setattr(TransformersModel, "_runs_directly", lambda _: False)

    def run() -> Beams:
        inputs = prompts(model)
        before = {key: x.clone() for key, x in inputs.items()}
        beams = search(
            TransformersModel(model, **inputs, eos_token_id=eos), k, max_length=40, generator=3
        )
        assert all(torch.equal(inputs[key], x) for key, x in before.items())
        return beams

    found = run()
    grown: list[object] = []
    monkeypatch.setattr(growing, "let_grow", grown.append)
    monkeypatch.setattr(TransformersModel, "_moves", lambda _, parent, source: Moves(parent))
    expected = run()
    assert grown or int(found.lengths.max()) == 1
    assert k == 1 or len(set(found.lengths.flatten().tolist())) > 1
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(found.log_prob, expected.log_prob)
