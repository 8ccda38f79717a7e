"""Groups of different completions, with their weights, for trl's ``GRPOTrainer``.

GRPO draws K independent completions y_1 … y_K of a prompt, and follows −(1/K) Σ A_i ∇log p(y_i).
Completions that a design draws without replacement are weighted instead:

    −Σ_i w_i (f_i − b_i) ∇log p(y_i) ,

which has the expectation −∇E f, where f is the reward, w = p/π, and b a baseline that keeps it
unbiased. The trainer averages over completions, so that K·w_i (f_i − b_i) must be the advantage of
y_i. With independent completions w = 1/K, and this is GRPO.

    trainer = cpsbs.trl.WeightedGRPOTrainer(
        model=model, args=args, reward_funcs=reward, train_dataset=dataset,
        processing_class=tokenizer, rollout_func=cpsbs.trl.Rollout("stratified"),
    )
    trainer.train()

``rollout`` draws, ``trainer`` sets the advantages, and ``checks`` refuses settings of the trainer
that would bias the gradient. Only ``trainer`` imports trl, when the class is first asked for.
"""

from typing import TYPE_CHECKING, Any

from cpsbs.trl.rollout import Drawn, Rollout

if TYPE_CHECKING:
    from cpsbs.trl.trainer import WeightedGRPOTrainer

__all__ = ["Drawn", "Rollout", "WeightedGRPOTrainer"]


def __getattr__(name: str) -> Any:
    """Import ``WeightedGRPOTrainer`` on first use, because it needs trl."""
    if name == "WeightedGRPOTrainer":
        from cpsbs.trl.trainer import WeightedGRPOTrainer

        return WeightedGRPOTrainer
    raise AttributeError(f"module 'cpsbs.trl' has no attribute {name!r}")
