"""A server with the embedded model, and pages that must neither fail nor reach out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

TEXT = "A man rides a bicycle."
REFERENCE = "Un homme fait du vélo."
# Its two spaces in a row must be seen too.
HOSTILE = '<img src=x onerror="document.title=1">  <script>document.title=2</script>'

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

Opener = Callable[..., Page]

expect.set_options(timeout=30_000)  # a machine of two cores may be busy with other things


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("Chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """The address of ``cpsbs explore``, started as a user would."""
    command = [sys.executable, "-m", "cpsbs", "explore", TEXT, HOSTILE, "-r", REFERENCE, "-r", "x"]
    options = ["-k", "6", "--temperature", "0.5", "--no-browser", "--device", "cpu"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, *options], stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stderr is not None
        said = []
        for line in server.stderr:
            said.append(line)
            if found := re.search(r"Serving (http://\S+)", line):
                break
        else:
            raise AssertionError(f"the server did not start: {''.join(said)}")
        yield found[1]
        server.terminate()
        server.communicate(timeout=30)


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page as a file, with two designs and twelve seeds."""
    made = tmp_path_factory.mktemp("page") / "tree.html"
    command = [sys.executable, "-m", "cpsbs", "explore", TEXT, "-r", REFERENCE, "--html", str(made)]
    options = ["-k", "6", "--temperature", "0.5", "--redraws", "12", "--exact", "--device", "cpu"]
    designs = ["--design", "stratified", "--design", "independent"]
    subprocess.run([*command, *options, *designs], check=True, capture_output=True)
    return made


@pytest.fixture
def opened(browser: Browser) -> Iterator[Opener]:
    """Opens pages; what they log, fail at or ask of others is found when the test ends."""
    problems: list[str] = []
    contexts = []

    def open_page(address: str, width: int = 1400, height: int = 900, **options: object) -> Page:
        size = {"width": width, "height": height}
        context = browser.new_context(viewport=size, **options)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        own = urlsplit(address).netloc

        def watch(url: str) -> None:
            if urlsplit(url).scheme in ("http", "https") and urlsplit(url).netloc != own:
                problems.append(f"asked for {url}")

        page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(f"dialog {dialog.message}"))
        page.on("request", lambda request: watch(request.url))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
