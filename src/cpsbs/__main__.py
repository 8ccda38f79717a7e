"""``cpsbs`` and ``python -m cpsbs``: the command line, or how to get it."""

from __future__ import annotations

import io
import os
import sys

from cpsbs.extras import required


def main() -> None:
    """Run a command."""
    try:
        required("typer", "cli")
        required("rich", "cli")
    except ImportError as error:
        sys.exit(f"error: {error}")
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started this
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    try:
        from cpsbs.cli import run
    except KeyboardInterrupt:
        sys.exit(130)
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.isatty():
        sys.stdout.reconfigure(encoding="utf-8")  # as JSON is, whatever the locale
    run()


if __name__ == "__main__":
    main()
