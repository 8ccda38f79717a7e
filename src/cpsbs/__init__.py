"""Conditional Poisson stochastic beam search."""

from cpsbs.designs.conditional_poisson import ConditionalPoisson

__version__ = "0.1.0"

__all__ = ["ConditionalPoisson", "__version__"]
