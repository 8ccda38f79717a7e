"""Ready-made functions for ``cpsbs.estimate``; they live in ``cpsbs.estimation.functions``."""

from cpsbs.estimation.functions import Bleu, Entropy, KullbackLeibler, Length, Probability

__all__ = ["Bleu", "Entropy", "KullbackLeibler", "Length", "Probability"]
