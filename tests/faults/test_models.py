"""Models of transformers, and of one's own, that would give wrong probabilities without a word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

import cpsbs
from cpsbs import FunctionModel, TransformersModel, search
from cpsbs.designs import DESIGNS
from cpsbs.estimation.functions import Entropy
from tests.models import tiny

KINDS = {"llama": tiny.llama, "gpt2": tiny.gpt2, "marian": tiny.marian, "t5": tiny.t5}
ALLOWED = [[1, 4, 5, 6, 7], [1, 10, 11, 12, 13, 14], [1, 20, 21, 22]]
"""Tokens that each source may have; the end is one of them."""


def made(name: str) -> Any:
    torch.manual_seed(0)
    return KINDS[name]().eval()


def inputs(name: str, sources: int = 3) -> dict[str, Tensor]:
    ids = torch.tensor([[3, 5, 7, 1], [4, 6, 8, 1], [9, 2, 5, 1]])[:sources]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def allowed_tokens(source: int, ids: Tensor) -> list[int]:
    """A constraint that is different for every source, and that no ended sequence obeys."""
    assert 1 not in ids[4:].tolist(), "an ended sequence was asked about"
    return ALLOWED[source]


class OnlyAllowed:
    """The same as a processor of the caller's own, which maps rows to sources by their number."""

    def __init__(self, beams: int) -> None:
        self.beams = beams

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        assert len(ids) == len(scores) == 3 * self.beams
        masked = torch.full_like(scores, -torch.inf)
        for row in range(len(ids)):
            allowed = ALLOWED[row // self.beams]
            masked[row, allowed] = scores[row, allowed]
        return masked


def check_allowed(beams: cpsbs.Beams, model: Any, given: dict[str, Tensor]) -> None:
    """Every token is one of its source's, and probabilities are those of the renormalised model."""
    for b in range(3):
        assert beams.tokens(b)
        assert set(chain(*beams.tokens(b))) <= set(ALLOWED[b])
        y = beams.tokens(b)[0]
        total = 0.0
        for t in range(len(y)):
            logits = _next(model, {name: x[[b]] for name, x in given.items()}, y[:t])
            total += float(logits[ALLOWED[b]].log_softmax(-1)[ALLOWED[b].index(y[t])])
        assert float(beams.log_prob[b, 0]) == pytest.approx(total, abs=1e-4)


def _next(model: Any, given: dict[str, Tensor], prefix: list[int]) -> Tensor:
    """[V] logits after a prefix."""
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            start = torch.tensor([[model.config.decoder_start_token_id, *prefix]])
            found: Tensor = model(**given, decoder_input_ids=start).logits[0, -1]
        else:
            ids = torch.cat([given["input_ids"], torch.tensor([prefix], dtype=torch.int64)], dim=-1)
            found = model(ids).logits[0, -1]
    return found


@pytest.mark.parametrize("k", [2, 5])  # more sources than hypotheses, and fewer
@pytest.mark.parametrize("name", KINDS)
def test_a_constraint_is_that_of_the_rows_own_source(name: str, k: int) -> None:
    model, given = made(name), inputs(name)
    settings: dict[str, Any] = {"max_length": 5, "generator": 0}
    constrained = TransformersModel(model, **given, prefix_allowed_tokens_fn=allowed_tokens)
    check_allowed(search(constrained, k, **settings), model, given)
    own = TransformersModel(model, **given, logits_processor=[OnlyAllowed(1)])
    check_allowed(search(own, k, **settings), model, given)
    for how in (
        {"prefix_allowed_tokens_fn": allowed_tokens},
        {"logits_processor": [OnlyAllowed(k)]},
    ):
        found = model.generate(
            **given,
            **how,
            custom_generate=cpsbs.generate,
            num_beams=k,
            max_new_tokens=5,
            return_dict_in_generate=True,
            generator=torch.Generator().manual_seed(0),
        )
        check_allowed(found.beams, model, given)


def test_a_constraint_that_allows_nothing_is_named() -> None:
    model = TransformersModel(
        made("gpt2"), **inputs("gpt2"), prefix_allowed_tokens_fn=lambda source, ids: []
    )
    with pytest.raises(ValueError, match="prefix_allowed_tokens_fn allows no token for source 0"):
        search(model, 2, max_length=3)


@pytest.mark.parametrize("name", ["gpt2", "marian"])
@pytest.mark.parametrize("how", ["encoder_no_repeat_ngram_size", "encoder_repetition_penalty"])
def test_processors_that_look_at_the_source_look_at_the_right_one(name: str, how: str) -> None:
    model, given = made(name), inputs(name)
    setting = {how: 1 if how.endswith("size") else 3.0}
    for seed in range(3):
        together = search(
            TransformersModel(model, **given, **setting), 4, max_length=4, generator=seed
        )
        for b in range(3):
            alone = {n: x[[b]] for n, x in given.items()}
            streams = cpsbs.split_seed(seed, [b])
            one = search(
                TransformersModel(model, **alone, **setting), 4, max_length=4, generator=streams
            )
            assert one.tokens(0) == together.tokens(b)
            torch.testing.assert_close(one.log_prob[0], together.log_prob[b], rtol=0, atol=1e-4)
            if how.endswith("size"):
                assert not set(chain(*one.tokens(0))) & set(alone["input_ids"][0].tolist())
    found = model.generate(
        **given, **setting, custom_generate=cpsbs.generate, num_beams=4, max_new_tokens=4
    )
    assert len(found) == 12


def test_processors_that_remember_rows_are_refused() -> None:
    model = made("llama")
    with pytest.raises(ValueError, match="keeps a KV cache of its own for each row"):
        TransformersModel(model, **inputs("llama"), guidance_scale=2.0)


def test_a_processor_that_changes_the_shape_is_named() -> None:
    model = TransformersModel(
        made("gpt2"), **inputs("gpt2"), logits_processor=[lambda ids, scores: scores[:1]]
    )
    with pytest.raises(ValueError, match="the shape that it was given"):
        search(model, 2, max_length=3)


def test_stopping_criteria_see_the_rows_of_their_sources() -> None:
    """One that ends source 1 after two tokens leaves the others alone."""

    def second_source_is_short(beams: int) -> Callable[..., Tensor]:
        def stop(ids: Tensor, scores: Any) -> Tensor:
            assert len(ids) == 3 * beams
            rows = torch.arange(len(ids)) // beams
            return (rows == 1) & (ids.shape[-1] >= 4 + 2)

        return stop

    model, given = made("gpt2"), inputs("gpt2")
    stopped = search(
        TransformersModel(model, **given, stopping_criteria=[second_source_is_short(1)]),
        4,
        max_length=6,
        generator=0,
    )
    found = model.generate(
        **given,
        stopping_criteria=[second_source_is_short(4)],
        custom_generate=cpsbs.generate,
        num_beams=4,
        max_new_tokens=6,
        return_dict_in_generate=True,
        generator=torch.Generator().manual_seed(0),
    ).beams
    for beams in (stopped, found):
        assert int(beams.lengths[1].max()) == 2
        assert int(beams.lengths[0].max()) > 2
        assert int(beams.lengths[2].max()) > 2


def test_stopping_criteria_that_read_scores_are_refused() -> None:
    from transformers.generation.stopping_criteria import ConfidenceCriteria

    criterion: Any = ConfidenceCriteria
    criterion = criterion(0.5)
    with pytest.raises(ValueError, match="ConfidenceCriteria, which reads scores"):
        TransformersModel(made("gpt2"), **inputs("gpt2"), stopping_criteria=[criterion])

    def sure(ids: Tensor, scores: Any) -> Tensor:
        found: Tensor = scores[-1].max(-1).values > 0.9
        return found

    model = TransformersModel(made("gpt2"), **inputs("gpt2"), stopping_criteria=[sure])
    with pytest.raises(ValueError, match=r"criterion sure failed .* scores=None"):
        search(model, 2, max_length=3)


@pytest.mark.parametrize("name", KINDS)
def test_dropout_is_off_while_a_model_in_training_is_searched(name: str) -> None:
    model, given = made(name), inputs(name)
    for module in model.modules():  # strong enough to be seen
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    model.config.attention_dropout = 0.5
    plain = search(TransformersModel(model, **given), 3, max_length=5, generator=0)
    model.train()
    frozen = next(m for m in model.modules() if isinstance(m, torch.nn.Embedding))
    frozen.eval()
    found = search(TransformersModel(model, **given), 3, max_length=5, generator=0)
    torch.testing.assert_close(found.log_prob, plain.log_prob, rtol=0, atol=1e-5)
    assert torch.equal(found.sequences, plain.sequences)
    assert model.training
    assert not frozen.training
    with pytest.raises(ValueError, match=r"call model\.eval\(\) before model\.generate"):
        model.generate(**given, custom_generate=cpsbs.generate, num_beams=3, max_new_tokens=5)


def test_a_part_of_a_model_in_training_is_noticed() -> None:
    model, given = made("gpt2"), inputs("gpt2")
    plain = search(TransformersModel(model, **given), 3, max_length=5, generator=0)
    model.transformer.h.train()
    found = search(TransformersModel(model, **given), 3, max_length=5, generator=0)
    assert torch.equal(found.sequences, plain.sequences)
    # A model in training goes through its ordinary forward pass, which rounds in another way.
    torch.testing.assert_close(found.log_prob, plain.log_prob, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_prompts_padded_on_the_right_are_refused(name: str) -> None:
    model = made(name)
    ids = torch.tensor([[3, 5, 7, 9], [4, 6, 0, 0]])
    mask = (ids != 0).long()
    with pytest.raises(ValueError, match="padded on the right in row 1"):
        TransformersModel(model, input_ids=ids, attention_mask=mask)
    with pytest.raises(ValueError, match="padded on the right in row 1"):
        TransformersModel(model, input_ids=ids)
    with pytest.raises(ValueError, match="padded on the right in row 1"):
        model.generate(
            ids, attention_mask=mask, custom_generate=cpsbs.generate, num_beams=3, max_new_tokens=3
        )
    # Where the token that pads also ends sequences, transformers does not take it for padding.
    model.generation_config.pad_token_id = model.config.pad_token_id = 1
    ends = torch.tensor([[3, 5, 7, 9], [4, 6, 1, 1]])
    with pytest.raises(ValueError, match="padded on the right in row 1"):
        TransformersModel(model, input_ids=ends)
    meant = TransformersModel(model, input_ids=ends, attention_mask=torch.ones_like(ends))
    assert len(search(meant, 2, max_length=2)) == 2
    only_ends = TransformersModel(model, input_ids=torch.tensor([[1], [1]]))
    assert len(search(only_ends, 2, max_length=2)) == 2


def test_padding_on_the_left_changes_nothing() -> None:
    model = made("llama")
    ids, mask = torch.tensor([[3, 5, 7, 9], [0, 0, 4, 6]]), torch.tensor([[1] * 4, [0, 0, 1, 1]])
    both = search(
        TransformersModel(model, input_ids=ids, attention_mask=mask), 3, max_length=4, generator=0
    )
    alone = search(
        TransformersModel(model, input_ids=ids[1:, 2:]),
        3,
        max_length=4,
        generator=cpsbs.split_seed(0, [1]),
    )
    torch.testing.assert_close(both.log_prob[1], alone.log_prob[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "marian"])
def test_an_empty_batch_is_refused(name: str) -> None:
    model, given = made(name), inputs(name, 0)
    with pytest.raises(ValueError, match="input_ids has no rows"):
        TransformersModel(model, **given)
    if name == "marian":
        return  # transformers itself runs the encoder on nothing, and fails
    with pytest.raises(ValueError, match="input_ids has no rows"):
        model.generate(**given, custom_generate=cpsbs.generate, num_beams=3, max_new_tokens=3)


class OwnModel:
    """A model of one's own that goes wrong after some steps."""

    sources, vocab_size, pad = 2, 6, 0
    eos: int | Sequence[int] = (0,)
    device = torch.device("cpu")

    def __init__(self, wrong: Callable[[Tensor], Any], after: int) -> None:
        self._wrong, self._left = wrong, after

    def start(self) -> Tensor:
        return self._scores(self.sources)

    def advance(self, parent: Tensor, token: Tensor) -> Tensor:
        return self._scores(len(parent))

    def _scores(self, rows: int) -> Tensor:
        scores = torch.arange(6.0).flip(0).neg().expand(rows, 6) / 3
        self._left -= 1
        found: Tensor = self._wrong(scores) if self._left < 0 else scores
        return found


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: x[:-1], r"it must be \[rows, V\]"),
        (lambda x: torch.cat([x, x[:1]]), r"it must be \[rows, V\]"),
        (lambda x: x[:, :-1], r"it must be \[rows, V\]"),
        (lambda x: torch.cat([x, x], dim=-1), r"it must be \[rows, V\]"),
        (lambda x: x[:, None], r"it must be \[rows, V\]"),
        (lambda x: x > -1, "floating-point"),
        (lambda x: x.long(), "floating-point"),
        (lambda x: x.to(torch.complex64), "floating-point"),
        (lambda x: x.to("meta"), "on meta"),
        (lambda x: x.tolist(), "must return a tensor"),
        (lambda x: None, "must return a tensor"),
    ],
)
def test_what_a_model_of_ones_own_returns_is_checked_at_every_step(
    wrong: Callable[[Tensor], Any], message: str, design: str, after: int
) -> None:
    call = "start" if after == 0 else "advance"
    with pytest.raises(ValueError, match=rf"model\.{call}\(\) returned .*{message}"):
        search(OwnModel(wrong, after), 3, design, max_length=6, generator=0)


