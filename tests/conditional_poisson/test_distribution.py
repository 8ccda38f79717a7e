"""The design, compared with enumeration, with mpmath and with its definitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpsbs import ConditionalPoisson
from tests.oracles import Enumeration, Recurrence, relative_error

INF = math.inf


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def worst_errors(log_weights: list[float], k: int) -> dict[str, float]:
    """Return the largest relative error of each quantity, compared with enumeration."""
    design = ConditionalPoisson(tensor(log_weights), k)
    exact = Enumeration(log_weights, k)
    n = len(log_weights)
    pi = design.log_inclusion.tolist()
    joint = design.joint_log_inclusion(torch.arange(n)).tolist()
    subsets = list(exact.products)
    log_prob = design.log_prob(torch.tensor(subsets, dtype=torch.int64).view(len(subsets), k))
    entropy = float(design.entropy())
    return {
        "log Z": relative_error(float(design.log_normalizer), exact.z),
        "π": max((relative_error(pi[i], exact.inclusion(i)) for i in range(n)), default=0.0),
        "joint π": max(
            (
                relative_error(joint[i][j], exact.inclusion(i, j))
                for i, j in itertools.product(range(n), repeat=2)
            ),
            default=0.0,
        ),
        "log_prob": max(
            relative_error(value, exact.products[subset] / exact.z)
            for value, subset in zip(log_prob.tolist(), subsets, strict=True)
        ),
        "entropy": float(abs(entropy - exact.entropy) / max(exact.entropy, 1e-300)),
    }


def check(log_weights: list[float], k: int, tolerance: float) -> None:
    errors = worst_errors(log_weights, k)
    assert all(error <= tolerance for error in errors.values()), (log_weights, k, errors)


# ---------------------------------------------------------------------- against enumeration


@pytest.mark.parametrize("n", range(11))
@settings(max_examples=4, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_k_of_up_to_ten_agrees_with_enumeration(n: int, data: st.DataObject) -> None:
    """Log Z, π, joint π, log_prob and entropy, to 1e-12 relative."""
    spread = data.draw(st.sampled_from([0.0, 1.0, 10.0, 40.0]))
    unit = st.floats(-1, 1, allow_subnormal=False).map(lambda x: round(x, 6))
    weights = [spread * data.draw(unit) for _ in range(n)]
    for k in range(n + 1):
        check(weights, k, 1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_forced_and_excluded_items_agree_with_enumeration(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 7))
    k = data.draw(st.integers(0, n))
    finite = st.sampled_from([-3.0, -0.5, 0.0, 0.0, 1.25, 2.0])
    weights = [data.draw(st.one_of(finite, st.just(INF), st.just(-INF))) for _ in range(n)]
    forced, positive = weights.count(INF), n - weights.count(-INF)
    if forced > k or positive < k:
        with pytest.raises(ValueError, match=r"log_weights (makes|is above)"):
            ConditionalPoisson(tensor(weights), k)
    else:
        check(weights, k, 1e-12)


# ---------------------------------------------------------------------- adversarial inputs

TINY, HUGE = math.log(1e-300), math.log(1e300)
ADVERSARIAL = {
    "all equal": [0.0] * 7,
    "all tiny and equal": [TINY] * 6,
    "all huge and equal": [HUGE] * 6,
    "one dominant": [HUGE, 0.0, 0.1, 0.2, 0.3],
    "one negligible": [TINY, 0.0, 0.1, 0.2, 0.3],
    "from 1e-300 to 1e300": [TINY, TINY / 2, -1.0, 0.0, 1.0, HUGE / 2, HUGE],
    "two groups": [HUGE, HUGE, HUGE, TINY, TINY, TINY],
    "two near groups": [30.0, 30.0, 30.0, 0.0, 0.0, 0.0],
    "near ties": [1.0, 1.0 + 2**-52, 1.0 - 2**-53, 1.0 + 1e-9, 2.0],
    "zeros": [-INF, 0.0, -INF, 1.0, 2.0, -INF],
    "infinities": [INF, 0.0, -INF, INF, 1.0, -1.0],
    "infinities and extremes": [INF, HUGE, TINY, -INF, 0.0, HUGE],
    "beyond floating point": [-5e3, 5e3, 0.0, 1.0, -1e4, 4e3],
    "geometric": [-10.0 * n for n in range(9)],
    "subnormal differences": [0.0, 5e-324, -5e-324, 1e-300],
    "single": [0.7],
}


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_weights(name: str) -> None:
    """≤ 1e-11 relative, for every K the row admits (K = 0, 1, N − 1, N among them)."""
    weights = ADVERSARIAL[name]
    forced, positive = weights.count(INF), len(weights) - weights.count(-INF)
    for k in range(forced, positive + 1):
        check(weights, k, 1e-11)


@pytest.mark.parametrize(
    ("n", "k", "spread"),
    [(3000, 1, 3.0), (3000, 5, 0.0), (3000, 5, 3.0), (2000, 20, 8.0), (2500, 12, 40.0)],
)
def test_head_and_tail_agree_with_mpmath(n: int, k: int, spread: float) -> None:
    """N is so large that power sums stand for most of the items."""
    generator = torch.Generator().manual_seed(n + k)
    x = spread * torch.randn(n, generator=generator, dtype=torch.float64)
    design = ConditionalPoisson(x, k)
    assert design._population.tail is not None
    exact = Recurrence(x.tolist(), k)
    order = x.argsort(descending=True).tolist()
    items = [order[i] for i in (0, k - 1, k, 2 * k, 15 * k, 16 * k, 17 * k, n // 2, n - 1)]
    items = list(dict.fromkeys(items))
    assert relative_error(float(design.log_normalizer), exact.table[k]) < 1e-12
    everything = design.log_inclusion
    few = design.log_inclusion_of(torch.tensor(items))
    for i, item in enumerate(items):
        pi = exact.inclusion(item)
        assert relative_error(float(everything[item]), pi) < 1e-12
        assert relative_error(float(few[i]), pi) < 1e-12
    joint = design.joint_log_inclusion(torch.tensor(items))
    for i, j in itertools.combinations(range(len(items)), 2):
        pair = exact.inclusion(items[i], items[j])
        assert relative_error(float(joint[i, j]), pair) < 1e-12
    assert torch.allclose(everything.exp().sum(), torch.tensor(float(k), dtype=torch.float64))


@pytest.mark.parametrize(("n", "k"), [(1000, 400), (700, 350), (600, 599), (900, 1)])
def test_k_of_the_order_of_n_agrees_with_mpmath(n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(n)
    x = 2 * torch.randn(n, generator=generator, dtype=torch.float64)
    design = ConditionalPoisson(x, k)
    exact = Recurrence(x.tolist(), k)
    assert relative_error(float(design.log_normalizer), exact.table[k]) < 1e-12
    for item in (0, int(x.argmax()), int(x.argmin())):
        assert relative_error(float(design.log_inclusion[item]), exact.inclusion(item)) < 1e-12


def test_entropy_with_a_tail_agrees_with_its_definition() -> None:
    """H = log Z − Σ π log w, which is well conditioned here."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((3, 4000), generator=generator, dtype=torch.float64)
    design = ConditionalPoisson(x, 7)
    assert design._population.tail is not None
    plain = design.log_normalizer - (design.log_inclusion.exp() * x).sum(-1)
    assert torch.allclose(design.entropy(), plain, rtol=1e-12)


