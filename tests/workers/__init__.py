"""Tests of ``cpsbs.workers``."""
