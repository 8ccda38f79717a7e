"""Attention of one query is what torch computes, and other attention stays what it was."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from cpsbs.backends.triton import attention
from cpsbs.backends.triton.attention import one_query_attention
from tests.backends.interpreted import Interpreter, let_the_interpreter_multiply_bfloat16

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
PLAIN = SimpleNamespace()
ROWS = 3
HEADS, CAPACITY = 2, 150
POSITIONS = [[0, 37], [16, 15], [32, 70], [149, 5]]
"""Of two sources."""


class Case:
    """Random keys and values of 2 kv heads for K rows of two sources; nothing is contiguous that
    need not be, and what must not be read is NaN.
    """

    def __init__(
        self,
        k: int,
        group: int,
        dim: int,
        positions: list[int],
        dtype: torch.dtype,
        device: str,
        capacity: int = CAPACITY,
    ) -> None:
        self.random = torch.Generator(device).manual_seed(k + group + dim)
        self.dtype, self.device, self.k, self.group = dtype, device, k, group
        self.rows, self.window = 2 * k, max(positions) + 1
        self.position = torch.tensor(positions, device=device)
        self.place = torch.randint(k, (2, k, capacity), generator=self.random, device=device)
        self.place = self.place.to(torch.int32)
        self.cache = self.normal(2, self.rows, HEADS, capacity, dim)
        for source, position in enumerate(positions):
            self.cache[:, source * k : (source + 1) * k, :, position:] = torch.nan
        self.new = self.normal(2, self.rows, 1, HEADS, dim).transpose(2, 3)
        self.query = 2 * self.normal(self.rows, 1, HEADS * group, dim).transpose(1, 2)

    def normal(self, *size: int) -> Tensor:
        values = torch.randn(size, generator=self.random, device=self.device)
        return values.to(self.dtype)

    def masks(self, window: int) -> list[tuple[Any, Any]]:
        """Pairs of a mask and a bias, broadcast in all ways; each row sees something."""
        size = (self.rows, 1, 1, window + 5)
        hidden = torch.rand(size, generator=self.random, device=self.device) < 0.4
        hidden[..., 0] = False
        by_row = torch.zeros(size, dtype=self.dtype, device=self.device)
        by_row = by_row.masked_fill_(hidden, torch.finfo(self.dtype).min)[..., :window]
        by_head = self.normal(window, HEADS * self.group).T[None, :, None]
        full = self.normal(self.rows, HEADS * self.group, 1, window)
        return [
            *((None, None), (by_row, None), (by_row[:1], None), (by_head, None), (full, None)),
            *((by_row, by_head), (None, by_head), (by_row, full)),
        ]

    def past(self, row: int, upto: int) -> Tensor:
        """[2, heads, upto + 1, dim] keys and values of a row, as the table has them."""
        first = row // self.k * self.k
        holders = first + self.place[row // self.k, row % self.k, :upto].long()
        past = self.cache[:, holders, :, torch.arange(upto, device=self.device)]
        return torch.cat([past.transpose(0, 1).transpose(1, 2), self.new[:, row]], 2)


def exact(query: Tensor, key: Tensor, value: Tensor, added: Tensor, scaling: Any) -> Tensor:
    """[rows, 1, heads, dim] in float64, which no GPU shortens."""
    heads = query.shape[1]
    key, value = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    added = added.expand(len(query), heads, 1, key.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(
        query.double(), key, value, added, scale=scaling
    ).transpose(1, 2)


def check_close(found: Tensor, expected: Tensor, query: Tensor) -> None:
    rows, heads, _, dim = query.shape
    assert found.shape == (rows, 1, heads, dim)
    assert found.dtype == query.dtype
    assert found.is_contiguous()
    tolerance = 2e-5 if query.dtype == torch.float32 else 4 * torch.finfo(query.dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def total(mask: Any, bias: Any, like: Tensor) -> Tensor:
    """All that is added, broadcast as little as possible."""
    added = torch.zeros((1, 1, 1, 1), dtype=torch.float64, device=like.device)
    for x in (mask, bias):
        added = added if x is None else added + x.double()
    return added


def check_by_table(case: Case, mask: Any, bias: Any, scaling: Any, together: bool = True) -> None:
    from cpsbs.backends.triton.kernels.attention import attend_by_table

    added = total(mask, bias, case.query)
    expected, cache = [], case.cache.clone()
    for row in range(case.rows):
        upto = int(case.position[row // case.k])
        key, value = case.past(row, upto)
        of_row = added[row : row + 1] if len(added) > 1 else added
        of_row = of_row[..., : upto + 1]
        expected += [exact(case.query[row : row + 1], key[None], value[None], of_row, scaling)]
        cache[:, row, :, upto] = case.new[:, row, :, 0]
    own, new = case.cache.clone(), case.new
    found = attend_by_table(
        *(case.query, (new[0], new[1]), (own[0], own[1]), case.place, case.position),
        *(mask, bias, scaling, case.window, together),
    )
    check_close(found, torch.cat(expected), case.query)
    torch.testing.assert_close(own, cache, rtol=0, atol=0, equal_nan=True)


def check_shared(case: Case, length: int, mask: Any, bias: Any, scaling: Any) -> None:
    from cpsbs.backends.triton.kernels.attention import attend_shared

    states = case.normal(2, 2, HEADS, length, case.query.shape[-1])
    found = attend_shared(case.query, states[0], states[1], mask, bias, scaling)
    key, value = states.repeat_interleave(case.k, 1)
    check_close(
        found,
        exact(case.query, key, value, total(mask, bias, case.query), scaling),
        case.query,
    )


def check_numerics(shapes: Any, device: str = "cpu", masks: int = 8) -> None:
    """Of the masks so many for each shape, by turns."""
    for n, (k, group, dim, dtype) in enumerate(shapes):
        case = Case(k, group, dim, POSITIONS[n % len(POSITIONS)], dtype, device)
        for m in range(n, n + masks):
            mask, bias = case.masks(case.window)[m % 8]
            check_by_table(case, mask, bias, (None, 1.0, 0.3)[m % 3])
        for length in (1, 21, 70):
            mask, bias = case.masks(length)[n % 8]
            check_shared(case, length, mask, bias, (None, 1.0, 0.3)[n % 3])


# ---------------------------------------------------------------------- in Triton's interpreter


def check_small() -> None:
    let_the_interpreter_multiply_bfloat16()
    shapes = itertools.product((1, 3), (1, 4), (8, 16, 64, 80), (torch.float32,))
    check_numerics(shapes, masks=1)
    check_numerics([(3, 1, 16, torch.float32), (3, 4, 16, torch.float32)])
    half = [(3, 1, 64, torch.float16), (3, 4, 64, torch.bfloat16), (1, 1, 48, torch.bfloat16)]
    check_numerics(half, masks=2)


def check_many_rows() -> None:
    for group, dim in ((1, 64), (4, 8), (4, 64), (7, 32)):
        case = Case(20, group, dim, [17, 40], torch.float32, "cpu")
        mask, bias = case.masks(case.window)[5]
        check_by_table(case, mask, bias, None)
        check_shared(case, 33, *case.masks(33)[5], None)


def check_common_past() -> None:
    """Rows with all, some or nothing of their past in common, over several rounds of reading."""
    let_the_interpreter_multiply_bfloat16()
    shapes = [(1, 1, 32), (3, 1, 64), (6, 7, 32), (5, 8, 64), (9, 5, 32), (2, 33, 32), (13, 4, 128)]
    pasts = [([300, 520], [270, 255]), ([600, 256], [600, 256]), ([257, 1], [128, 0])]
    types = (torch.float32, torch.float16, torch.bfloat16)
    for n, ((k, group, dim), dtype) in enumerate(zip(shapes, itertools.cycle(types), strict=False)):
        positions, common = pasts[n % len(pasts)]
        case = Case(k, group, dim, positions, dtype, "cpu", capacity=620)
        for place, upto in zip(case.place, common, strict=True):
            place[:, :upto] = place[:1, :upto].clone()
        if k > 2:
            case.place[:, 1] = case.place[:, 0]  # these two are one hypothesis so far
        mask, bias = case.masks(case.window)[n % 8]
        check_by_table(case, mask, bias, None)
        check_by_table(case, mask, bias, None, together=False)


def check_that_nothing_seen_is_finite() -> None:
    from cpsbs.backends.triton.kernels.attention import attend_by_table, attend_shared

    let_the_interpreter_multiply_bfloat16()
    for group, dtype in itertools.product((1, 4), (torch.float32, torch.bfloat16)):
        case = Case(3, group, 16, [5, 20], dtype, "cpu")
        new, own = case.new, case.cache
        for lowest in (torch.finfo(dtype).min, -torch.inf):
            mask = torch.full((case.rows, 1, 1, 40), lowest, dtype=dtype)
            for bias in (None, mask):
                table = (case.query, (new[0], new[1]), (own[0], own[1]), case.place, case.position)
                assert bool(attend_by_table(*table, mask, bias, None, 40).isfinite().all())
                states = case.normal(2, 2, HEADS, 40, 16)
                found = attend_shared(case.query, states[0], states[1], mask, bias)
                assert bool(found.isfinite().all())


def check_values_that_are_not_finite() -> None:
    """They spread to the hypotheses that refer to them, and to no others of the source."""
    from cpsbs.backends.triton.kernels.attention import attend_by_table, suits_tree

    case = Case(3, 1, 32, [5, 20], torch.float32, "cpu")
    case.place[:] = torch.arange(3, dtype=torch.int32)[:, None]  # every row has its own past
    cache, position = torch.zeros_like(case.cache), case.position.clone()
    assert suits_tree(1, 32, torch.float32)
    for new, broken in ((case.new, True), (case.normal(2, 6, HEADS, 1, 32), False)):
        new = new.clone()
        if broken:
            new[1, 1] = torch.inf
        table = (case.query, (new[0], new[1]), (cache[0], cache[1]), case.place, position)
        found = attend_by_table(*table, None, None, None, 40)
        finite = found.isfinite().all(-1).all(-1).flatten().tolist()
        assert finite == [True, not broken, True, True, True, True]
        position += 1


def check_little_shared_memory() -> None:
    """Where several rows need more memory than a program has, each row by itself gives the same."""
    from triton.runtime.errors import OutOfResources

    from cpsbs.backends.triton.kernels import tree_attention

    tried = list[int]()

    class Small:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            def launch(*args: Any, **kwargs: Any) -> None:
                tried.append(kwargs["BLOCK"])
                raise OutOfResources(300_000, 100_000, "shared memory")

            return launch

    for dim, block in ((32, 64), (64, 32)):  # in float32
        case = Case(3, 1, dim, [37, 12], torch.float32, "cpu")
        with patch.object(tree_attention, "attend", Small()):
            check_by_table(case, *case.masks(case.window)[1], None)
        assert tried.pop() == block
        assert not tried


def test_rows_are_divided_evenly_among_programs() -> None:
    pytest.importorskip("triton")
    from cpsbs.backends.triton.kernels import tree_attention as tree

    for k, group, width in itertools.product((1, 2, 5, 10, 20, 33), (1, 4, 7, 32), (64, 256)):
        most = tree.members(k, group, width)
        programs = -(-k // most)
        assert 1 <= most <= k
        assert most == 1 or most * group <= tree.QUERIES
        assert programs * most - k < most
        assert most == -(-k // programs)  # fewer for each would be more programs


@pytest.mark.parametrize(
    "check",
    [
        *(check_small, check_many_rows, check_common_past, check_that_nothing_seen_is_finite),
        *(check_values_that_are_not_finite, check_little_shared_memory),
    ],
)
def test_in_the_interpreter(check: Callable[[], None], interpreter: Interpreter) -> None:
    interpreter.run(check)


# ---------------------------------------------------------------------- when it is the kernel


def tensors(group: int, dim: int, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and values for 2 kv heads."""
    random = torch.Generator().manual_seed(group + dim + window)
    query = torch.randn((ROWS, 1, 2 * group, dim), generator=random).transpose(1, 2)
    key, value = torch.randn((2, ROWS, 2, window, dim), generator=random)
    return query, key, value


