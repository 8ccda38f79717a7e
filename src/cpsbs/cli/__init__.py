"""The command line.

``commands`` has the commands and ``options`` what they take. Texts are read and checked by
``inputs``, drawn for by ``draws``, in ``batches``; ``running`` puts the parts together, ``outputs``
writes and resumes, with ``stored`` to read and check what is on the disk. People see ``tables``,
through ``terminal``.
"""

from cpsbs.cli.commands import run

__all__ = ["run"]
