"""Run a command as on a terminal, and save what it shows as a picture.

    python examples/picture.py docs/demo.svg cpsbs demo

``make picture`` makes the pictures of the documentation this way.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 100


def shown_on_a_terminal(command: list[str]) -> str:
    """Return what the command writes when its output is a terminal."""
    ours, theirs = pty.openpty()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "COLUMNS": str(WIDTH), "TERM": "xterm-256color", "PATH": path}
    with subprocess.Popen(command, stdout=theirs, env=environment) as running:
        os.close(theirs)
        shown = bytearray()
        try:
            while data := os.read(ours, 65536):
                shown += data
        except OSError:
            pass  # the other end has closed
    os.close(ours)
    if running.returncode:
        sys.exit(f"{' '.join(command)} ended with status {running.returncode}")
    return shown.decode().replace("\r\n", "\n")


def main() -> None:
    """Write the picture to the file."""
    file, command = Path(sys.argv[1]), sys.argv[2:]
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    quoted = " ".join(f'"{word}"' if " " in word else word for word in command)
    console.print(Text("$ ", style="green") + Text(quoted, style="bold"), soft_wrap=True)
    console.print(Text.from_ansi(shown_on_a_terminal(command)))
    svg = console.export_svg(title=quoted)
    # A viewer must not have to fetch a font from elsewhere.
    svg = re.sub(r"@font-face\s*{.*?}\s*", "", svg, flags=re.DOTALL)
    file.write_text(svg.replace("Fira Code", "DejaVu Sans Mono"), encoding="utf-8")


if __name__ == "__main__":
    main()