# ---------------------------------------------------------------------- batches, dtypes, devices


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    rows = [
        [0.0, 1.0, 2.0, 3.0, 4.0],
        [INF, 0.0, -INF, 1.0, 2.0],
        [-INF, -INF, 5.0, 5.0, -INF],
        [INF, INF, 0.0, 0.0, 0.0],
        [-700.0, 700.0, 0.0, 1.0, 2.0],
    ]
    batch = ConditionalPoisson(tensor([x for row in rows for x in row]).view(5, 1, 5), 2)
    index = torch.tensor([1, 3, 4])
    pair = torch.tensor([[[2, 3]]]).expand(5, 1, 2)
    for r, row in enumerate(rows):
        alone = ConditionalPoisson(tensor(row), 2)
        torch.testing.assert_close(batch.log_normalizer[r, 0], alone.log_normalizer)
        torch.testing.assert_close(batch.log_inclusion[r, 0], alone.log_inclusion)
        torch.testing.assert_close(
            batch.log_inclusion_of(index)[r, 0], alone.log_inclusion_of(index)
        )
        torch.testing.assert_close(
            batch.joint_log_inclusion(index)[r, 0], alone.joint_log_inclusion(index)
        )
        torch.testing.assert_close(batch.entropy()[r, 0], alone.entropy())
        torch.testing.assert_close(batch.log_prob(pair)[r, 0], alone.log_prob(pair[r, 0]))
    assert batch.sample((3, 2)).shape == (3, 2, 5, 1, 2)
    assert batch.log_prob(batch.sample((3, 2))).shape == (3, 2, 5, 1)


