"""The one reading of a model's scores that every design starts from.

``reading`` cuts the tokens into chunks and keeps of each its maximum and a few sums;
``candidates`` holds what a step of the search offers to a design, and what the design picks of it.
``largest`` finds the largest of many numbers by way of chunks, and ``memory`` keeps scratch
buffers.
"""
