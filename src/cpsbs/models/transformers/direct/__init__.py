"""Decoding steps on a CPU that run the layers of a known architecture directly."""
