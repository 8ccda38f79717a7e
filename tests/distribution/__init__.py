"""Tests of the wheel and the source distribution."""
