"""``check_model`` accepts every model we ship, and names what is wrong with others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpsbs
from cpsbs import FunctionModel, TableModel, TransformersModel, check_model, search
from cpsbs.backends import Backend
from cpsbs.models import FixedRowModel, SequenceModel, StoppingModel
from cpsbs.models.base import eos_tokens
from tests.backends.fixing import fix_rows_on_cpu
from tests.models import tiny


class Gru(nn.Module):
    """A recurrent model whose first hidden state is the source; a good one."""

    def __init__(self) -> None:
        super().__init__()
        self.sources, self.vocab_size, self.pad = 2, 7, 0
        self.eos: Any = 0
        self.device: Any = torch.device("cpu")
        generator = torch.Generator().manual_seed(0)
        self.embedding, self.cell, self.head = nn.Embedding(7, 8), nn.GRUCell(8, 8), nn.Linear(8, 7)
        for weight in self.parameters():
            weight.data.normal_(generator=generator)
        self.first = torch.randn(2, 8, generator=generator)
        self.hidden = self.first

    def start(self) -> Any:
        self.hidden = self.first
        return self.head(self.hidden)

    def advance(self, parent: Tensor, token: Tensor) -> Any:
        self.hidden = self.cell(self.embedding(token), self.hidden[parent])
        return self.head(self.hidden)


def faults(model: Any, **settings: int) -> list[str]:
    """What the check says of a model, without the first line."""
    with pytest.raises(ValueError, match="breaks the contract of a model") as caught:
        check_model(model, **settings)
    return str(caught.value).splitlines()[1:]


def transformers_model(name: str) -> TransformersModel:
    model = tiny.make(name)
    return TransformersModel(model, **tiny.prompts(model))


GOOD: dict[str, Callable[[], SequenceModel]] = {
    "table": lambda: TableModel.random(5, 4, sources=2),
    "table that ends early": lambda: TableModel({(): [0.5, 0.5], (1,): [1.0, 0.0]}, eos=0),
    "function": lambda: FunctionModel(
        lambda x, source: torch.sin(torch.arange(6.0) * (x.sum(-1) + source)[:, None]),
        6,
        eos=(),
        sources=2,
    ),
    "GRU": Gru,
    "gpt2": lambda: transformers_model("gpt2"),
    "marian": lambda: transformers_model("marian"),
}


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", GOOD)
def test_good_models_are_accepted_and_so_are_functions_that_make_them(name: str, k: int) -> None:
    check_model(GOOD[name](), k)
    check_model(GOOD[name], k, seed=k)


def test_one_token_is_enough_to_check_the_start() -> None:
    check_model(TableModel({(): [0.5, 0.5]}, eos=0), max_length=1)
    with pytest.raises(ValueError, match="k is 0 and max_length is 4"):
        check_model(Gru(), k=0)


class IgnoresParent(Gru):
    """The usual fault: rows are taken to stay where they are."""

    def advance(self, parent: Tensor, token: Tensor) -> Any:
        rows = torch.arange(len(parent)) % len(self.hidden)
        return super().advance(rows, token)


class IgnoresParentOnce(IgnoresParent):
    """The same, for one search only."""

    started = False

    def start(self) -> Any:
        if self.started:
            raise ValueError("this model is for one search")
        self.started = True
        return super().start()


class SharesAcrossRows(Gru):
    """Its scores depend on how many rows there are."""

    def advance(self, parent: Tensor, token: Tensor) -> Any:
        scores = super().advance(parent, token)
        return scores * (1 + 0.1 * len(parent))


class GoesOn(Gru):
    """It forgets to begin anew."""

    def start(self) -> Any:
        return self.head(self.hidden[: self.sources])


class KeepsRows(Gru):
    """It does not even come back to one row for each source."""

    def start(self) -> Any:
        return self.head(self.hidden)


class StartsOnceUnclearly(Gru):
    """A second start fails, but not because it says so."""

    def start(self) -> Any:
        found = super().start()
        del self.first
        return found


class Random(Gru):
    """Dropout is on."""

    def advance(self, parent: Tensor, token: Tensor) -> Any:
        return nn.functional.dropout(super().advance(parent, token), 0.5)


class ChangesParent(Gru):
    """It writes into what it is given."""

    def advance(self, parent: Tensor, token: Tensor) -> Any:
        scores = super().advance(parent, token)
        parent.zero_().add_(9)
        return scores


class ChangesToken(Gru):
    """So does this one."""

    def advance(self, parent: Tensor, token: Tensor) -> Any:
        scores = super().advance(parent, token)
        token += 1
        return scores


class Swaps(Gru):
    """It takes its arguments in another order."""

    def advance(self, token: Tensor, parent: Tensor) -> Any:  # type: ignore[override]
        return super().advance(parent, token)


class TakesOneArgument(Gru):
    """It has not even a place for the parents."""

    def advance(self, token: Tensor) -> Any:  # type: ignore[override]
        return token


def returning(wrong: Callable[[Tensor], Any], call: str = "advance") -> Any:
    """A model that does something to the scores that it returns."""

    class Returns(Gru):
        def start(self) -> Any:
            found = super().start()
            return wrong(found) if call == "start" else found

        def advance(self, parent: Tensor, token: Tensor) -> Any:
            found = super().advance(parent, token)
            return wrong(found) if call == "advance" else found

    return Returns()


def with_(**attributes: Any) -> Any:
    """A model with other attributes."""
    model = Gru()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (IgnoresParent(), r"source \d depend on the row that it is in: row i of advance\(\)"),
        (IgnoresParentOnce(), "depend on the row that it is in"),
        (IgnoresParentOnce, "depend on the row that it is in"),
        (SharesAcrossRows(), "depend on the row that it is in"),
        (GoesOn(), r"start\(\) must begin anew, and scores must not be random"),
        (KeepsRows, r"model\.start\(\) returned the shape \[3, 7\]; it must be \[rows, V\]"),
        (StartsOnceUnclearly(), r"a second start\(\) raised AttributeError: .*first"),
        (Random(), r"scores must not be random \(if dropout is on, call eval\(\)\)"),
        (Random, "scores must not be random"),
        (ChangesParent(), r"model\.advance\(\) changed the tensor parent"),
        (ChangesToken(), r"model\.advance\(\) changed the tensor token"),
        (TakesOneArgument(), r"model\.advance\(\) raised TypeError: "),
        (Swaps(), r"model\.advance\(\) raised IndexError: "),
        (returning(lambda x: x[:, :-1], "start"), r"model\.start\(\) returned the shape \[2, 6\]"),
        (returning(lambda x: x[:-1]), r"model\.advance\(\) returned the shape \[5, 7\]"),
        (returning(lambda x: x.long()), r"scores of torch\.int64; they must be floating-point"),
        (returning(lambda x: x.to(torch.complex64)), "they must be floating-point"),
        (returning(lambda x: x.to("meta")), r"scores on meta; model\.device is cpu"),
        (returning(lambda x: x.tolist()), "returned a list; it must return a tensor"),
        (returning(lambda x: x / 0), r"the prefix \[\d\] of source 0 scores that are NaN or inf"),
        (returning(lambda x: x + torch.nan, "start"), r"start\(\) gave the prefix \[\] .* NaN"),
        (returning(lambda x: x - torch.inf), "the score -inf for every token"),
        (with_(eos=7), r"model\.eos has the token 7; .* 0 to V - 1 = 6"),
        (with_(eos=(0, -1)), r"model\.eos has the token -1"),
        (with_(eos=None), r"model\.eos is None; it must be the token that ends a sequence"),
        (with_(eos="</s>"), r"model\.eos is '</s>'; it must be"),
        (with_(eos=(0, None)), r"model\.eos is \(0, None\); it must be"),
        (with_(pad=-100), r"model\.pad has the token -100"),
        (with_(pad=None), r"model\.pad is None; it must be the token that fills up"),
        (with_(device="cpu"), r"model\.device is 'cpu'; it must be the torch\.device"),
        (with_(sources=0), r"model\.sources is 0; it must be the number of sources"),
        (with_(sources=True), r"model\.sources is True"),
        (with_(vocab_size=7.0), r"model\.vocab_size is 7\.0; it must be the size V"),
        (with_(start=None), r"model\.start is None; it must be a method"),
        (with_(stops=lambda parent, token: token[1:] > 0), r"model\.stops\(\) returned \[5\]"),
        (with_(stops=lambda parent, token: token), r"model\.stops\(\) returned \[6\] of .*int64"),
        (with_(stops=lambda parent, token: [True]), r"model\.stops\(\) returned a list"),
        (with_(stops=lambda parent: None), r"model\.stops\(\) raised TypeError"),
        (
            with_(fix_rows=lambda k, steps, backend: True),
            r"step\(\), memo\(\), keep_sources\(\), .* missing",
        ),
    ],
)
def test_each_fault_is_named_and_nothing_else(model: Any, message: str) -> None:
    found = faults(model)
    assert len(found) == (2 if model is KeepsRows else 1)
    assert re.search(message, found[0])


class SortsParents(Gru):
    """It takes the rows in the order in which they were."""

    def advance(self, parent: Tensor, token: Tensor) -> Any:
        return super().advance(parent.sort().values, token)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", [IgnoresParent, SortsParents])
def test_a_fault_is_found_whatever_the_seed(kind: type[Gru], seed: int) -> None:
    model = kind()
    model.sources, model.first = 1, model.first[:1]
    assert "depend on the row that it is in" in faults(model, k=2, seed=seed)[0]


def test_everything_that_is_missing_is_told_at_once() -> None:
    found = faults(object())
    assert [line.split()[1] for line in found] == [
        f"model.{name}"
        for name in ("sources", "vocab_size", "eos", "pad", "device", "start", "advance")
    ]
    assert all("is missing; it must be" in line for line in found)


def test_several_faults_are_told_together() -> None:
    class Several(IgnoresParent):
        def start(self) -> Any:
            return super().start().long()

        def advance(self, parent: Tensor, token: Tensor) -> Any:
            scores = super().advance(parent, token)
            token += 1
            return scores

    model = Several()
    model.eos, model.pad = (3, 9), -1
    found = "\n".join(faults(model))
    for part in ("torch.int64", "the token 9", "the token -1", "the tensor token", "the row that"):
        assert part in found


def test_a_model_of_transformers_itself_is_told_what_it_lacks() -> None:
    found = "\n".join(faults(tiny.make("gpt2")))
    assert "model.sources is missing" in found
    assert "model.start is missing" in found


def test_an_exception_of_the_model_is_the_cause_of_the_error() -> None:
    with pytest.raises(ValueError, match="raised TypeError") as caught:
        check_model(TakesOneArgument())
    assert isinstance(caught.value.__cause__, TypeError)
    model = TakesOneArgument()
    model.eos = 99
    assert len(faults(model)) == 2
    with pytest.raises(ValueError, match="calling it without arguments raised ZeroDivisionError"):
        check_model(lambda: 1 // 0)  # type: ignore[arg-type, return-value]


def test_the_check_leaves_no_trace() -> None:
    model, before = Gru(), torch.get_rng_state()
    check_model(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()


class Stops(Gru):
    """It ends sequences at token 3; to go on from there is a mistake."""

    def stops(self, parent: Tensor, token: Tensor) -> Tensor:
        return token == 3

    def advance(self, parent: Tensor, token: Tensor) -> Any:
        assert not bool((token == 3).any())
        return super().advance(parent, token)


def test_rows_that_a_model_stops_do_not_go_on() -> None:
    for seed in range(10):
        check_model(Stops(), seed=seed)


class FixedRows(Gru):
    """A model with K rows for each source; ``wrong`` names a fault of it."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.wrong, self.held = wrong, 0

    def fix_rows(self, k: int, steps: int, backend: Backend) -> bool:
        self.hidden = self.hidden.repeat_interleave(k, 0)
        self.held = k
        return True

    def step(self, parent: Tensor, token: Tensor) -> Tensor:
        first = torch.arange(0, parent.numel(), self.held)[:, None]
        if self.wrong == "parent":
            first, parent = first + torch.arange(self.held), torch.zeros_like(parent)
        found: Tensor = self.advance((first + parent).flatten(), token.flatten())
        return found[:1] if self.wrong == "shape" else found

    def memo(self) -> dict[Any, Any]:
        return {}

    def keep_sources(self, sources: Tensor) -> None:
        if self.wrong != "sources":
            kept = self.hidden.view(-1, self.held, 8)[sources]
            self.hidden = kept.flatten(0, 1)

    def admits(self, other: Any) -> bool:
        return isinstance(other, FixedRows)

    def join(self, places: list[int], other: Any) -> None:
        rows = other.hidden.repeat_interleave(self.held, 0)
        self.hidden = rows.flip(0) if self.wrong == "join" else rows

    def retire(self, places: list[int]) -> None:
        pass

    def release(self) -> None:
        self.held = 0


