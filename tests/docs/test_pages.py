"""What the pages show is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs import pages

ROOT = Path(__file__).parents[2]
RUN = sorted(
    str(page.relative_to(ROOT))
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    if re.search(r"^ *```(python|sh)", page.read_text(encoding="utf-8"), re.MULTILINE)
)
LANGUAGES = {"python", "sh", "text", ""}


@pytest.mark.parametrize("page", RUN)
def test_a_page_runs_as_written(page: str, tmp_path: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    with pages.session(tmp_path):
        wrong = [pages.difference(printed, b.code) for b, printed in pages.outputs(text)]
    assert not list(filter(None, wrong)), "\n\n".join(filter(None, wrong))


def test_every_code_block_is_one_that_runs_or_an_output() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        found = pages.blocks(page.read_text(encoding="utf-8"))
        assert {block.info.split(" ")[0] for block in found} <= LANGUAGES, page


def test_an_output_may_differ_in_the_last_digits_only() -> None:
    shown = "E[x] = 0.123 ± 0.045 of 10"
    assert pages.difference("E[x] =  0.124 ± 0.046 of 10\n", shown) is None
    for printed in ("E[x] = 0.129 ± 0.045 of 10", "E[x] = 0.123 ± 0.045 of 11", "E[y] = 0.123"):
        assert pages.difference(printed, shown)


def test_links_of_the_readme_lead_somewhere() -> None:
    """Those of the other pages are checked when the site is built."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if not target.startswith("https://"):
            file, _, heading = target.partition("#")
            assert (ROOT / file).exists(), target
            if heading:
                titles = re.findall(r"^#+ (.*)$", (ROOT / file).read_text("utf-8"), re.MULTILINE)
                assert heading in {title.lower().replace(" ", "-") for title in titles}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 90


def test_the_page_on_architecture_names_files_that_exist() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`([\w/]+\.py)`", page))
    assert len(names) >= 12
    known = [str(file.relative_to(ROOT)) for file in (ROOT / "src/cpsbs").rglob("*.py")]
    for name in names:
        assert any(file.endswith(f"/{name}") for file in known), name


@pytest.mark.parametrize(("device", "most"), [("CPU", 12), ("GPU", 16)])
def test_the_walk_of_a_candidate_has_as_many_files_as_the_page_says(device: str, most: int) -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    (walk,) = re.findall(rf"^### On a {device}$(.*?)^### ", page, re.MULTILINE | re.DOTALL)
    steps = re.findall(r"^\d+\. `([\w/]+\.py)`", walk, re.MULTILINE)
    instead = re.findall(r"^- `([\w/]+\.py)`", walk, re.MULTILINE)
    own = ("targets", "stratified", "stratified_programs")
    theirs = [name for name in steps if Path(name).stem not in own] + instead
    assert len(set(steps)) == len(steps) == len(theirs) - len(instead) + 2
    assert len(set(theirs)) == len(theirs)
    assert max(len(steps), len(theirs)) <= most
    counts = f"{len(steps)} files with `stratified`, and {len(theirs)} with the paper's design"
    assert counts in walk
