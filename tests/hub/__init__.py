"""Tests of the folder hub."""