def test_rows_with_a_tail_do_not_see_each_other() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((6, 2001), generator=generator, dtype=torch.float64)
    x *= torch.tensor([0.0, 0.1, 1, 5, 20, 100], dtype=torch.float64)[:, None]
    x[1, 7], x[2, :1000], x[5, [1, 2000]] = INF, -INF, INF
    x[0, [3, 4, 5]], x[3, 3:] = INF, -INF
    batch = ConditionalPoisson(x, 3)
    assert batch._population.tail is not None
    for r in range(6):
        alone = ConditionalPoisson(x[r], 3)
        torch.testing.assert_close(batch.log_normalizer[r], alone.log_normalizer)
        torch.testing.assert_close(batch.log_inclusion[r], alone.log_inclusion)
        torch.testing.assert_close(batch.entropy()[r], alone.entropy())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("n", [50, 5000])
def test_any_floating_dtype_is_computed_in_float64(dtype: torch.dtype, n: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(dtype)
    design, exact = ConditionalPoisson(x, 4), ConditionalPoisson(x.double(), 4)
    for value, expected in [
        (design.log_normalizer, exact.log_normalizer),
        (design.log_inclusion, exact.log_inclusion),
        (design.entropy(), exact.entropy()),
    ]:
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, expected, rtol=1e-13, atol=1e-13)
    same = [d.sample((5,), torch.Generator().manual_seed(1)) for d in (design, exact)]
    assert torch.equal(*same)


def test_results_are_ordinary_tensors() -> None:
    """Results can be changed in place and take part in a computation with gradients."""
    design = ConditionalPoisson(torch.zeros(5000), 3)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    sample = design.sample()
    for value in (
        design.log_normalizer,
        design.log_inclusion,
        design.log_inclusion_of(sample),
        design.entropy(),
        design.joint_log_inclusion(sample),
        design.log_prob(sample),
    ):
        value += 0.0
        torch.autograd.grad((value * scale).sum(), scale)
    sample += 0


def test_results_can_be_changed_without_harm() -> None:
    design = ConditionalPoisson(torch.zeros(6), 2)
    entropy = design.entropy()
    design.log_inclusion.exp_()
    assert float(design.log_inclusion.exp().sum()) == pytest.approx(2)
    assert torch.equal(design.entropy(), entropy)


def test_k_may_be_any_integer_type() -> None:
    assert ConditionalPoisson(torch.zeros(5), np.int64(3)).k == 3  # type: ignore[arg-type]


def test_empty_designs() -> None:
    nothing = ConditionalPoisson(torch.empty(0), 0)
    assert nothing.log_normalizer == 0
    assert nothing.sample((4,)).shape == (4, 0)
    no_rows = ConditionalPoisson(torch.empty((0, 9000)), 3)
    assert no_rows.log_inclusion.shape == (0, 9000)
    assert no_rows.sample((4,)).shape == (4, 0, 3)
    no_picks = ConditionalPoisson(torch.randn(9000), 0)
    assert no_picks.log_normalizer == 0
    assert bool((no_picks.log_inclusion == -INF).all())
    assert no_picks.sample().shape == (0,)
    assert no_picks.log_prob(no_picks.sample()) == 0
    assert no_picks.entropy() == 0


def test_strided_and_expanded_weights() -> None:
    x = torch.randn((4000, 3), generator=torch.Generator().manual_seed(0)).T
    torch.testing.assert_close(
        ConditionalPoisson(x, 5).log_inclusion, ConditionalPoisson(x.contiguous(), 5).log_inclusion
    )
    one = x[:1].expand(4, -1)
    torch.testing.assert_close(
        ConditionalPoisson(one, 5).log_normalizer[3], ConditionalPoisson(x[0], 5).log_normalizer
    )


