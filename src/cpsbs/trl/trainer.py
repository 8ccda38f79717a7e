"""``WeightedGRPOTrainer``: trl's trainer, whose advantages count each completion by its weight.

trl has no place for weights: it computes advantages inside the method that generates and scores,
with unweighted means of groups, and its extra fields of a rollout end in the reward functions. The
subclass lets that method run, and replaces the advantages in what it returns. From there on each
completion goes its own way through shuffling, splitting and accumulation, with K·w (f − b) as its
advantage, so that it does not matter where the others of its group are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpsbs.decisions.baselines import NAMES, baselines, has_own_baseline
from cpsbs.extras import required
from cpsbs.trl import checks
from cpsbs.trl.rollout import WEIGHT, Drawn, Rollout

required("trl", "trl")
from trl import GRPOTrainer  # noqa: E402

PROMPTS = "prompts"
"""The baseline that measures a prompt against the other prompts of the batch."""

CHOICES = ("auto", PROMPTS, *(name for name in NAMES if name not in ("auto", "cross")))
"""The baselines that have a name."""


class WeightedGRPOTrainer(GRPOTrainer):
    """A ``trl.GRPOTrainer`` for completions that a design draws, weighted so as to stay unbiased.

    With ``loss_type="luspo"`` the gradient of a step is −Σ w (f − b) ∇log p(y), averaged over
    prompts; with ``"dr_grpo"`` it is divided by ``max_completion_length``, a constant. Settings
    that would make it biased are refused, among them trl's defaults of ``loss_type`` and
    ``scale_rewards``. ``expected_reward`` among the metrics is the estimate of E f; trl's own
    ``reward`` is the plain mean over completions, which here has no meaning.

    Args:
        model: as for ``trl.GRPOTrainer``, as ``reward_funcs``, ``args`` and all that follow them.
        reward_funcs: the reward f, or several whose weighted sum is f.
        args: a ``trl.GRPOConfig``.
        rollout_func: how completions are drawn; ``Rollout()`` by default.
        baseline: what to subtract from the reward, which changes the variance of the gradient:

            - ``"prompts"``, the mean of the estimates of E f for the other prompts of the batch;
              unbiased, because prompts are drawn for independently;
            - ``"loo"``, leave one out, for designs that have it (see ``cpsbs.risk``); unbiased;
            - a number that was fixed before; unbiased;
            - ``"none"``; unbiased, and the variance is large;
            - ``"own"``, the weighted mean of the group; biased by the order of 1/K. For
              ``independent`` it is GRPO's own, which is (K − 1)/K times the unbiased gradient;
            - ``"auto"``: "loo" if the design has it, else "prompts".
        others: further arguments of ``trl.GRPOTrainer``.

    Raises:
        ValueError: if a setting would bias the gradient; while it trains, if what trl makes of the
            completions, of their log-probabilities or of the loss is not what it should be.
    """

    uses_weights = True
    """What ``Rollout`` asks before it draws."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *,
        rollout_func: Rollout | None = None,
        baseline: str | float = "auto",
        **others: Any,
    ) -> None:
        rollout = Rollout() if rollout_func is None else rollout_func
        if not isinstance(rollout, Rollout):
            raise ValueError(
                f"rollout_func is a {type(rollout).__name__}; it must be a cpsbs.trl.Rollout, "
                "whose completions have weights"
            )
        if isinstance(baseline, str) and baseline not in CHOICES:
            raise ValueError(
                f"baseline is {baseline!r}; it must be a number, or one of {', '.join(CHOICES)}"
            )
        if args is not None:  # before models of a reference or of rewards are loaded
            checks.check_settings(args)
        super().__init__(model, reward_funcs, args, **others)
        self.rollout_func = rollout
        self.baseline = baseline
        self._rewards: Tensor | None = None
        self._log_probs: Tensor | None = None
        checks.check_settings(self.args)
        checks.check_trainer(self, WEIGHT)

    def _forget(self) -> None:
        """Forget the latest rollout and its rewards, so that what is found later is new."""
        self.rollout_func.drawn, self._rewards = None, None

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Tensor:
        """Compute the rewards [N, functions] of all processes, and keep their weighted sums."""
        each: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        total = (each * self.reward_weights.to(each.device)).nansum(1)
        self._rewards = total.masked_fill(each.isnan().all(1), torch.nan)
        return each

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Generate and score as trl does, and put the weighted advantages in the place of its."""
        rollout: Rollout = self.rollout_func
        self._forget()
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        drawn, rewards = rollout.drawn, self._rewards
        if drawn is None or rewards is None:
            raise ValueError(
                "the trainer did not call rollout_func or the reward functions; this version of "
                "trl is not supported by cpsbs.trl"
            )
        checks.check_completions(output, drawn.tokens.flatten(0, 1), drawn.lengths.flatten())
        checks.check_rewards(rewards, drawn.beams.k)
        count = drawn.weight.numel()
        first = self.accelerator.process_index * count
        values = rewards[first : first + count].view_as(drawn.weight).to(drawn.weight)
        advantages = self._advantages(drawn, values).flatten().to(output["advantages"])
        output["advantages"] = advantages
        self._log_advantages(self.accelerator.gather(advantages))
        return output

    def _advantages(self, drawn: Drawn, values: Tensor) -> Tensor:
        """Return [B, K] K·w (f − b) for the rewards f [B, K]."""
        beams, weight = drawn.beams, drawn.weight
        values = torch.where(beams.present, values, 0.0)
        means = self.accelerator.gather((weight * values).sum(-1))
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["expected_reward"].append(means.mean().item())
        name = self.baseline
        if name == "auto":
            name = "loo" if has_own_baseline(beams) else PROMPTS
        if name == PROMPTS:
            first = self.accelerator.process_index * len(beams)
            offset = self._of_other_prompts(means)[first : first + len(beams), None]
        else:
            (offset,) = baselines([beams], [values], name)
        return beams.k * weight * (values - offset)

    def _of_other_prompts(self, means: Tensor) -> Tensor:
        """Return [B] for each prompt of all processes the mean over the others."""
        if len(means) < 2 and not self.model.training:
            return torch.zeros_like(means)  # nothing is learnt from an evaluation
        if len(means) < 2:
            raise ValueError(
                f"baseline is {self.baseline!r}, which measures a prompt against the others of a "
                "batch, but there is one; use more prompts in a rollout, or another baseline"
            )
        return (means.sum() - means) / (len(means) - 1)

    def _log_advantages(self, advantages: Tensor) -> None:
        """Replace the advantages that trl has noted for its table of completions."""
        noted = self._logs["advantages"]
        for _ in range(min(len(noted), len(advantages))):
            noted.pop()
        noted.extend(advantages.tolist())

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """Compute log-probabilities as trl does, and keep them for the check of the loss."""
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._log_probs = found[0].detach()
        return found

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Compute the loss as trl does, and check that its gradient is the weighted one."""
        loss: Tensor = super()._compute_loss(model, inputs)
        mask, advantages = inputs["completion_mask"], inputs["advantages"]
        given = inputs.get("sampling_per_token_logps")
        checks.check_log_prob(self._log_probs, given, mask, self.rollout_func.tolerance)
        self._log_probs = None  # the next loss must find its own
        divisor = len(advantages)
        if self.loss_type == "dr_grpo":
            divisor *= self.max_completion_length
        if self.model.training:
            divisor *= self.current_gradient_accumulation_steps
        checks.check_loss(loss.detach(), advantages * mask.sum(-1), divisor)
        return loss