@pytest.mark.parametrize(("eos", "lengths"), [(0, {1, 2, 3}), ([0, 5], {1, 2, 3}), ((), {3})])
def test_a_token_many_or_none_end_the_sequences_of_a_model_of_ones_own(
    eos: Any, lengths: set[int]
) -> None:
    model = OwnModel(lambda x: x, 99)
    model.eos = eos
    beams = search(model, 40, "gumbel-top-k", max_length=3, generator=0)
    assert set(beams.lengths.flatten().tolist()) == lengths
    ends = [eos] if isinstance(eos, int) else list(eos)
    for y, done in zip(beams.tokens(0), beams.finished[0].tolist(), strict=True):
        assert done == (y[-1] in ends)
        assert not set(y[:-1]) & set(ends)


def test_what_stops_returns_is_checked() -> None:
    class Stops(OwnModel):
        def stops(self, parent: Tensor, token: Tensor) -> Tensor:
            return torch.zeros(len(parent) + 1, dtype=torch.bool)

    with pytest.raises(ValueError, match=r"model\.stops\(\) returned"):
        search(Stops(lambda x: x, 99), 3, max_length=4, generator=0)


def test_a_later_beam_that_brings_nothing_new_is_estimated_from() -> None:
    """A tokenizer of transformers decodes no sequences to one empty text."""

    def decode(sequences: Any) -> list[str]:
        return [" ".join(map(str, y)) for y in sequences] or [""]

    table = cpsbs.TableModel({(): [0.2, 0.5, 0.3], (1,): [1, 0, 0], (2,): [1, 0, 0]}, eos=0)
    several = [search(table, 3, "stratified", max_length=2, generator=s) for s in range(3)]
    found = cpsbs.estimate(several, lambda text: len(text), decode=decode)
    assert float(found.value) == pytest.approx(0.2 * 1 + 0.8 * 3)
    with pytest.raises(ValueError, match="decode returned 1 texts for 3 sequences"):
        cpsbs.estimate(several[0], len, decode=lambda sequences: ["one"])


def test_a_default_device_changes_nothing_now_or_later() -> None:
    def found(k: int) -> cpsbs.Beams:
        model = FunctionModel(lambda x: torch.zeros(len(x), 50, device="cpu"), 50, 0)
        beams = search(model, k, "stratified", max_length=3, generator=0, joint=True, entropy=True)
        cpsbs.estimate(beams, len)
        return beams

    before = torch.get_default_device()
    try:
        torch.set_default_device("meta")
        inside = {design: found(k) for k, design in enumerate(DESIGNS, 17)}
        model = cpsbs.TableModel.random(4, 3)
        cpsbs.estimate(search(model, 3, "stratified", max_length=3), Entropy())
    finally:
        torch.set_default_device(before)
    for k, beams in enumerate(inside.values(), 17):
        assert torch.equal(beams.sequences, found(k).sequences)
