"""Tests of ``cpsbs.scores``."""
