"""Ready-made functions for ``cpsbs.estimate``; they live in ``cpsbs.estimation.functions``."""

from cpsbs.estimation.functions import Bleu, Chrf, Entropy, KullbackLeibler, Length, Probability

__all__ = ["Bleu", "Chrf", "Entropy", "KullbackLeibler", "Length", "Probability"]
