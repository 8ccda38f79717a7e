"""``cpsbs`` and ``python -m cpsbs``: the command line, or how to get it."""

from __future__ import annotations

import sys

from cpsbs.extras import required


def main() -> None:
    """Run a command."""
    try:
        required("typer", "cli")
        required("rich", "cli")
    except ImportError as error:
        sys.exit(f"error: {error}")
    from cpsbs.cli import run

    run()


if __name__ == "__main__":
    main()
