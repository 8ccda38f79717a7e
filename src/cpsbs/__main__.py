"""``cpsbs`` and ``python -m cpsbs``: the command line, or how to get it."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from cpsbs.extras import required


class ClosedOutput(io.TextIOBase):
    """Standard output that was closed by whoever started the process: it takes nothing."""

    def write(self, text: str) -> int:
        """Refuse to lose a text."""
        raise OSError("standard output is closed; redirect it, or give --output")


def main() -> None:
    """Run a command."""
    _open_standard_streams()
    _imported()()


def _open_standard_streams() -> None:
    """Make sure that 0, 1 and 2 are the standard streams.

    Otherwise the next files to be opened would have these numbers, and what libraries write to
    standard error would end up in results.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115
    sys.stdout = sys.stdout or ClosedOutput()
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115


def _imported() -> Callable[[], None]:
    """Import the command line, which takes seconds in which Ctrl-C is to end the process."""
    listens = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    if listens:
        # An exception would be lost, or told at length, by the packages that are being imported.
        signal.signal(signal.SIGINT, _stop)
    try:
        required("typer", "cli")
        required("rich", "cli")
    except ImportError as error:
        sys.exit(f"error: {error}")
    from cpsbs.cli import run

    if listens:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run


def _stop(*_: Any) -> None:
    os._exit(130)


if __name__ == "__main__":
    main()
