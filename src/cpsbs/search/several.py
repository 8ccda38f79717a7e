"""Several steps of the recursion at a time, where a backend can take them by itself.

A step of few hypotheses is some hundred short operations, each of which takes longer to call than
to compute. A backend may have all of a step compiled, for some designs and models. It then takes
one step after the other until something happens that is the search's to do: a source ends, the
model's memory is to be rearranged, or what a design meets is out of the ordinary. What it returns
is what ``recursion.run`` would have found step by step.
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
    """Return whether a model may do something else in a step than the class it inherits from."""
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
        """Return what takes steps of a model that has advanced once; None where that cannot be.

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
