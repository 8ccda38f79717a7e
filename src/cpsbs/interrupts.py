"""Makes Ctrl-C end the command line quietly while it is still starting.

The package takes seconds to import, and ``cpsbs.__main__`` is reached only after that. If this
process is the command line, importing this module makes Ctrl-C end it without a traceback until
``__main__`` takes over. A program that imports the package as a library keeps its own handler.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import PurePath


def _is_command_line() -> bool:
    """Return whether the process was started as ``cpsbs`` or ``python -m cpsbs``."""
    as_module = sys.argv[:1] == ["-m"] and not {"cpsbs", "-mcpsbs"}.isdisjoint(sys.orig_argv)
    return as_module or PurePath(*sys.argv[:1]).stem == "cpsbs"


if _is_command_line() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
