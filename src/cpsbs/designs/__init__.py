"""Sampling designs: rules that pick K of N weighted candidates and know how likely each was."""
