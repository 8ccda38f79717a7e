"""Takes several steps of the recursion at a time, where a backend can do so by itself.

A step of few hypotheses is some hundred short operations, each of which takes longer to call than
to compute. For some designs and models a backend has the whole step compiled. It then takes one
step after another until something happens that is left to the search: a source ends, the KV cache
must be compacted, or a design meets an unusual case. The result is what ``recursion.run`` would
have found step by step.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cpsbs.backends.base import Backend, CompiledDecoder, StepPlan, StepsTaken
from cpsbs.models.base import CompiledModel, SequenceModel
from cpsbs.randomness import Streams
from cpsbs.search.beams import Hypotheses
from cpsbs.search.settings import SearchSettings


def _is_changed(model: SequenceModel) -> bool:
    """Return whether a model may take steps in another way than the class it inherits from."""
    return "compiled_steps" not in vars(type(model)) or not {"advance", "stops"}.isdisjoint(
        getattr(model, "__dict__", ())
    )


@dataclass(frozen=True)
class SeveralSteps:
    """Takes steps of one search through its backend."""

    backend: Backend
    plan: StepPlan
    decoder: CompiledDecoder
    max_length: int

    @staticmethod
    def of(
        model: SequenceModel,
        settings: SearchSettings,
        backend: Backend,
        chunk_length: int,
        ends: Tensor,
    ) -> SeveralSteps | None:
        """Return an object that takes steps of a model that has advanced once; None if none can.

        Args:
            model: the model.
            settings: the settings of the search.
            backend: the backend of the search.
            chunk_length: the number of tokens in a chunk of the scores, after the first step.
            ends: the tokens that end a sequence.
        """
        design = settings.design
        # A subclass may select in another way than the class whose rule it inherits.
        rule = design.rule() if "rule" in vars(type(design)) else None
        joint = settings.joint and design.needs_joint
        more = joint or settings.entropy or settings.path or settings.nucleus is not None
        if rule is None or more or not isinstance(model, CompiledModel) or _is_changed(model):
            return None
        decoder = model.compiled_steps()
        if decoder is None:
            return None
        plan = StepPlan(
            rule=rule,
            k=settings.k,
            temperature=settings.temperature,
            vocab_size=model.vocab_size,
            chunk_length=chunk_length,
            power_sums=backend.power_sums(design.power_sums),
            ends=ends,
            pad=model.pad,
        )
        return SeveralSteps(backend, plan, decoder, settings.max_length)

    def take(
        self, beam: Hypotheses, scores: Tensor, streams: Streams, number: int
    ) -> StepsTaken | None:
        """Take steps that extend the hypotheses, the first of which has this number.

        See ``Backend.take_steps``.
        """
        if beam.joint is not None or not self.decoder.suits(beam.token.numel()):
            return None
        given = (self.plan, self.decoder, beam, scores, streams, self.max_length - number)
        return self.backend.take_steps(*given)
