"""The entropy over answers: its plug-in estimate, and bounds that are certain."""

from __future__ import annotations

import math
from collections.abc import Sequence


def plug_in_entropy(probabilities: Sequence[float]) -> float:
    """Return −Σ P log P of estimated probabilities, normalised, in nats."""
    total = math.fsum(probabilities)
    if not total > 0:
        return math.nan
    shares = [p / total for p in probabilities if p > 0]
    return 0.0 - math.fsum(p * math.log(p) for p in shares)


def entropy_bounds(
    lower: Sequence[float], unseen: float, possible: int | None
) -> tuple[float, float]:
    """Return bounds of the entropy of a distribution of which this much is known, in nats.

    Args:
        lower: the probability that each answer has at least.
        unseen: what is missing to one.
        possible: how many answers there can be, those of ``lower`` included; None if that is not
            known.
    """

    def entropy(distribution: Sequence[float]) -> float:
        return 0.0 - math.fsum(p * math.log(p) for p in distribution if p > 0)

    # The entropy is concave, so that it is smallest at a corner: all that is missing in one place.
    corners = [[*lower[:i], p + unseen, *lower[i + 1 :]] for i, p in enumerate(lower)]
    if possible is None or possible > len(lower):
        corners.append([*lower, unseen])
    least = min(map(entropy, corners))
    if unseen <= 0:
        return least, least
    if possible is None:
        return least, math.inf
    # It is largest where what is missing lifts the smallest probabilities to one level.
    filled = sorted([*lower, *[0.0] * (possible - len(lower))])
    for count in range(len(filled), 0, -1):
        level = (unseen + math.fsum(filled[:count])) / count
        if level >= filled[count - 1]:
            return least, entropy([level] * count + filled[count:])
    raise AssertionError("the first probability alone can always be lifted")
