"""Which functions a ``FunctionModel`` takes, and what it passes to them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cpsbs import FunctionModel, check_model

V = 4


def scores(prefix: Tensor, source: Tensor) -> Tensor:
    """Every source has a favourite token."""
    return nn.functional.one_hot(source % V, V).float() * 5


def by_keyword(prefix: Tensor, *, source: Tensor) -> Tensor:
    return scores(prefix, source)


def by_default(prefix: Tensor, scale: float = 1.0, source: Tensor | None = None) -> Tensor:
    assert source is not None
    return scale * scores(prefix, source)


def scaled(scale: float, prefix: Tensor, source: Tensor) -> Tensor:
    return scale * scores(prefix, source)


class Favourites:
    """An object that is a function."""

    def __call__(self, prefix: Tensor, source: Tensor) -> Tensor:
        return scores(prefix, source)

    def method(self, prefix: Tensor, source: Tensor) -> Tensor:
        return scores(prefix, source)

    @staticmethod
    def static(prefix: Tensor, source: Tensor) -> Tensor:
        return scores(prefix, source)


class Module(nn.Module):
    """A network; torch calls its ``forward`` by way of a function that takes anything."""

    def forward(self, prefix: Tensor, source: Tensor) -> Tensor:
        return scores(prefix, source)


TAKE_SOURCE: dict[str, Callable[..., Tensor]] = {
    "function": scores,
    "lambda": lambda prefix, source: scores(prefix, source),
    "keyword-only": by_keyword,
    "default": by_default,
    "partial": functools.partial(scaled, 1.0),
    "partial of a keyword": functools.partial(by_default, scale=1.0),
    "partial of a partial": functools.partial(functools.partial(by_default), scale=1.0),
    "object": Favourites(),
    "method": Favourites().method,
    "static method": Favourites.static,
    "module": Module(),
    "decorated": torch.no_grad()(scores),
}


@pytest.mark.parametrize("name", TAKE_SOURCE)
def test_whoever_asks_for_the_source_gets_it(name: str) -> None:
    model = FunctionModel(TAKE_SOURCE[name], V, eos=0, sources=3)
    assert model.start().argmax(-1).tolist() == [0, 1, 2]
    parent, token = torch.tensor([2, 0, 2]), torch.tensor([1, 1, 3])
    assert model.advance(parent, token).argmax(-1).tolist() == [2, 0, 2]
    check_model(model)


def flat(prefix: Tensor) -> Tensor:
    return torch.zeros(len(prefix), V)


def takes_anything(prefix: Tensor, **others: Any) -> Tensor:
    assert not others
    return flat(prefix)


def takes_any_number(*given: Any, **others: Any) -> Tensor:
    assert len(given) == 1
    return takes_anything(*given, **others)


def calls_its_prefix_source(source: Tensor) -> Tensor:
    return flat(source)


def has_a_local_variable(prefix: Tensor) -> Tensor:
    source = flat(prefix)
    return source + 1


DO_NOT: dict[str, Callable[..., Tensor]] = {
    "function": flat,
    "**kwargs": takes_anything,
    "*args, **kwargs": takes_any_number,
    "prefix called source": calls_its_prefix_source,
    "local variable": has_a_local_variable,
    "partial": functools.partial(takes_anything),
    # It is bound to something else, and that must stay.
    "partial that binds it": functools.partial(by_keyword, source=torch.tensor([3])),
    "builtin without a signature": operator.methodcaller("new_zeros", (1, V), dtype=torch.float32),
}


@pytest.mark.parametrize("name", DO_NOT)
def test_whoever_does_not_ask_for_the_source_does_not_get_it(name: str) -> None:
    model = FunctionModel(DO_NOT[name], V, eos=0)
    assert model.start().shape == (1, V)
    assert model.advance(torch.tensor([0]), torch.tensor([3])).shape == (1, V)


def test_what_a_partial_binds_stays() -> None:
    model = FunctionModel(DO_NOT["partial that binds it"], V, eos=0)
    assert model.start().argmax(-1).tolist() == [3]


@pytest.mark.parametrize(("eos", "tokens", "pad"), [(2, (2,), 2), ([3, 1], (3, 1), 3), ((), (), 0)])
def test_one_token_many_or_none_end_a_sequence(eos: Any, tokens: tuple[int, ...], pad: int) -> None:
    model = FunctionModel(flat, V, eos)
    assert (model.eos, model.pad) == (tokens, pad)


@pytest.mark.parametrize("eos", [4, -1, (0, 4)])
def test_an_end_outside_the_vocabulary_is_refused(eos: Any) -> None:
    with pytest.raises(ValueError, match=r"eos is .* 0 to V - 1 = 3"):
        FunctionModel(flat, V, eos)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: flat(x)[:, 1:], r"the shape \[1, 3\]; it must be \[rows, V\] = \[1, 4\]"),
        (lambda x: flat(x).tolist(), "a list; it must return a tensor"),
        (lambda x: flat(x).long(), "int64; they must be floating-point"),
    ],
)
def test_what_the_function_returns_is_checked(wrong: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"next_log_probs returned .*{message}"):
        FunctionModel(wrong, V, eos=0).start()