@pytest.mark.parametrize("k", [1, 3])
def test_a_model_with_fixed_rows_is_checked_in_both_ways(k: int) -> None:
    model = FixedRows()
    check_model(model, k)
    assert model.held == 0
    assert isinstance(model, FixedRowModel)


@pytest.mark.parametrize("name", ["llama", "gpt2", "marian"])
def test_models_of_transformers_keep_the_contract_of_fixed_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = 0
    step = TransformersModel.step

    def counted(self: Any, parent: Tensor, token: Tensor) -> Tensor:
        nonlocal fixed
        fixed += 1
        return step(self, parent, token)

    fix_rows_on_cpu(monkeypatch)
    monkeypatch.setattr(TransformersModel, "step", counted)
    model = tiny.make(name)
    check_model(lambda: TransformersModel(model, **tiny.prompts(model)))
    assert fixed == 6  # three steps, and three of sources that have joined


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("parent", r"model\.step\(\) and model\.advance\(\) score the prefix"),
        ("sources", r"model\.step\(\) and model\.advance\(\) score the prefix"),
        ("shape", r"model\.step\(\) returned the shape"),
    ],
)
def test_faults_of_fixed_rows_are_named(wrong: str, message: str) -> None:
    model = FixedRows(wrong)
    with pytest.raises(ValueError, match=message):
        check_model(model)
    assert model.held == 0


