"""Tests of ``cpsbs.search``."""
