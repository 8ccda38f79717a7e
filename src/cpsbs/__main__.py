"""Runs the command line (``cpsbs``, ``python -m cpsbs``), or says how to install it."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from cpsbs.extras import required


class ClosedOutput(io.TextIOBase):
    """A standard output that the parent process has closed: writing to it is an error."""

    def write(self, text: str) -> int:
        """Raise an error, so that no result is lost silently."""
        raise OSError("standard output is closed; redirect it, or use --output")


def main() -> None:
    """Run the command that the arguments name."""
    _open_standard_streams()
    _import_command_line()()


def _open_standard_streams() -> None:
    """Make sure that the file descriptors 0, 1 and 2 are the standard streams.

    Otherwise the next files to be opened would get these numbers, and what libraries write to
    standard error would end up in results.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115
    sys.stdout = sys.stdout or ClosedOutput()
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115


def _import_command_line() -> Callable[[], None]:
    """Import the command line and return its entry point.

    Importing takes seconds, during which Ctrl-C must end the process.
    """
    interruptible = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    if interruptible:
        # An exception inside the packages being imported would be swallowed or print a traceback.
        signal.signal(signal.SIGINT, _stop)
    try:
        required("typer", "cli")
        required("rich", "cli")
    except ImportError as error:
        sys.exit(f"error: {error}")
    from cpsbs.cli import run

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run


def _stop(*_: Any) -> None:
    os._exit(130)


if __name__ == "__main__":
    main()
