"""The design on a GPU, where there is one: the same numbers, the same law."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from cpsbs import (
    DESIGNS,
    ConditionalPoisson,
    FunctionModel,
    TransformersModel,
    load,
    search,
)
from cpsbs.backends import backend_for
from cpsbs.randomness import Streams, split_seed
from cpsbs.text import demonstration
from tests.models.tiny import make, prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def rows(n: int) -> torch.Tensor:
    x = 3 * torch.randn((4, n), generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    x[1, 5], x[2, 7:9], x[3] = torch.inf, -torch.inf, 0.0
    return x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(12, 5), (900, 300), (5000, 10), (200_000, 20)])
def test_numbers_agree_with_the_cpu(n: int, k: int, dtype: torch.dtype) -> None:
    x = rows(n).to(dtype)
    here, there = ConditionalPoisson(x, k), ConditionalPoisson(x.cuda(), k)
    index = torch.arange(0, n, n // 6)
    for value, expected in [
        (there.log_normalizer, here.log_normalizer),
        (there.log_inclusion, here.log_inclusion),
        (there.log_inclusion_of(index), here.log_inclusion_of(index)),
        (there.joint_log_inclusion(index), here.joint_log_inclusion(index)),
        (there.entropy(), here.entropy()),
    ]:
        assert value.is_cuda
        torch.testing.assert_close(value.cpu(), expected, rtol=1e-11, atol=1e-11)
    sample = there.sample((3,), torch.Generator("cuda").manual_seed(0))
    again = there.sample((3,), torch.Generator("cuda").manual_seed(0))
    assert sample.is_cuda
    assert torch.equal(sample, again)
    torch.testing.assert_close(there.log_prob(sample).cpu(), here.log_prob(sample.cpu()))


def test_samples_have_their_law() -> None:
    """Each item's count within 4.5 standard deviations; false-alarm rate below 1e-2 in all."""
    x = 2 * torch.randn(3000, generator=torch.Generator().manual_seed(0))
    design = ConditionalPoisson(x.cuda(), 8)
    draws = 100_000
    samples = design.sample((draws,), torch.Generator("cuda").manual_seed(1))
    pi = design.log_inclusion.exp()
    times = torch.bincount(samples.flatten(), minlength=3000)
    likely = pi > 50 / draws
    z = (times - draws * pi) / (draws * pi * (1 - pi)).sqrt()
    assert float(z[likely].abs().max()) < 4.5


def test_streams_of_a_seed_are_those_of_its_generators() -> None:
    device = torch.device("cuda")
    backend = backend_for(device)
    ours = Streams.split(2**70 + 5, [3, 0, 7], device, backend).counters
    theirs = Streams(split_seed(2**70 + 5, [3, 0, 7], device), 3, device, backend).counters
    assert ours is not None
    assert theirs is not None
    assert torch.equal(ours.seeds, theirs.seeds)
    assert torch.equal(ours.counts, theirs.counts)


def test_gradients() -> None:
    x = rows(40)[:1].cuda().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ConditionalPoisson(x, 6).log_normalizer, x)
    assert torch.autograd.gradgradcheck(lambda x: ConditionalPoisson(x, 6).log_normalizer, x)
    target = ConditionalPoisson(x.detach(), 6).log_inclusion.exp()
    fitted = ConditionalPoisson.fit(target, 6)
    assert float((fitted.log_inclusion.exp() - target).abs().max()) < 1e-10


@pytest.mark.parametrize("design", DESIGNS)
def test_the_search_runs_on_a_gpu(design: str) -> None:
    """The same law; here only that everything stays there and probabilities are right."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn((50, 50), generator=generator).cuda().log_softmax(-1)

    def next_log_probs(prefix: torch.Tensor) -> torch.Tensor:
        last = prefix[:, -1] if prefix.shape[1] else torch.zeros_like(prefix.sum(-1))
        return table[last]

    model = FunctionModel(next_log_probs, 50, eos=0, sources=3, device="cuda")
    beams = search(model, 5, design, max_length=8, generator=torch.Generator().manual_seed(1))
    assert beams.sequences.is_cuda
    for b in range(3):
        for y, log_p in zip(beams.tokens(b), beams.log_prob[b].tolist(), strict=True):
            path = [0, *y]
            exact = sum(float(table[i, j]) for i, j in pairwise(path))
            assert log_p == pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize("design", ["conditional-poisson", "gumbel-top-k", "top-k", "stratified"])
def test_a_recorded_search_stays_the_same(design: str) -> None:
    """Graphs are replayed by later searches, when all that the first one held has been freed."""
    model = make("marian", vocab_size=3000).cuda()
    inputs = {name: x.cuda() for name, x in prompts(model).items()}
    eos = list(range(1, 200))
    found = []
    for temperature in (1.0, 0.7, 1.0, 0.7, 1.0):
        beams = search(
            TransformersModel(model, **inputs, eos_token_id=eos), 4, design,
            max_length=40, temperature=temperature, generator=5,
        )  # fmt: skip
        found.append((beams.sequences.tolist(), beams.log_prob.tolist()))
        del beams
        # Whatever was freed is overwritten.
        _ = [torch.full((size,), 1, device="cuda") for size in (1, 8, 64, 512, 4096) * 50]
    assert found[2] == found[4] == found[0]
    assert found[3] == found[1] != found[0]
    ended = [bool(set(y) & set(eos)) for beam in found[0][0] for y in beam]
    assert any(ended) or design == "top-k"


@pytest.mark.parametrize("design", ["conditional-poisson", "gumbel-top-k", "top-k", "stratified"])
def test_sources_that_join_later_get_what_they_get_alone(design: str) -> None:
    """In float32, where rounding does not decide; each source has its own random numbers."""
    model = load("en-fr", device="cuda", dtype="float32")
    texts = sorted((source for source, _ in demonstration()), key=len, reverse=True)
    groups = [texts[:12], texts[12:18], texts[18:24], texts[24:30]]
    first = 0
    joined = model.beams_each(groups, 5, design, seed=3, temperature=0.5)
    for group, beams in zip(groups, joined, strict=True):
        streams = range(first, first + len(group))
        alone = model.beams(group, 5, design, seed=3, temperature=0.5, streams=streams)
        assert [beams.tokens(b) for b in range(len(group))] == [
            alone.tokens(b) for b in range(len(group))
        ]
        torch.testing.assert_close(beams.log_prob, alone.log_prob, rtol=1e-4, atol=1e-4)
        first += len(group)
