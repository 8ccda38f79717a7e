"""From beams to expectations, with their errors.

``estimate`` adds up weighted values of f, ``result`` holds the result, ``values`` calls f,
``weights`` reads the weights and warns of bad ones, and ``uncertainty`` says how far off the result
may be. ``functions`` has ready-made functions f, ``inclusion`` estimates the inclusion probability
of a sequence over all paths of the search, ``scoring`` scores given sequences, and ``metrics``
compares texts.
"""

from cpsbs.estimation.weights import WeightWarning

__all__ = ["WeightWarning"]
