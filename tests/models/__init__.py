"""Tests of cpsbs.models."""
