"""The search: Y_t = K of (Y_{t−1} ∘ V), with a sampling design that selects the K.

``recursion`` is the recursion itself, in one file; ``settings`` says how to draw, ``state`` is
carried from step to step, and ``beams`` is the result. ``api`` has what callers use: it turns
models into ``requests``, and hands those that keep a fixed number of rows to ``scheduler``, which
runs the same steps with continuous batching.
"""

from cpsbs.search.api import search, search_each
from cpsbs.search.beams import Beams
from cpsbs.search.path import Offer, Step
from cpsbs.search.settings import SearchSettings

__all__ = ["Beams", "Offer", "SearchSettings", "Step", "search", "search_each"]
