"""From beams to expectations, with their errors.

``estimate`` calls f and adds up its weighted values, ``result`` holds the result, ``weights`` reads
the weights and warns of bad ones, ``uncertainty`` says how far off the result may be, and
``bounds`` where it certainly lies. ``functions`` has ready-made functions f, ``inclusion``
estimates the inclusion probability of a sequence over all paths of the search, ``scoring`` scores
given sequences, and ``metrics`` compares texts.
"""

from cpsbs.estimation.weights import WeightWarning

__all__ = ["WeightWarning"]
