"""The command line.

``commands`` defines the commands and ``options`` the options that they share. ``inputs`` reads and
checks the texts, ``batches`` groups them, and ``draws`` draws sequences for each batch; ``running``
puts these parts together. ``outputs`` writes results and resumes interrupted runs, with ``stored``
to read and check the files on the disk. ``tables`` and ``terminal`` show results to people.
``reproduce`` is the command that runs the paper's experiments.
"""

from cpsbs.cli.commands import run

__all__ = ["run"]
