"""The one reading of a model's scores that every design starts from.

``reading`` cuts the tokens into chunks and keeps of each a maximum and a few sums; ``largest``
finds the largest of many numbers by way of chunks; ``memory`` holds scratch buffers.
"""
