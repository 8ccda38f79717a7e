"""trl's trainer follows the weighted gradient, and what would bias it is refused."""

from __future__ import annotations

import copy
import importlib.util
import tempfile
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import cpsbs
import cpsbs.trl
from cpsbs.models.transformers.adapter import TransformersModel
from cpsbs.trl import Drawn, Rollout, checks
from examples import trl_toy
from examples.adding import PROMPTS, make_model, make_tokenizer, read_sums
from tests.models import tiny

TOKENIZER = make_tokenizer()
K, PROMPTS_A_STEP, LONGEST = 4, 3, 4
FACTOR = {"dr_grpo": 1 / LONGEST, "luspo": 1.0}
"""What the trainer's gradient is multiplied by."""

pytestmark = pytest.mark.filterwarnings("default")  # those of trl's imports are not ours
installed = importlib.util.find_spec("trl") is not None
needs_trl = pytest.mark.skipif(not installed, reason="needs the extra trl")


def digits(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs between most completions: the number of digits, and the last one."""
    return [len(y.split()) + float(y.split()[-1] == "7" if y.split() else 0) for y in completions]


@cache
def _gpt2() -> Any:
    return read_sums(make_model(TOKENIZER), TOKENIZER, 0.4)


def gpt2() -> Any:
    """A model that has learnt enough for completions to differ in probability."""
    return copy.deepcopy(_gpt2())


def tiny_llama() -> Any:
    """A model with relative positions."""
    torch.manual_seed(0)
    model = tiny.llama(len(TOKENIZER))
    model.generation_config.eos_token_id = TOKENIZER.eos_token_id
    return model


def make(
    rollout: Any = None,
    *,
    model: Any = None,
    reward: Any = digits,
    prompts: Any = None,
    baseline: Any = "auto",
    columns: Any = None,
    kind: Any = None,
    **settings: Any,
) -> Any:
    """A trainer for one step of gradient descent, without an adaptive optimiser."""
    import datasets
    import trl

    chosen = {
        "output_dir": tempfile.gettempdir(),
        "num_generations": K,
        "per_device_train_batch_size": K * PROMPTS_A_STEP,
        "max_completion_length": LONGEST,
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "max_steps": 1,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    prompts = PROMPTS if prompts is None else prompts
    own = {} if kind else {"baseline": baseline}
    return (kind or cpsbs.trl.WeightedGRPOTrainer)(
        model=gpt2() if model is None else model,
        args=trl.GRPOConfig(**{**chosen, **settings}),
        reward_funcs=reward,
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts, **(columns or {})}),
        processing_class=TOKENIZER,
        rollout_func=rollout,
        **own,
    )


def moved(trainer: Any) -> tuple[Any, dict[str, Tensor]]:
    """Train; return the model as it was before, and by how much each parameter has moved."""
    before = copy.deepcopy(trainer.model)
    del before.forward  # trl's
    trainer.train()
    pairs = zip(before.named_parameters(), trainer.model.parameters(), strict=True)
    return before.eval(), {name: (new - old).detach() for (name, old), new in pairs}


def of_risk(model: Any, trainer: Any, baseline: Any) -> dict[str, Tensor]:
    """The gradient of ``cpsbs.risk`` for what the trainer has drawn."""
    beams = trainer.rollout_func.drawn.beams
    texts = beams.decode(lambda y: TOKENIZER.batch_decode(y, skip_special_tokens=True))
    values = torch.zeros_like(beams.log_prob)
    for b, own in enumerate(texts):
        values[b, : len(own)] = torch.tensor(digits(own))
    if baseline == "prompts":
        means = (torch.where(beams.present, beams.log_weight.exp(), 0.0) * values).sum(-1)
        baseline = torch.stack([means[means != m].mean() for m in means])
    log_p = cpsbs.log_prob(policy(model, drawn_prompts(trainer)), beams)
    value = cpsbs.risk(beams, values, log_p, baseline).mean()
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(value, parameters, allow_unused=True), strict=True))


def drawn_prompts(trainer: Any) -> list[str]:
    """The prompts of the latest rollout, once each."""
    return list(trainer._logs["prompt"])[:: trainer.num_generations]


def policy(model: Any, prompts: list[str]) -> TransformersModel:
    data = TOKENIZER(prompts, return_tensors="pt")
    ends = {"eos_token_id": TOKENIZER.eos_token_id, "pad_token_id": TOKENIZER.pad_token_id}
    return TransformersModel(model, **data, **ends)


@needs_trl
@pytest.mark.parametrize(
    ("design", "baseline", "settings"),
    [
        ("stratified", "prompts", {}),
        ("stratified", "none", {"loss_type": "luspo"}),
        ("stratified", "own", {"loss_type": "luspo", "importance_sampling_level": "sequence"}),
        ("stratified", 1.5, {"importance_sampling_level": "sequence", "temperature": 0.7}),
        ("gumbel-top-k", "loo", {"temperature": 1.5}),
        ("independent", "loo", {}),
    ],
)
@pytest.mark.parametrize("passes", [1, 2])
def test_a_step_follows_the_gradient_of_the_risk(
    design: str, baseline: Any, settings: dict[str, Any], passes: int
) -> None:
    """Also where a group is shuffled and split over passes of gradient accumulation."""
    rows = K * (PROMPTS_A_STEP + 1) // passes
    trainer = make(
        Rollout(design),
        baseline=baseline,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=passes,
        **settings,
    )
    before, change = moved(trainer)
    weight = trainer.rollout_func.drawn.weight
    assert len(weight) == PROMPTS_A_STEP + 1
    assert design == "independent" or float(weight.max()) > 2 * float(weight.min())
    factor = FACTOR[trainer.loss_type]
    compared = 0
    for name, gradient in of_risk(before, trainer, baseline).items():
        if gradient is not None:
            assert torch.allclose(change[name], factor * gradient, rtol=1e-3, atol=1e-6), name
            compared += int(bool((gradient.abs() > 1e-3).any()))
    assert compared > 5


@needs_trl
def test_independent_completions_have_the_advantages_of_grpo() -> None:
    trainer = make(Rollout("independent"), baseline="own")
    rows = [{"prompt": PROMPTS[i // K]} for i in range(2 * K)]
    torch.manual_seed(3)
    ours = trainer._generate_and_score_completions(copy.deepcopy(rows))
    torch.manual_seed(3)
    theirs = super(type(trainer), trainer)._generate_and_score_completions(copy.deepcopy(rows))
    assert torch.equal(ours["completion_ids"], theirs["completion_ids"])
    assert torch.allclose(ours["advantages"], theirs["advantages"], atol=1e-6)
    assert ours["advantages"].abs().max() > 0.1


@needs_trl
def test_a_prompt_with_fewer_than_k_completions_has_the_exact_gradient() -> None:
    """All tokens are drawn, with their probabilities as weights, and the gaps count nothing."""
    size = len(TOKENIZER) + 2
    settings = {"num_generations": size, "per_device_train_batch_size": 2 * size}
    trainer = make(baseline="none", max_completion_length=1, loss_type="luspo", **settings)
    before, change = moved(trainer)
    drawn = trainer.rollout_func.drawn
    assert drawn.beams.present.sum(-1).tolist() == [size - 2] * 2
    data = TOKENIZER(drawn_prompts(trainer), return_tensors="pt")
    p = before(**data).logits[:, -1].softmax(-1)
    texts = TOKENIZER.batch_decode(torch.arange(size - 2)[:, None], skip_special_tokens=True)
    exact = (p * torch.tensor(digits(texts))).sum(-1).mean()
    names, parameters = zip(*before.named_parameters(), strict=True)
    for name, gradient in zip(names, torch.autograd.grad(exact, parameters), strict=True):
        assert torch.allclose(change[name], gradient, rtol=1e-3, atol=1e-6), name


@needs_trl
def test_rewards_see_the_weights_and_the_expected_reward_is_weighted() -> None:
    seen: list[Any] = []

    def reward(completions: list[str], weight: list[float], **given: Any) -> list[float]:
        values = digits(completions)
        seen.append((torch.tensor(weight).view(-1, K), torch.tensor(values).view(-1, K)))
        return values

    trainer = make(reward=reward)
    trainer.train()
    ((weight, values),) = seen
    assert float(weight.max()) > 2 * float(weight.min())
    assert weight.sum(-1).allclose(torch.ones(PROMPTS_A_STEP))
    found = trainer.state.log_history[-1]["expected_reward"]
    assert found == pytest.approx(float((weight * values).sum(-1).mean()), abs=1e-5)
    noted = torch.tensor(list(trainer._logs["advantages"])).view(-1, K)
    means = (weight * values).sum(-1)
    others = (means.sum() - means) / (PROMPTS_A_STEP - 1)
    assert noted.allclose(K * weight * (values - others[:, None]), atol=1e-4)


@needs_trl
@pytest.mark.parametrize("design", ["stratified", "independent"])
def test_a_process_has_the_advantages_of_its_own_prompts(design: str) -> None:
    """Two processes, of which each knows the means of both."""
    trainer = make(Rollout(design))
    rows = [{"prompt": PROMPTS[i // K]} for i in range(4 * K)]
    trainer._generate_and_score_completions(rows)
    whole, values = trainer.rollout_func.drawn, torch.rand(4, K, dtype=torch.float64)
    expected = trainer._advantages(whole, values)
    means = (whole.weight * values).sum(-1)
    for process, own in enumerate((slice(0, 2), slice(2, 4))):
        part = Drawn(whole.beams[own], whole.weight[own], whole.token_log_prob[own])
        trainer.accelerator = SimpleNamespace(process_index=process, gather=lambda _: means)
        assert torch.allclose(trainer._advantages(part, values[own]), expected[own])


@needs_trl
def test_conversations_and_evaluation_work() -> None:
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    talks = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return digits([y[0]["content"] for y in completions])

    trainer = make(reward=reward, prompts=talks, num_generations_eval=2)
    trainer.processing_class = trainer._tokenizer = tokenizer
    trainer.args.per_device_eval_batch_size = 4
    trainer.train()
    assert trainer.rollout_func.drawn.beams.k == K
    found = trainer.evaluate(trainer.train_dataset.select(range(4)))
    assert trainer.rollout_func.drawn.beams.k == 2
    assert found["eval_expected_reward"] > 0


@needs_trl
def test_prompts_of_different_lengths_need_relative_positions() -> None:
    prompts = ["1 + 2 =", "1 + 2 + 3 + 4 ="] * 4
    make(model=tiny_llama(), prompts=prompts, baseline=0.0).train()
    with pytest.raises(ValueError, match=r"log p of a completion is .* absolute positions"):
        make(prompts=prompts, baseline=0.0).train()


WRONG = {
    "loss_type": "dapo",
    "scale_rewards": "group",
    "multi_objective_aggregation": "normalize_then_sum",
    "num_iterations": 2,
    "entropy_coef": 0.1,
    "use_adaptive_entropy": True,
    "top_entropy_quantile": 0.5,
    "mask_truncated_completions": True,
    "off_policy_mask_threshold": 0.5,
    "delta": 4.0,
    "top_p": 0.9,
    "top_k": 50,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "generation_kwargs": {"num_beams": 2},
    "beta": 0.04,
    "use_vllm": True,
    "steps_per_generation": 2,
}


@needs_trl
@pytest.mark.parametrize("name", WRONG)
def test_a_setting_that_would_bias_the_gradient_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is .* must "):
        make(**{name: WRONG[name]})


def test_every_setting_is_tested() -> None:
    assert set(checks.UNBIASED) <= set(WRONG)


@needs_trl
@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("rollout_func is a function; it must be", {"rollout": digits}),
        ("baseline is 'cross'; it must be", {"baseline": "cross"}),
        ("disable_dropout is False", {"dropout": 0.1}),
        ("train_dataset has a column 'weight'", {"columns": {"weight": [1.0] * len(PROMPTS)}}),
        ("has no inclusion probabilities", {"rollout": Rollout("top-k")}),
        ("measures a prompt against the others", {"per_device_train_batch_size": K}),
        ("the reward is nan for completion 0 of prompt 0", {"reward": lambda **_: [None] * 12}),
        ("max_completion_length is 16, and a prompt has 4", {"max_completion_length": 16}),
        ("baseline is 'loo', but", {"baseline": "loo"}),
    ],
)
def test_what_cannot_be_right_is_refused(message: str, change: dict[str, Any]) -> None:
    given = dict(change)
    model = gpt2()
    model.transformer.drop.p = given.pop("dropout", 0.0)
    with pytest.raises(ValueError, match=message):
        make(model=model, **given).train()


@needs_trl
def test_trls_defaults_of_precision_are_within_the_tolerance() -> None:
    make(bf16=True, gradient_checkpointing=True).train()


@needs_trl
def test_dropout_may_be_disabled() -> None:
    model = gpt2()
    model.transformer.drop.p = 0.1
    make(model=model, disable_dropout=True).train()


@needs_trl
def test_trls_own_trainer_is_refused() -> None:
    import trl

    with pytest.raises(ValueError, match="trainer is a GRPOTrainer, which would count all"):
        make(Rollout(), kind=trl.GRPOTrainer).train()


@needs_trl
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", 0.5, "log p of a completion is"),  # the loss keeps the first one
        ("loss_type", "dapo", "the trainer's loss is"),
        ("entropy_coef", 0.1, "the trainer's loss is"),
        ("mask_truncated_completions", True, "the trainer has completions of"),
    ],
)
def test_a_trainer_that_is_changed_later_is_noticed(name: str, value: Any, message: str) -> None:
    trainer = make(max_completion_length=2 if name.startswith("mask") else LONGEST)
    setattr(trainer, name, value)
    trainer._entropy_bonus_enabled = name == "entropy_coef"
    with pytest.raises(ValueError, match=message):
        trainer.train()


@needs_trl
def test_the_example_learns() -> None:
    model = read_sums(make_model(TOKENIZER), TOKENIZER, 0.25)
    found = trl_toy.train(model, TOKENIZER, "stratified", steps=60)
    assert list(found) == [0, 12, 24, 36, 48, 60]
    assert found[60] > found[0] + 0.02


def test_the_example_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    trl_toy.main()
    assert capsys.readouterr().out == "trl is not installed\n"


@pytest.mark.skipif(installed, reason="trl is installed")
def test_without_trl_an_error_says_how_to_install_it() -> None:
    with pytest.raises(ImportError, match=r"pip install 'cpsbs\[trl\]'"):
        _ = cpsbs.trl.WeightedGRPOTrainer
