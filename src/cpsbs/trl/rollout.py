"""The rollout function: K completions of every prompt, drawn by a design, with their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cpsbs.backends import backend_for
from cpsbs.decisions.risk import TOLERANCE, checked_log_probs, weights_of
from cpsbs.designs import DEFAULT_DESIGN, Design, design_named
from cpsbs.estimation.forcing import token_scores
from cpsbs.models.transformers.adapter import TransformersModel
from cpsbs.randomness import Streams
from cpsbs.search.api import search
from cpsbs.search.beams import Beams
from cpsbs.trl.checks import check_room, first_of_groups

WEIGHT = "weight"
"""The name of the extra field that reaches the reward functions."""


@dataclass(frozen=True)
class Drawn:
    """What a rollout drew for the B prompts of a process, K completions for each."""

    beams: Beams
    """The completions; places stay empty where a prompt has fewer than K."""
    weight: Tensor
    """[B, K] w of every completion; zero in empty places."""
    token_log_prob: Tensor
    """[B, K, T] log p of every token, by teacher forcing; zero after the end."""

    @property
    def place(self) -> Tensor:
        """[B, K] which completion fills a place: its own, or the first one in an empty place.

        The trainer needs K completions of every prompt. One that fills a gap has no weight.
        """
        own = torch.arange(self.beams.k, device=self.weight.device).expand_as(self.weight)
        return torch.where(self.beams.present, own, 0)

    @property
    def lengths(self) -> Tensor:
        """[B, K] the numbers of tokens, with gaps filled."""
        return self.beams.lengths.gather(1, self.place)

    @property
    def tokens(self) -> Tensor:
        """[B, K, T] the tokens, with gaps filled."""
        return _filled(self.beams.sequences, self.place)


class Rollout:
    """Draws K completions of every prompt for a ``WeightedGRPOTrainer``, as its ``rollout_func``.

    K, the temperature and the largest number of tokens are the trainer's ``num_generations``,
    ``temperature`` and ``max_completion_length``. Random numbers come from torch's generator, which
    the trainer seeds, differently in every process, and keeps in its checkpoints. The reward
    functions get the weights as ``weight``.

    Args:
        design: how the completions are drawn, by name or as an object; one that has weights.
        joint: whether to keep joint inclusion probabilities, as ``baseline="loo"`` needs them with
            ``conditional-poisson``.
        tolerance: by how many nats a token log-probabilities may differ between the search, a
            forward pass over what it found, and the trainer's loss.
    """

    def __init__(
        self,
        design: str | Design = DEFAULT_DESIGN,
        *,
        joint: bool = False,
        tolerance: float = TOLERANCE,
    ) -> None:
        self.design = design_named(design)
        self.joint = joint
        self.tolerance = tolerance
        self.drawn: Drawn | None = None
        """What the latest call drew."""

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Return completions as trl wants them: one for each prompt, which it has repeated.

        Args:
            prompts: the prompts of this process, each ``num_generations`` times in a row.
            trainer: the trainer, which must be a ``WeightedGRPOTrainer``.

        Raises:
            ValueError: if the trainer would not use the weights, if the prompts do not come in
                groups, if the design has no weights, or if a completion's log-probability is not
                the same in the search and in a forward pass.
        """
        if not getattr(trainer, "uses_weights", False):
            raise ValueError(
                f"trainer is a {type(trainer).__name__}, which would count all completions alike, "
                "though their weights differ; it must be a cpsbs.trl.WeightedGRPOTrainer"
            )
        k = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        tokens, _, of_images = trainer._tokenize_prompts(first_of_groups(prompts, k))
        if of_images:
            raise ValueError(
                f"prompts come with {', '.join(of_images)}; a rollout draws from tokens alone"
            )
        with torch.no_grad():
            self.drawn = self._draw(tokens, k, trainer)
        return _as_lists(self.drawn, tokens)

    def _draw(self, tokens: list[list[int]], k: int, trainer: Any) -> Drawn:
        """Return K completions of every prompt, under the trainer's model as it is now."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        check_room(model, tokens, trainer.max_completion_length)
        device, pad = model.device, trainer.processing_class.pad_token_id
        rows = [torch.tensor(row, device=device) for row in tokens]
        policy = TransformersModel(
            model,
            input_ids=pad_sequence(rows, True, pad, padding_side="left"),
            attention_mask=pad_sequence(
                [torch.ones_like(row) for row in rows], True, 0, padding_side="left"
            ),
            eos_token_id=trainer.eos_token_ids,
            pad_token_id=pad,
        )
        seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
        first = trainer.accelerator.process_index * len(tokens)
        numbers = range(first, first + len(tokens))
        beams = search(
            policy,
            k,
            self.design,
            max_length=trainer.max_completion_length,
            temperature=trainer.temperature,
            generator=Streams.split(seed, numbers, device, backend_for(device)),
            joint=self.joint,
        )
        each = token_scores(policy, beams).log_prob
        checked_log_probs([beams], each.sum(-1), moved=False, tolerance=self.tolerance)
        return Drawn(beams, weights_of(beams), each)


def _as_lists(drawn: Drawn, prompts: list[list[int]]) -> dict[str, Any]:
    """Return what a rollout function returns, completion by completion."""
    count = drawn.beams.k
    lengths = drawn.lengths.flatten().tolist()
    ids = drawn.tokens.flatten(0, 1).tolist()
    log_probs = _filled(drawn.token_log_prob, drawn.place).flatten(0, 1).tolist()
    return {
        "prompt_ids": [row for row in prompts for _ in range(count)],
        "completion_ids": [row[:n] for row, n in zip(ids, lengths, strict=True)],
        "logprobs": [row[:n] for row, n in zip(log_probs, lengths, strict=True)],
        WEIGHT: drawn.weight.flatten().tolist(),
    }


def _filled(value: Tensor, place: Tensor) -> Tensor:
    """Return [B, K, T] the rows of a tensor [B, K, T] in given places [B, K]."""
    return value.gather(1, place[..., None].expand(-1, -1, value.shape[-1]))
