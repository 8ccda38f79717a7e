"""Tests of ``cpsbs.backends``."""
