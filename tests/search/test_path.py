"""What a search says of its steps: the candidates that it offered, and how likely each was.

Inclusion probabilities of candidates that lost are compared with how often they were picked, over
20,000 draws from the same parents: 5 standard errors, a false-alarm rate below 1e-6 for each, and
fixed seeds.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpsbs import DESIGNS, TableModel, search
from cpsbs.models.base import check_scores
from cpsbs.models.prefixed import PrefixedModel
from cpsbs.scores.candidates import Candidates
from cpsbs.scores.reading import read
from cpsbs.search.path import OFFERED

MODEL = TableModel.random(vocab_size=5, length=3, eos=0, seed=3)
DRAWS = 20_000
KNOWN = ["conditional-poisson", "calibrated", "stratified", "independent"]


def copies(model: TableModel, sources: int) -> TableModel:
    return TableModel(model.tables * sources, model.eos[0])


@pytest.mark.parametrize("design", DESIGNS)
def test_all_candidates_of_a_small_model_are_offered_with_their_probabilities(design: str) -> None:
    beams = search(MODEL, 3, design, max_length=3, generator=0, path=True)
    assert beams.path is not None
    log_parent = torch.zeros((1, 1), dtype=torch.float64)
    ended = torch.zeros((1, 1), dtype=torch.bool)
    for step in beams.path:
        offer = step.offer
        assert offer.token.shape[-1] == min(OFFERED, MODEL.vocab_size)
        if offer.log_prob.shape[1] != log_parent.shape[1]:  # designs that start from K roots
            log_parent = log_parent.expand(-1, offer.log_prob.shape[1])
            ended = ended.expand_as(log_parent)
        total = torch.logaddexp(offer.log_prob.logsumexp(-1), offer.log_rest)
        torch.testing.assert_close(total.exp(), log_parent.exp(), atol=1e-6, rtol=1e-6)
        # A sequence that has ended offers itself and nothing else.
        assert bool((offer.token[ended][:, 0] == 0).all())
        assert bool(offer.log_prob[ended][:, 1:].isneginf().all())
        assert bool(offer.log_rest[ended].isneginf().all())
        picked = step.log_prob[step.present]
        assert all(bool((offer.log_prob - p).abs().min() < 1e-6) for p in picked)
        log_parent, ended = step.log_prob, step.finished


@pytest.mark.parametrize("design", KNOWN)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_candidates_are_picked_as_often_as_the_offer_says(design: str, k: int) -> None:
    """The first step has the same parents in all draws."""
    beams = search(copies(MODEL, DRAWS), k, design, max_length=1, generator=1, path=True)
    assert beams.path is not None
    (step,) = beams.path
    log_pi = step.offer.log_inclusion
    assert log_pi is not None
    assert bool((log_pi == log_pi[:1]).all())
    for row in range(step.offer.token.shape[1]):
        for token, pi in zip(
            step.offer.token[0, row].tolist(), log_pi[0, row].exp().tolist(), strict=True
        ):
            picks = (step.token == token) & step.present & (step.parent == row)
            share = float(picks.any(-1).double().mean())
            assert abs(share - pi) <= 5 * math.sqrt(pi * (1 - pi) / DRAWS) + 1e-9


@pytest.mark.parametrize("design", ["conditional-poisson", "calibrated", "stratified"])
def test_inclusion_probabilities_of_a_later_step_sum_to_the_number_of_picks(design: str) -> None:
    model = TableModel.random(vocab_size=OFFERED, length=3, eos=0, seed=5)
    beams = search(copies(model, 50), 3, design, max_length=3, generator=2, path=True)
    assert beams.path is not None
    for step in beams.path:
        assert step.offer.log_inclusion is not None
        total = step.offer.log_inclusion.exp().sum((1, 2))
        torch.testing.assert_close(total, step.present.sum(-1).double(), atol=1e-6, rtol=1e-6)


def test_stochastic_beam_search_tells_how_likely_its_threshold_was_beaten() -> None:
    beams = search(copies(MODEL, 50), 3, "gumbel-top-k", max_length=3, generator=2, path=True)
    assert beams.path is not None
    assert beams.log_inclusion is not None
    last = beams.path[-1]
    assert last.log_inclusion is not None
    order = last.log_prob.argsort(dim=-1, descending=True, stable=True)
    own = last.log_inclusion.gather(-1, order)[beams.present[last.source]]
    torch.testing.assert_close(own, beams.log_inclusion[last.source][beams.present[last.source]])


@pytest.mark.parametrize("design", ["top-k", "diverse"])
def test_nothing_is_random_in_beam_search(design: str) -> None:
    beams = search(MODEL, 3, design, max_length=3, generator=2, path=True)
    assert beams.path is not None
    for step in beams.path:
        assert step.offer.log_inclusion is not None
        assert set(step.offer.log_inclusion.exp().flatten().tolist()) <= {0.0, 1.0}
        assert step.log_inclusion is not None
        assert bool((step.log_inclusion[step.present] == 0).all())


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_likeliest_extensions_are_those_of_the_whole_vocabulary(data: st.DataObject) -> None:
    parents, tokens = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    numbers = st.one_of(st.floats(-60, 60, width=32), st.just(-math.inf))
    rows = [data.draw(st.lists(numbers, min_size=tokens, max_size=tokens)) for _ in range(parents)]
    rows = [row if max(row) > -math.inf else [0.0, *row[1:]] for row in rows]
    scores = torch.tensor(rows, dtype=torch.float32)
    finished = torch.tensor(data.draw(st.lists(st.booleans(), min_size=parents, max_size=parents)))
    log_prob = torch.linspace(-3, 0, parents, dtype=torch.float64)[None]
    row = torch.arange(parents)[None].masked_fill(finished[None], parents)
    chunks = read(scores, 0.7, data.draw(st.integers(1, tokens)), 1, row)
    candidates = Candidates(log_prob, chunks, finished[None])
    count = data.draw(st.integers(1, 15))
    token, log_p, log_rest = candidates.likeliest(count)
    exact = candidates.log_joint().view(parents, tokens)
    assert log_p.shape == (1, parents, min(count, tokens))
    for i in range(parents):
        ordered = exact[i].sort(descending=True).values
        torch.testing.assert_close(log_p[0, i], ordered[:count], atol=1e-6, rtol=1e-6)
        here = log_p[0, i] > -math.inf
        torch.testing.assert_close(exact[i][token[0, i]][here], log_p[0, i][here])
        rest = ordered[count:].logsumexp(-1) if count < tokens else torch.tensor(-math.inf)
        torch.testing.assert_close(log_rest[0, i], rest.double(), atol=1e-6, rtol=1e-6)


# ---------------------------------------------------------------------- models below a prefix


def identity(scores: Tensor) -> Tensor:
    return scores


def test_a_search_below_a_prefix_has_the_conditional_law() -> None:
    prefix = [1, 2]
    model = PrefixedModel(MODEL, prefix, identity)
    beams = search(model, 30, "top-k", max_length=1)
    assert model.log_prefix is not None
    exact = {y: p for y, p in MODEL.sequences(3).items() if y[:2] == (1, 2)}
    for y, log_p in zip(beams.tokens(0), beams.log_prob[0].tolist(), strict=False):
        found = math.exp(log_p + float(model.log_prefix))
        assert found == pytest.approx(exact[(*prefix, *y)], rel=1e-5)


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [([1, 0], "ends the sequence"), ([1, 9], "from 0 to 4"), ([-1], "from 0 to 4")],
)
def test_impossible_prefixes_are_refused(prefix: list[int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PrefixedModel(MODEL, prefix, identity).start()


def test_a_prefix_without_probability_is_refused() -> None:
    model = TableModel([{(): [0.5, 0.5, 0.0], (1,): [1.0, 0.0, 0.0]}], 0)
    with pytest.raises(ValueError, match="no probability"):
        PrefixedModel(model, [2], identity).start()


def test_a_wrapped_model_is_a_model() -> None:
    model = PrefixedModel(MODEL, [], identity)
    assert (model.sources, model.pad, model.name) == (1, MODEL.pad, "TableModel")
    check_scores(model.start(), 1, model, "start")
