"""Loops that are compiled for a CPU, where torch has no fast call for them."""
