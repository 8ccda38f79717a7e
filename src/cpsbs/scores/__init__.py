"""Reads a model's scores once per step, and keeps what every design starts from.

``reading`` cuts the tokens into chunks and keeps the maximum and a few sums of each;
``candidates`` holds what a step of the search offers to a design, and what the design picks
from it. ``largest`` finds the largest of many numbers from the maxima of chunks, and ``memory``
keeps scratch buffers.
"""