class Asked(list[Any]):
    """What is held, and what it was asked for."""

    fails = False

    def is_shown_as(self, key: Tensor, value: Tensor) -> bool:
        return key.shape[2] == 9

    def attend(self, query: Tensor, *rest: Any) -> Tensor:
        if self.fails:
            raise RuntimeError("no compiler")
        self.append((query, *rest))
        return query.transpose(1, 2)


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> Asked:
    monkeypatch.setattr(attention._state, "broken", False)
    return Asked()


def call(change: dict[str, Any], group: int = 2, **more: Any) -> Any:
    query, key, value = tensors(group, 16, 9)
    inputs = {"query": query, "key": key, "value": value, "dropout": 0.0, "scaling": 0.25}
    inputs["attention_mask"] = torch.zeros(ROWS, 1, 1, 9)
    inputs["module"] = SimpleNamespace(num_key_value_groups=group)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](**{**inputs, **change, **more})


def test_what_the_kernel_does(by_kernel: Asked) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"attention_mask": None, "scaling": None, "is_causal": True},
        {"position_bias": torch.zeros(1, 4, 1, 9)},
        {"output_attentions": False, "softcap": None, "sliding_window": 5, "position_ids": ROWS},
    ]
    for n, change in enumerate(changes):
        with one_query_attention([by_kernel]):
            call(change)
        assert len(by_kernel) == n + 1
    with one_query_attention([by_kernel]):
        call({"module": PLAIN}, group=1)
    assert len(by_kernel) == len(changes) + 1


