"""Utilities for ``cpsbs.mbr``; they live in ``cpsbs.decisions.utilities``."""

from cpsbs.decisions.utilities import Bleu, Chrf, EditSimilarity, ExactMatch, Function, Utility

__all__ = ["Bleu", "Chrf", "EditSimilarity", "ExactMatch", "Function", "Utility"]
