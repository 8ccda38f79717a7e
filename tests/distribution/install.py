"""Installs a wheel into fresh virtual environments and checks it there.

    python -m tests.distribution.install dist/cpsbs-*.whl

One environment gets the package alone and one the extra ``cli``; ``smoke.py`` does the checks. The
environments are removed afterwards.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("smoke.py")
ENVIRONMENTS = {"core": "", "cli": "[cli]"}


def check(wheel: Path, kind: str, constraints: Path) -> None:
    """Install the wheel with the extras of one kind of environment, and check it."""
    with tempfile.TemporaryDirectory(prefix=f"cpsbs-{kind}-") as folder:
        began = time.monotonic()
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / ("Scripts" if os.name == "nt" else "bin") / "python")
        requirement = f"{wheel.resolve()}{ENVIRONMENTS[kind]}"
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        subprocess.run(
            [*pip, "install", "--quiet", "-c", str(constraints), requirement], check=True
        )
        listed = subprocess.run(
            [*pip, "list", "--format=freeze"], check=True, capture_output=True, encoding="utf-8"
        )
        installed = time.monotonic() - began
        count = len(listed.stdout.splitlines())
        say(f"{wheel.name}{ENVIRONMENTS[kind]}: {count} packages, installed in {installed:.0f} s")
        # Isolated and from another folder, so that nothing of the working tree can be imported.
        subprocess.run([python, "-I", str(SMOKE), kind], check=True, cwd=folder)
        say(f"  checked in {time.monotonic() - began - installed:.0f} s")


def say(text: str) -> None:
    """Print a line at once, in order with what the other programs print."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Check the wheel in every kind of environment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    arguments = parser.parse_args()
    for kind in ENVIRONMENTS:
        check(arguments.wheel, kind, arguments.constraints.resolve())


if __name__ == "__main__":
    main()
