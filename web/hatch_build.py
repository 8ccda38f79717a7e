"""Builds the page when a wheel or a source distribution is made, if Node.js is there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WITHOUT = (
    "npm is not installed, so the page of cpsbs explore is left out; install Node.js 20 or later "
    "and build again to have it"
)


class PageBuildHook(BuildHookInterface[Any]):
    """Runs ``npm ci`` and ``npm run build`` unless the page is built already."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the page; an editable installation leaves that to ``make page``."""
        web = Path(self.root) / "web"
        built = Path(self.root) / "src" / "cpsbs" / "explore" / "static" / "page.js"
        if version == "editable" or built.exists():
            return
        npm = shutil.which("npm")
        if npm is None:
            self.app.display_warning(WITHOUT)
            return
        for command in (["ci", "--no-audit", "--no-fund"], ["run", "build"]):
            subprocess.run([npm, *command], cwd=web, check=True)
