"""Tests of cpsbs.designs."""
