"""The recursion Y_t = K of (Y_{t−1} ∘ V), with a sampling design in it.

``recursion`` has what callers use. Everything in it is written for many sources at once: ``loop``
goes through the steps, ``step`` is one of them, ``state`` and ``trail`` are carried from one to the
next, ``extension`` turns what a design has picked into new hypotheses, ``rows`` says which of the
model's rows belong to which hypotheses, and ``beams`` is the result.
"""

from cpsbs.search.beams import Beams, Step
from cpsbs.search.recursion import search, search_each

__all__ = ["Beams", "Step", "search", "search_each"]
