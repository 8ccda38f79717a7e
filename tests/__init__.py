"""Tests, laid out like src/cpsbs."""
