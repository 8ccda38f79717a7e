"""Tests of cpsbs.explore."""
