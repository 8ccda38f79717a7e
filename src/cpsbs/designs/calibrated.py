"""Conditional Poisson sampling at every step, aimed at the targets of ``targets``.

The paper's weights are the odds of p. They forget how unlikely it was that a prefix survived, so
that the product of inclusion probabilities drifts away from the probability of the sequence, the
more so the more entropy the model has. Here the weights are the odds of min(1, c u), with u = p
over the product so far: the chance to go on depends on what a hypothesis counts in the estimate.
As in the paper, the odds only come close to the targets; the inclusion probabilities that are
reported are those of the weights, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpsbs.conditional_poisson.population import TooFewError
from cpsbs.conditional_poisson.weights import CandidateWeights
from cpsbs.designs.conditional_poisson import draw_poisson
from cpsbs.designs.drawing import DrawingDesign
from cpsbs.designs.targets import find_targets
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Candidates, Selection


@dataclass(frozen=True, repr=False, eq=False)
class Calibrated(DrawingDesign):
    """Conditional Poisson with the odds of min(1, c·u) as weights."""

    name = "calibrated"
    summary = "conditional Poisson aimed at inclusion in proportion to what a prefix counts"
    power_sums = 4
    needs_joint = True

    def draw(self, candidates: Candidates, k: int, streams: Streams, joint: bool) -> Selection:
        """A conditional Poisson sample with the odds of the targets as weights."""
        targets = find_targets(candidates, k)
        if bool(targets.few.any()):
            raise TooFewError(f"a source has no more than k = {k} candidates", targets.few)
        offset = targets.offset + targets.log_scale[:, None]
        weights = CandidateWeights(candidates.chunks, offset, True)
        return draw_poisson(weights, k, streams, joint, candidates.chunks.backend)
