"""What ``make dist`` builds is complete and works in empty environments. Needs a package index."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.distribution.install import ENVIRONMENTS, ROOT, check
from tests.distribution.smoke import EXTRAS

pytestmark = pytest.mark.slow

FOLDERS = ["src", "tests", "benchmarks", "docs", "examples", "hub", "notebooks", "training", "web"]
LARGEST = 26_000_000
"""Bytes of a wheel; all but half a million are the weights of the embedded model."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    """The only wheel; it is built from the source distribution, so that is complete too."""
    (found,) = built.glob("*.whl")
    return found


def test_the_wheel_holds_the_package_and_the_embedded_model_only(wheel: Path) -> None:
    assert wheel.stat().st_size < LARGEST
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"cpsbs"}
    source = ROOT / "src"
    kept = {
        str(path.relative_to(source))
        for path in (source / "cpsbs").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {name for name in names if name.startswith("cpsbs/")} == kept
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_source_distribution_has_all_that_the_tests_need(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.split("/", 1)[-1] for name in opened.getnames()}
    for name in ("Makefile", "README.md", "constraints.txt", "constraints-newest.txt"):
        assert name in names
    tracked = subprocess.run(
        ["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, encoding="utf-8"
    )
    if tracked.returncode:
        pytest.skip("this is not a git repository")
    wanted = {name for name in tracked.stdout.splitlines() if (ROOT / name).exists()}
    assert wanted <= names


def test_the_error_of_every_extra_is_checked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) | {"all", "dev", "docs"} >= set(project["optional-dependencies"])


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_the_wheel_works_in_an_empty_environment(wheel: Path, kind: str) -> None:
    check(wheel, kind, ROOT / "constraints.txt")
