"""What is left of a model without the sequences that are held, against enumeration."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpsbs import FunctionModel, TableModel
from cpsbs.models import StoppingModel
from cpsbs.models.residual import ResidualModel
from cpsbs.models.trie import Trie, add_exp
from cpsbs.search.recursion import processed
from tests.exact import Prefix

PLAIN = partial(processed, temperature=1.0, nucleus=None)


def as_tensors(held: list[list[Prefix]]) -> tuple[Tensor, Tensor, Tensor]:
    """Source, tokens and length of the held sequences of each source."""
    pairs = [(b, y) for b, of_source in enumerate(held) for y in of_source]
    longest = max((len(y) for _, y in pairs), default=1)
    tokens = [[*y, *[0] * (longest - len(y))] for _, y in pairs]
    return (
        torch.tensor([b for b, _ in pairs], dtype=torch.int64),
        torch.tensor(tokens, dtype=torch.int64).view(-1, longest),
        torch.tensor([len(y) for _, y in pairs], dtype=torch.int64),
    )


def without(model: TableModel, held: list[list[Prefix]], process: object = PLAIN) -> ResidualModel:
    """The model without the held sequences, which are followed one by one."""
    trie = Trie(model.sources, model.device)
    residual = ResidualModel(model, trie, process)  # type: ignore[arg-type]
    residual.start()
    given_ = as_tensors(held)
    residual.follow(*given_)
    residual.hold(*given_)
    resting = trie.log_left[: model.sources].isneginf()
    return ResidualModel(model, trie, process, resting)  # type: ignore[arg-type]


def enumerated(residual: ResidualModel, length: int, eos: int = 0) -> list[dict[Prefix, float]]:
    """All sequences of every source with their log-probabilities, prefix by prefix."""
    found: list[dict[Prefix, float]] = [{} for _ in range(residual.sources)]
    rows: list[tuple[int, Prefix, float]] = [(b, (), 0.0) for b in range(residual.sources)]
    scores = residual.start()
    for t in range(1, length + 1):
        log_p = scores.double().log_softmax(-1).tolist()
        parents, tokens, following = [], [], []
        for i, (b, prefix, total) in enumerate(rows):
            for token, own in enumerate(log_p[i]):
                if own == -math.inf:
                    continue
                y = (*prefix, token)
                if token == eos or t == length:
                    found[b][y] = total + own
                else:
                    parents.append(i)
                    tokens.append(token)
                    following.append((b, y, total + own))
        rows = following
        if not rows:
            break
        scores = residual.advance(torch.tensor(parents), torch.tensor(tokens))
    return found


def left_of(p: dict[Prefix, float], held: list[Prefix]) -> dict[Prefix, float]:
    rest = {y: q for y, q in p.items() if y not in held}
    total = math.fsum(rest.values())
    return {y: q / total for y, q in rest.items()}


def assert_same(found: dict[Prefix, float], expected: dict[Prefix, float], rel: float) -> None:
    assert found.keys() == expected.keys()
    for y, log_q in found.items():
        assert math.exp(log_q) == pytest.approx(expected[y], rel=rel), y


@pytest.mark.parametrize("count", [0, 1, 5, 20, 38, 39])
def test_the_residual_distribution_is_p_without_what_is_held(count: int) -> None:
    """Sources that hold different sequences, and one that holds none."""
    model = TableModel.random(vocab_size=4, length=3, sources=3, seed=2)
    choices = random.Random(count)
    all_ = [model.sequences(3, b) for b in range(3)]
    held = [choices.sample(sorted(all_[b]), count if b != 1 else 0) for b in range(3)]
    found = enumerated(without(model, held), 3)
    for b in range(3):
        assert_same(found[b], left_of(all_[b], held[b]), 1e-12)


def test_what_is_left_keeps_its_digits_near_full_capture() -> None:
    """Masses down to 1e-12 and far below what 1 − p(S) could tell."""
    for tiny in (1e-6, 1e-12, 1e-40, 1e-200):
        table = {
            (): [1 - 2e-9, 1e-9, 1e-9],
            (1,): [0.5, 0.5 - tiny, tiny],
            (2,): [1 - tiny, tiny / 2, tiny / 2],
        }
        model = TableModel(table, 0)
        all_ = model.sequences(2)
        held = [y for y in all_ if all_[y] > 2 * tiny * 1e-9]
        residual = without(model, [held])
        left = left_of(all_, held)
        assert len(left) == 3
        assert_same(enumerated(residual, 2)[0], left, 1e-12)
        expected = math.fsum(all_[y] for y in left)
        assert float(residual._trie.log_left[0].exp()) == pytest.approx(expected, rel=1e-12)


def test_nothing_is_left_where_everything_possible_is_held() -> None:
    """Below a prefix, and of a whole source; impossible tokens do not count."""
    table = {(): [0.3, 0.7, 0.0], (1,): [0.4, 0.0, 0.6], (1, 2): [0.1, 0.0, 0.9]}
    table |= {prefix: [1.0, 0.0, 0.0] for prefix in [(2,), (1, 1), (2, 1), (2, 2)]}
    model = TableModel([table, table], 0)
    all_ = list(model.sequences(3))
    held = [[y for y in all_ if y[:2] == (1, 2)], all_]
    residual = without(model, held)
    left = residual._trie.log_left[:2]
    assert left.exp().tolist() == [pytest.approx(0.3 + 0.7 * 0.4), 0.0]
    scores = residual.start()
    after = residual.advance(torch.tensor([0]), torch.tensor([1]))
    assert after[0, 2] == -math.inf  # no way into the subtree in which nothing is left
    assert scores[1].tolist() == [0.0, -math.inf, -math.inf]  # rests, and ends at once:
    residual.start()
    stops = residual.stops(torch.tensor([0, 1]), torch.tensor([1, 0]))
    assert stops is not None
    assert stops.tolist() == [False, True]


@pytest.mark.parametrize(("temperature", "nucleus"), [(0.3, None), (2.0, 0.8), (1.0, 0.6)])
def test_temperature_and_nucleus_come_before_what_is_held(
    temperature: float, nucleus: float | None
) -> None:
    model = TableModel.random(vocab_size=4, length=3, seed=5)
    process = partial(processed, temperature=temperature, nucleus=nucleus)
    logs = enumerated(without(model, [[]], process), 3)[0]
    p = {y: math.exp(q) for y, q in logs.items()}
    held = sorted(p, key=lambda y: -p[y])[: len(p) // 2]
    assert_same(enumerated(without(model, [held], process), 3)[0], left_of(p, held), 1e-12)


def test_held_sequences_can_be_added_in_parts() -> None:
    """What a walk has evaluated is enough; the model is not asked again."""
    model = TableModel.random(vocab_size=3, length=4, seed=1)
    all_ = model.sequences(4)
    order = random.Random(0).sample(sorted(all_), len(all_))
    trie = Trie(1, model.device)
    for begin in range(0, len(order), 7):
        residual = ResidualModel(model, trie, PLAIN)
        residual.start()
        part = as_tensors([order[begin : begin + 7]])
        residual.follow(*part)
        residual.hold(*part)
        left = math.fsum(all_[y] for y in order[begin + 7 :])
        assert float(trie.log_left[0].exp()) == pytest.approx(left, rel=1e-12)
    assert trie.log_left[0] == -math.inf


def test_what_was_noted_and_dropped_is_not_lost() -> None:
    """A search selects more prefixes than it returns sequences of."""
    model = TableModel.random(vocab_size=4, length=2, seed=3)
    trie = Trie(1, model.device)
    residual = ResidualModel(model, trie, PLAIN, entropy=True)
    residual.start()
    residual.stops(torch.tensor([0, 0, 0]), torch.tensor([1, 2, 3]))
    residual.advance(torch.tensor([0, 0, 0]), torch.tensor([3, 1, 2]))
    residual.stops(torch.tensor([0, 1]), torch.tensor([2, 3]))
    path = residual.hold(*as_tensors([[(1, 3)]]))
    p = model.sequences(2)
    assert float(trie.log_left[0].exp()) == pytest.approx(1 - p[1, 3], rel=1e-12)
    assert float(trie.log_p[path].sum().exp()) == pytest.approx(p[1, 3], rel=1e-12)
    entropy = -sum(q * math.log(q) for q in model.tables[0][1,])
    assert float(trie.entropy[path[0, 0]]) == pytest.approx(entropy)


def test_a_sequence_must_not_be_the_beginning_of_another() -> None:
    model = TableModel.random(vocab_size=3, length=3, seed=0)
    with pytest.raises(ValueError, match=r"\[1\] of source 0 is the beginning of .* \[1, 2, 0\]"):
        without(model, [[(1,), (1, 2, 0)]])


def test_a_model_of_ones_own_may_stop_sequences() -> None:
    class Stopping(FunctionModel):
        """Ends a sequence after the token 2."""

        def stops(self, parent: Tensor, token: Tensor) -> Tensor:
            return token == 2

    model = Stopping(lambda y: torch.zeros(len(y), 4), vocab_size=4, eos=())
    residual = ResidualModel(model, Trie(1, model.device), PLAIN)
    assert isinstance(residual, StoppingModel)
    residual.start()
    stops = residual.stops(torch.tensor([0, 0]), torch.tensor([1, 2]))
    assert stops is not None
    assert stops.tolist() == [False, True]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_adversarial_tables(data: st.DataObject) -> None:
    """Zeros, ties and probabilities of all magnitudes; any part is held."""
    weight = st.one_of(
        st.just(0.0), st.just(1.0), st.floats(-700, 0).map(math.exp), st.floats(0.1, 1.0)
    )
    table: dict[Prefix, list[float]] = {}
    for prefix in [(), (1,), (2,), (1, 1), (1, 2), (2, 1), (2, 2)]:
        weights = data.draw(st.lists(weight, min_size=3, max_size=3))
        total = math.fsum(weights)
        table[prefix] = [w / total for w in weights] if total > 0 else [1.0, 0.0, 0.0]
    model = TableModel(table, 0)
    trie = Trie(1, model.device)
    start = ResidualModel(model, trie, PLAIN)
    p = enumerated(start, 3)[0]
    held = [y for y in p if data.draw(st.booleans())]
    residual = without(model, [held])
    log_left = float(residual._trie.log_left[0])
    rest = [q for y, q in p.items() if y not in held]
    if not rest:
        assert log_left == -math.inf
        return
    most = max(rest)
    expected = most + math.log(math.fsum(math.exp(q - most) for q in rest))
    assert log_left == pytest.approx(expected, rel=1e-12, abs=1e-12)
    found = enumerated(residual, 3)[0]
    assert found.keys() == {y for y in p if y not in held}
    for y, log_q in found.items():
        assert log_q == pytest.approx(p[y] - expected, rel=1e-11, abs=1e-11)


def test_sums_of_logarithms_by_place() -> None:
    total = torch.tensor([-math.inf, 0.0, -math.inf], dtype=torch.float64)
    terms = torch.tensor([-800.0, -800.0, 1.0], dtype=torch.float64)
    found = add_exp(total, torch.tensor([0, 0, 1]), terms)
    assert found.tolist() == [-800 + math.log(2), pytest.approx(math.log(1 + math.e)), -math.inf]
