"""Trains the embedded English–French model; README.md says how to run it."""
