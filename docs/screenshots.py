"""Takes the pictures of ``cpsbs explore`` in the documentation, from its example page."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parent))
from example_page import example_page

ASSETS = Path(__file__).parent / "assets"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def main() -> None:
    """Write explore-tree.png, explore-redraws.png and explore-step.png."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "example.html"
        file.write_text(example_page(), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        for name, scheme, prepare in (
            ("tree", "light", show_estimates),
            ("redraws", "light", show_redraws),
            ("step", "dark", show_step),
        ):
            page = browser.new_page(
                viewport={"width": 1360, "height": 780},
                color_scheme="dark" if scheme == "dark" else "light",
            )
            page.goto(file.as_uri())
            page.locator("#panel tbody tr").first.wait_for()
            prepare(page)
            page.wait_for_timeout(400)
            page.screenshot(path=ASSETS / f"explore-{name}.png")
            page.close()
        browser.close()


def only(page: Page, *designs: str) -> None:
    """Choose these designs and no others."""
    for name in designs:
        page.get_by_label(name).check()
    for box in page.locator("input[name=design]").all():
        if box.is_checked() and box.get_attribute("value") not in designs:
            box.uncheck()


def show_estimates(page: Page) -> None:
    """Show all designs on one tree, with their estimates."""
    page.locator("#tab-estimate").click()
    page.locator("#panel").evaluate("panel => panel.scrollTo(0, 330)")


def show_redraws(page: Page) -> None:
    """Show fifty seeds of one design."""
    only(page, "stratified")
    page.locator("select").first.select_option("2")
    page.locator("#redraw").click()


def show_step(page: Page) -> None:
    """Show the fourth step of the paper's design."""
    only(page, "conditional-poisson")
    page.locator("select").first.select_option("2")
    page.locator("#step").evaluate(
        "slider => { slider.value = 4; slider.dispatchEvent(new Event('input', {bubbles: true})) }"
    )


if __name__ == "__main__":
    main()