WIDE = torch.zeros(ROWS, 4, 2, 16)
OTHERWISE: dict[str, dict[str, Any]] = {
    "queries": {"query": WIDE},
    "dropout": {"dropout": 0.5},
    "float64": {
        "query": WIDE[:, :, :1].double(),
        "attention_mask": None,
        **dict.fromkeys(("key", "value"), torch.ones(ROWS, 2, 9, 16).double()),
    },
    "boolean mask": {"attention_mask": torch.ones(ROWS, 1, 1, 9, dtype=torch.bool)},
    "flat mask": {"attention_mask": torch.zeros(1, 1, 9)},
    "value dim": {"value": torch.ones(ROWS, 2, 9, 8)},
    "s_aux": {"s_aux": torch.zeros(4)},
    "head_mask": {"head_mask": torch.ones(4)},
    "gradient": {"query": WIDE[:, :, :1].clone().requires_grad_()},
}


@pytest.mark.parametrize("why", OTHERWISE)
def test_what_it_does_not(why: str, by_kernel: Asked) -> None:
    torch.manual_seed(0)
    expected, _ = call(OTHERWISE[why])
    torch.manual_seed(0)
    with one_query_attention([by_kernel]):
        found, _ = call(OTHERWISE[why])
    assert torch.equal(found, expected)
    assert not by_kernel