# ---------------------------------------------------------------------- conditioning


@pytest.mark.parametrize("n", [6, 3000])
def test_condition_on_is_the_design_given_the_item(n: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    design = ConditionalPoisson(x, 3)
    items = torch.tensor([0, 2, 5])
    joint = design.joint_log_inclusion(items)
    given = design.condition_on(items)
    assert given.batch_shape == (3,)
    expected = joint - design.log_inclusion_of(items)[:, None]
    torch.testing.assert_close(given.log_inclusion_of(items), expected, rtol=1e-11, atol=1e-12)
    subset = torch.tensor([0, 2, 5])
    torch.testing.assert_close(
        given.log_prob(subset), design.log_prob(subset) - design.log_inclusion_of(items)
    )


def test_condition_on_one_item_of_every_row() -> None:
    design = ConditionalPoisson(torch.zeros((2, 3, 4)), 2)
    assert design.condition_on(1).log_inclusion[..., 1].abs().max() == 0
    index = torch.tensor([[0, 1, 2], [3, 0, 1]])
    given = design.condition_on(index)
    assert bool((given.log_inclusion.gather(-1, index[..., None]) == 0).all())
    assert design.condition_on(torch.zeros((5, 2, 3), dtype=torch.long)).batch_shape == (5, 2, 3)


# ---------------------------------------------------------------------- gradients


def test_gradients_agree_with_finite_differences() -> None:
    x = torch.randn((2, 6), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x.requires_grad_()
    subset = torch.tensor([1, 2, 4])

    def log_normalizer(x: Tensor) -> Tensor:
        return ConditionalPoisson(x, 3).log_normalizer

    assert torch.autograd.gradcheck(log_normalizer, x)
    assert torch.autograd.gradgradcheck(log_normalizer, x)
    for function in (
        lambda x: ConditionalPoisson(x, 3).log_inclusion,
        lambda x: ConditionalPoisson(x, 3).log_inclusion_of(subset),
        lambda x: ConditionalPoisson(x, 3).log_prob(subset),
        lambda x: ConditionalPoisson(x, 3).entropy(),
        lambda x: ConditionalPoisson(x, 3).condition_on(2).log_normalizer,
    ):
        assert torch.autograd.gradcheck(function, x)


@pytest.mark.parametrize("n", [40, 4000])
def test_the_gradient_of_log_z_is_the_inclusion_probability(n: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(2), requires_grad=True)
    design = ConditionalPoisson(x, 5)
    (gradient,) = torch.autograd.grad(design.log_normalizer, x)
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient, design.log_inclusion.exp().float())


def test_derivatives_we_do_not_have_are_refused() -> None:
    x = tensor([0.0, 1.0, 2.0]).requires_grad_()
    design = ConditionalPoisson(x, 2)
    for value in (design.log_inclusion[0], design.entropy()):
        (first,) = torch.autograd.grad(value, x, create_graph=True)
        with pytest.raises(NotImplementedError, match="first derivatives only"):
            torch.autograd.grad(first.sum() + (x**2).sum(), x)


def test_a_probability_of_one_leaves_gradients_finite() -> None:
    log_p = tensor([0.0, -1.0, -2.0, -3.0]).requires_grad_()
    design = ConditionalPoisson.from_log_probs(log_p, 2)
    (gradient,) = torch.autograd.grad(design.log_inclusion[1], log_p)
    assert bool(gradient.isfinite().all())
    assert float(gradient[0]) == 0
    assert float(gradient[1]) > 0


def test_rare_items_do_not_spoil_gradients() -> None:
    """Log π = −1000: its covariances are not representable, its derivatives are."""
    x = tensor([0.0, 1.0, 2.0, -1000.0, -1200.0]).requires_grad_()
    design = ConditionalPoisson(x, 2)
    (likely,) = torch.autograd.grad(design.log_inclusion[0], x)
    small = ConditionalPoisson(tensor([0.0, 1.0, 2.0]).requires_grad_(), 2)
    (expected,) = torch.autograd.grad(small.log_inclusion[0], small.log_weights)
    torch.testing.assert_close(likely[:3], expected)
    assert float(likely[3:].abs().max()) == 0
    (rare,) = torch.autograd.grad(design.log_inclusion[3], x)
    step = 1e-6
    for j in range(5):
        moved = [x.detach() + sign * step * torch.eye(5).double()[j] for sign in (1, -1)]
        up, down = (ConditionalPoisson(m, 2).log_inclusion[3] for m in moved)
        assert float(rare[j]) == pytest.approx(float((up - down) / (2 * step)), abs=1e-6)
    (gradient,) = torch.autograd.grad(design.log_normalizer, x, create_graph=True)
    (second,) = torch.autograd.grad(gradient[0], x)
    assert bool(second.isfinite().all())


def test_forced_items_are_not_part_of_the_normalizer() -> None:
    x = tensor([INF, 1.0, 2.0, 0.0]).requires_grad_()
    design = ConditionalPoisson(x, 2)
    (gradient,) = torch.autograd.grad(design.log_normalizer, x)
    torch.testing.assert_close(gradient, torch.cat([torch.zeros(1), x.detach()[1:].softmax(0)]))
    (gradient,) = torch.autograd.grad(design.log_prob(torch.tensor([0, 1])), x)
    assert float(gradient[0]) == 0


def test_certain_items_have_no_gradient() -> None:
    x = tensor([INF, 0.0, 1.0, -INF, 2.0]).requires_grad_()
    design = ConditionalPoisson(x, 2)
    (gradient,) = torch.autograd.grad(design.log_inclusion[2], x)
    assert gradient[[0, 3]].abs().max() == 0
    assert bool(gradient.isfinite().all())
    free = ConditionalPoisson(tensor([0.0, 1.0, 2.0]).requires_grad_(), 1)
    (expected,) = torch.autograd.grad(free.log_inclusion[1], free.log_weights)
    torch.testing.assert_close(gradient[[1, 2, 4]], expected)


# ---------------------------------------------------------------------- weights from probabilities


@pytest.mark.parametrize("p", [1e-320, 1e-300, 1e-17, 1e-9, 0.25, 0.5, 0.75])
def test_odds_of_small_and_middling_probabilities(p: float) -> None:
    design = ConditionalPoisson.from_log_probs(tensor([math.log(p), -0.5]), 1)
    expected = math.log(p) - math.log1p(-p)
    assert float(design.log_weights[0]) == pytest.approx(expected, rel=1e-15, abs=1e-15)


@pytest.mark.parametrize("q", [1e-300, 1e-17, 1e-9, 0.25])
def test_odds_of_probabilities_near_one(q: float) -> None:
    """Log p ≈ −q for p = 1 − q, so the odds are (1 − q)/q."""
    design = ConditionalPoisson.from_log_probs(tensor([math.log1p(-q), -0.5]), 1)
    expected = math.log1p(-q) - math.log(q)
    assert float(design.log_weights[0]) == pytest.approx(expected, rel=1e-15)


def test_probability_one_means_always_and_zero_never() -> None:
    design = ConditionalPoisson.from_log_probs(tensor([0.0, -1.0, -2.0, -INF]), 2)
    assert float(design.log_inclusion[0]) == 0
    assert float(design.log_inclusion[3]) == -INF


def test_probability_weights_with_k_one_are_ordinary_sampling() -> None:
    log_p = torch.randn(9, generator=torch.Generator().manual_seed(1)).double().log_softmax(-1)
    design = ConditionalPoisson.from_log_probs(log_p, 1, weights="probability")
    torch.testing.assert_close(design.log_inclusion, log_p)


def test_annealing_is_a_power_of_the_weights() -> None:
    log_p = torch.randn(9, generator=torch.Generator().manual_seed(1)).double().log_softmax(-1)
    plain = ConditionalPoisson.from_log_probs(log_p, 4)
    annealed = ConditionalPoisson.from_log_probs(log_p, 4, anneal=0.3)
    expected = ConditionalPoisson(plain.log_weights / 0.3, 4)
    torch.testing.assert_close(annealed.log_inclusion, expected.log_inclusion)


@pytest.mark.parametrize("anneal", [1e-3, 1e-30, 5e-324, 0.0])
@pytest.mark.parametrize("weights", ["odds", "probability"])
def test_annealed_to_zero_the_sample_is_the_top_k(anneal: float, weights: str) -> None:
    log_p = torch.randn(300, generator=torch.Generator().manual_seed(1)).double().log_softmax(-1)
    log_p = log_p - 900.0 if weights == "probability" else log_p
    design = ConditionalPoisson.from_log_probs(log_p, 7, weights=weights, anneal=anneal)  # type: ignore[arg-type]
    top = log_p.topk(7).indices.sort().values
    assert torch.equal(design.sample((50,)), top.expand(50, 7))


@pytest.mark.parametrize("anneal", [1e-6, 0.0])
def test_annealed_to_zero_ties_are_broken_uniformly(anneal: float) -> None:
    log_p = tensor([0.3, 0.1, 0.1, 0.1, 0.1, 0.3]).log()
    design = ConditionalPoisson.from_log_probs(log_p, 3, anneal=anneal)
    torch.testing.assert_close(design.log_inclusion.exp(), tensor([1, 0.25, 0.25, 0.25, 0.25, 1]))
    torch.testing.assert_close(design.entropy(), torch.tensor(math.log(4.0), dtype=torch.float64))


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("weights", "k", "message"),
    [
        (tensor([0.0, math.nan]), 1, "NaN"),
        (torch.zeros(3), -1, "k is -1; it must be an integer from 0 to N = 3"),
        (torch.zeros(3), 4, "k is 4; it must be an integer from 0 to N = 3"),
        (torch.zeros(3), 1.0, "k is 1.0; it must be an integer"),
        (torch.zeros(3), True, "k is True; it must be an integer"),
        (torch.zeros(3, dtype=torch.int64), 1, "log_weights is torch.int64"),
        ([0.0, 1.0], 1, "log_weights is list"),
        (torch.zeros(()), 0, "log_weights has no dimension"),
        (tensor([INF, INF, 0.0]), 1, "makes 2 items of row 0 certain; at most k = 1"),
        (tensor([0.0, -INF, -INF]), 2, "above -inf in only 1 places of row 0; k = 2"),
    ],
)
def test_bad_designs_are_refused(weights: Tensor, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConditionalPoisson(weights, k)


def test_bad_rows_are_named() -> None:
    x = torch.zeros((4, 5000))
    x[2, 4321] = math.nan
    with pytest.raises(ValueError, match="row 2"):
        ConditionalPoisson(x, 3)
    x[2, 4321] = 0.0
    x[3, :4] = INF
    with pytest.raises(ValueError, match="makes 4 items of row 3 certain"):
        ConditionalPoisson(x, 3)
    x[3] = -INF
    with pytest.raises(ValueError, match="only 0 places of row 3"):
        ConditionalPoisson(x, 3)


@pytest.mark.parametrize(
    ("subset", "message"),
    [
        (torch.tensor([0, 0]), "subset has 0 twice"),
        (torch.tensor([0, 5]), "subset has 5; items are 0 to N - 1 = 4"),
        (torch.tensor([-1, 2]), "subset has -1"),
        (torch.tensor([0, 1, 2]), "last dimension must be k = 2"),
        (torch.tensor([0.0, 1.0]), "must hold integers"),
        (torch.zeros((3, 7, 2), dtype=torch.long), r"fit the batch shape \[6\]"),
    ],
)
def test_bad_subsets_are_refused(subset: Tensor, message: str) -> None:
    design = ConditionalPoisson(torch.zeros((6, 5)), 2)
    with pytest.raises(ValueError, match=message):
        design.log_prob(subset)


def test_bad_arguments_are_refused() -> None:
    design = ConditionalPoisson(tensor([0.0, 1.0, -INF]), 1)
    with pytest.raises(ValueError, match="in no sample"):
        design.condition_on(2)
    with pytest.raises(ValueError, match="in no sample"):
        design.condition_on(0).condition_on(1)
    with pytest.raises(ValueError, match=r"index has shape \[5\]"):
        ConditionalPoisson(torch.zeros((3, 4)), 1).condition_on(torch.zeros(5, dtype=torch.long))
    with pytest.raises(ValueError, match="indices is a list; it must be an integer tensor"):
        design.log_inclusion_of([0, 1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="subset is a scalar; it must be an integer tensor"):
        design.log_prob(torch.tensor(0))
    with pytest.raises(ValueError, match="generator has 2 generators"):
        design.sample((), [torch.Generator(), torch.Generator()])
    with pytest.raises(ValueError, match="sample_shape is 5"):
        design.sample(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sample_shape is \(2\.5,\)"):
        design.sample((2.5,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="index has 3"):
        design.condition_on(3)
    with pytest.raises(ValueError, match="weights is 'logits'"):
        ConditionalPoisson.from_log_probs(torch.zeros(2), 1, weights="logits")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="anneal is -1"):
        ConditionalPoisson.from_log_probs(torch.zeros(2), 1, anneal=-1)
    with pytest.raises(ValueError, match=r"anneal is '0\.5'"):
        ConditionalPoisson.from_log_probs(torch.zeros(2), 1, anneal="0.5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="log_p is above -inf in only 1 places"):
        ConditionalPoisson.from_log_probs(tensor([-1.0, -INF]), 2)
    with pytest.raises(ValueError, match=r"log_p has 0\.5"):
        ConditionalPoisson.from_log_probs(tensor([0.5, -1.0]), 1)
    with pytest.raises(ValueError, match="log_p has a NaN"):
        ConditionalPoisson.from_log_probs(tensor([math.nan, -1.0]), 1)


def test_log_prob_does_not_cancel() -> None:
    """Weights e^±1000 cancel between a subset and the normaliser; log Q is never positive."""
    x = torch.cat([torch.full((399,), 1e3), torch.zeros(2), torch.full((599,), -1e3)]).double()
    design = ConditionalPoisson(x, 400)
    for other in (399, 400):
        log_q = design.log_prob(torch.cat([torch.arange(399), torch.tensor([other])]))
        assert float(log_q) == pytest.approx(-math.log(2), abs=1e-12)
    steep = ConditionalPoisson(-1e6 * torch.arange(9).double(), 4)
    assert float(steep.log_prob(torch.arange(4))) == 0


def test_an_offset_does_not_cost_digits() -> None:
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (x * 2**20).round() / 2**20  # so that adding 1e6 is exact
    plain, far = ConditionalPoisson(x, 5), ConditionalPoisson(x + 2.0**20, 5)
    assert plain._population.tail is not None
    torch.testing.assert_close(far.log_inclusion, plain.log_inclusion, rtol=1e-13, atol=1e-13)
    index = torch.arange(2000)
    torch.testing.assert_close(
        far.log_inclusion_of(index), far.log_inclusion, rtol=1e-13, atol=1e-13
    )


def test_what_is_cached_in_inference_mode_can_be_used_outside() -> None:
    x = torch.zeros(6, requires_grad=True)
    design = ConditionalPoisson(x, 2)
    with torch.inference_mode():
        assert design.log_inclusion.shape == (6,)
    torch.autograd.grad(design.log_inclusion.sum(), x)


def test_many_large_rows_need_little_memory_for_the_tilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over the coins come to the same when they are computed in parts."""
    x = torch.randn((3, 300), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = ConditionalPoisson(x, 100).log_inclusion
    monkeypatch.setattr("cpsbs.conditional_poisson.bernoulli_sum.block_size", lambda _: 64)
    torch.testing.assert_close(ConditionalPoisson(x, 100).log_inclusion, whole)


def test_impossible_subsets_have_probability_zero() -> None:
    design = ConditionalPoisson(tensor([INF, 0.0, 1.0, -INF]), 2)
    assert float(design.log_prob(torch.tensor([0, 1])).exp()) == pytest.approx(1 / (1 + math.e))
    assert float(design.log_prob(torch.tensor([1, 2]))) == -INF
    assert float(design.log_prob(torch.tensor([0, 3]))) == -INF


def test_repr() -> None:
    assert (
        repr(ConditionalPoisson(torch.zeros((2, 5)), 3))
        == "ConditionalPoisson(k=3, log_weights=[2, 5])"
    )
