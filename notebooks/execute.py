"""Executes the notebooks and stores them with their outputs.

    python notebooks/execute.py                       # both, in place
    python notebooks/execute.py --into FOLDER NAME    # one, as a copy

What would change from run to run without a reason is not stored: times of execution, the version of
Python, and who ran it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in HERE.glob("*.ipynb"))
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm would like to have ipywidgets
}
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(source: Path, target: Path) -> None:
    """Execute the notebook ``source`` from top to bottom and write it to ``target``.

    Raises:
        CellExecutionError: if a cell raises an error.
    """
    notebook: Any = nbformat.read(source, as_version=4)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},  # where cells would write files
        )
        client.execute(env={**os.environ, **QUIET, "IPYTHONDIR": folder})
    notebook.metadata = METADATA
    for cell in notebook.cells:
        cell.metadata = {}
    nbformat.write(notebook, target)  # type: ignore[no-untyped-call]


def main() -> None:
    """Execute the notebooks that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)}")
    parser.add_argument("--into", type=Path, default=HERE, help="the folder to write to")
    arguments = parser.parse_args()
    for name in arguments.names or NAMES:
        if name not in NAMES:
            parser.error(f"there is no notebook {name}; there are {', '.join(NAMES)}")
        execute(HERE / f"{name}.ipynb", arguments.into / f"{name}.ipynb")


if __name__ == "__main__":
    main()
