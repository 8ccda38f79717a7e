"""Tests of ``cpsbs.conditional_poisson``."""
