"""Tests of ``cpsbs.estimation``."""