def test_softcap_is_left_to_transformers(by_kernel: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some releases ignore it, others refuse it: it must reach them, and never the kernel."""
    given: list[Any] = []

    def theirs(**kwargs: Any) -> tuple[Tensor, None]:
        given.append(kwargs["softcap"])
        return kwargs["query"], None

    with one_query_attention([by_kernel]), monkeypatch.context() as patch:
        patch.setattr(attention, "sdpa_attention_forward", theirs)
        call({"softcap": 30.0})
    assert given == [30.0]
    assert not by_kernel


def test_other_keys_than_those_held(by_kernel: Asked) -> None:
    query, key, value = tensors(2, 16, 8)
    change = {"query": query, "key": key, "value": value, "attention_mask": None}
    expected, _ = call(change)
    with one_query_attention([by_kernel]):
        assert torch.equal(call(change)[0], expected)
    assert not by_kernel


def test_only_in_this_thread_and_only_inside(by_kernel: Asked) -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with one_query_attention([by_kernel]):
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(20)
    call({})
    assert not by_kernel
    with one_query_attention([by_kernel]), one_query_attention([by_kernel]):
        pass
    call({})
    assert not by_kernel
    with one_query_attention([by_kernel]):
        leave.set()
        thread.join(20)
        call({})
    assert len(by_kernel) == 1
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    with pytest.raises(KeyError), one_query_attention([by_kernel]):
        raise KeyError
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_attention_of_somebody_else_stays(by_kernel: Asked) -> None:
    def mine(*args: Any, **kwargs: Any) -> str:
        return "mine"

    AttentionInterface.register("sdpa", mine)
    try:
        with one_query_attention([by_kernel]):
            assert call({}) == "mine"
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is mine
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)
    assert not by_kernel


def test_a_kernel_that_fails(by_kernel: Asked, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cpsbs")
    by_kernel.fails = True
    expected, _ = call({})
    assert attention.works()
    for _ in range(2):
        with one_query_attention([by_kernel]):
            assert torch.equal(call({})[0], expected)
    assert not attention.works()
    notes = [r.getMessage() for r in caplog.records if r.name == "cpsbs"]
    assert notes == ["attention is computed without Triton: RuntimeError: no compiler"]


# ---------------------------------------------------------------------- only on a GPU


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    """Every pair of rows, groups and dimensions would be better, but each takes a compiler long."""
    shapes = [(1, 1, 8), (3, 4, 48), (20, 1, 64), (3, 8, 80), (20, 4, 128), (20, 8, 64), (1, 4, 64)]
    shapes += [(5, 4, 128), (10, 1, 128), (3, 1, 256)]  # up to four rows in a program
    check_numerics([(*shape, dtype) for shape in shapes], "cuda", masks=3)


@gpu
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_a_graph(dtype: torch.dtype, group: int) -> None:
    """One graph serves all positions, and rows that go from place to place."""
    from cpsbs.backends.triton.kernels.attention import attend_by_table

    case = Case(20, group, 64, [0, 0], dtype, "cuda")
    own, new = case.cache.zero_(), case.new
    table = (case.query, (new[0], new[1]), (own[0], own[1]), case.place, case.position)
    attend_by_table(*table)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend_by_table(*table)
    for positions in ([1, 0], [33, 140], [149, 64]):
        for x in (case.query, own, new):
            x.normal_()
        case.place.random_(20)
        case.position.copy_(torch.tensor(positions))
        case.window = CAPACITY
        check_by_table(case, None, None, None)
        expected = attend_by_table(*table)
        graph.replay()
        assert torch.equal(found, expected)