def test_sources_that_join_must_be_scored_alike() -> None:
    check_model(FixedRows)
    with pytest.raises(ValueError, match=r"after model\.join\(\), .* score the prefix"):
        check_model(lambda: FixedRows("join"))


def test_who_keeps_which_protocol() -> None:
    model = transformers_model("gpt2")
    assert isinstance(model, FixedRowModel)
    assert isinstance(model, StoppingModel)
    for other in (Gru(), TableModel.random(3, 2), FunctionModel(lambda x: x, 3, 0)):
        assert not isinstance(other, FixedRowModel | StoppingModel)
    assert isinstance(Stops(), StoppingModel)


@pytest.mark.parametrize(("eos", "tokens"), [(3, (3,)), ([1, 2], (1, 2)), ((), ())])
def test_one_token_many_or_none_may_end_a_sequence(eos: Any, tokens: tuple[int, ...]) -> None:
    assert eos_tokens(with_(eos=eos)) == tokens
    check_model(with_(eos=eos))


def test_a_sequence_that_no_token_ends_goes_on_to_the_last_length() -> None:
    model = FunctionModel(lambda x: torch.zeros(len(x), 4), 4, eos=())
    beams = search(model, 3, max_length=5, generator=0)
    assert beams.lengths.tolist() == [[5, 5, 5]]
    assert not beams.finished.any()


def test_it_is_public() -> None:
    assert cpsbs.check_model is check_model
    assert "check_model" in cpsbs.__all__
