"""Conditional Poisson sampling at every step, with weights that account for the steps before.

The paper's design weights a candidate by the odds of its probability p. That ignores how unlikely
it was that its prefix survived the steps before, so that the product Π_t π_t of inclusion
probabilities drifts away from what the probability of the sequence deserves, the more so the more
entropy the model has; weights w = p / Π_t π_t then vary wildly.

Here a candidate is weighted by the odds of its target inclusion probability min(1, c·u), where
u = p / Π π is its weight in the estimate if it were kept for certain (see ``targets``). A
hypothesis is thus kept with a probability in proportion to its contribution. As with the paper's
design, odds make the inclusion probabilities only approximately equal to the targets. The reported
probabilities are those of the conditional Poisson design that was drawn from, exactly, so that the
weights p / Π_t π_t are unbiased.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cpsbs.conditional_poisson.population import TooFewError
from cpsbs.conditional_poisson.weights import CandidateWeights
from cpsbs.designs.base import DrawingDesign
from cpsbs.designs.conditional_poisson import draw_poisson, poisson_log_inclusion
from cpsbs.designs.targets import find_targets
from cpsbs.randomness import Streams
from cpsbs.scores.candidates import Candidates, Selection


@dataclass(frozen=True, repr=False, eq=False)
class Calibrated(DrawingDesign):
    """Conditional Poisson sampling with the odds of min(1, c·u) as weights."""

    name = "calibrated"
    summary = "conditional Poisson sampling aimed at inclusion in proportion to weight"
    power_sums = 4
    needs_joint = True

    def draw(self, candidates: Candidates, k: int, streams: Streams, joint: bool) -> Selection:
        """Draw a conditional Poisson sample with the odds of the targets as weights."""
        weights = _target_odds(candidates, k)
        return draw_poisson(weights, k, streams, joint, candidates.chunks.backend)

    def drawn_log_inclusion(self, candidates: Candidates, k: int, index: Tensor) -> Tensor:
        """Return [B, n] log π, exactly."""
        return poisson_log_inclusion(_target_odds(candidates, k), k, index)


def _target_odds(candidates: Candidates, k: int) -> CandidateWeights:
    """Return the odds of the targets as weights.

    Raises:
        TooFewError: if some sources have no more than K candidates.
    """
    targets = find_targets(candidates, k)
    if bool(targets.few.any()):
        raise TooFewError(f"a source has no more than k = {k} candidates", targets.few)
    offset = targets.offset + targets.log_scale[:, None]
    return CandidateWeights(candidates.chunks, offset, True)
