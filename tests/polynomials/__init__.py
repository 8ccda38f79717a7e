"""Tests of cpsbs.polynomials."""
