"""How smooth the page of ``cpsbs explore`` is with large trees: time to draw, and frames of a pan.

Frames are counted by the browser itself while the mouse drags the tree across the window, at two
scales: as the page opens, and with the whole tree in view. A screen shows 60 a second. Needs
Chromium; without a GPU the canvas is drawn by the processor, so that this is a lower bound.

    python -m benchmarks.page --json benchmarks/results/page.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import Page, sync_playwright

from benchmarks.tables import into_readme, table
from cpsbs import FunctionModel, search
from cpsbs.designs import design_named
from cpsbs.explore.page import html
from cpsbs.explore.record import Document
from cpsbs.explore.scene import Scene

SHAPES = [(10, 30), (20, 60), (100, 128)]
VOCABULARY = 2000
REPEATS = 3
FRAMES = 120
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]

PAN = """async ({ frames }) => {
  const canvas = document.querySelector("canvas");
  const { left, top, width, height } = canvas.getBoundingClientRect();
  const at = (type, x, y) => new MouseEvent(type, {
    bubbles: true, view: window, clientX: left + x, clientY: top + y, button: 0, buttons: 1 });
  canvas.dispatchEvent(at("mousedown", width / 2, height / 2));
  const times = [];
  for (let i = 0; i <= frames; i++) {
    window.dispatchEvent(at("mousemove", width / 2 + 80 * Math.sin(i / 9), height / 2 + 2 * i));
    times.push(await new Promise(requestAnimationFrame));
  }
  window.dispatchEvent(at("mouseup", width / 2, height / 2));
  return times.slice(1).map((time, i) => time - times[i]);
}"""


def large_run(k: int, steps: int) -> dict[str, Any]:
    """Return a document with a beam of K sequences that all have the same number of steps."""
    generator = torch.Generator().manual_seed(0)
    table = 2.5 * torch.randn((64, VOCABULARY), generator=generator)
    table[:, 0] = -1e4  # the end, which never comes

    def scores(prefixes: torch.Tensor) -> torch.Tensor:
        latest = prefixes[:, -2:].sum(-1) + 7 * prefixes.shape[-1]
        return table[latest % len(table)]

    beams = search(
        FunctionModel(scores, VOCABULARY, 0), k, max_length=steps, generator=0, path=True
    )
    scene = Scene("A large tree.", k=k, max_length=steps, function="length")
    document = Document(
        "none",
        scene.text,
        scene,
        (0,),
        lambda tokens: {token: f" word{token}" for token in tokens},
        lambda rows: [" ".join(f"word{token}" for token in row) for row in rows],
    )
    document.add_run(beams, design_named("stratified"), [float(steps)] * k, None)
    return document.as_record()


def measure(page: Page, file: Path) -> dict[str, float]:
    """Return milliseconds until the tree is drawn, and of the frames of a pan."""
    page.goto(file.as_uri())
    page.locator("#panel tbody tr").first.wait_for()
    drawn = float(page.evaluate("performance.now()"))
    near = page.evaluate(PAN, {"frames": FRAMES})
    page.get_by_role("button", name="Fit").click()
    far = page.evaluate(PAN, {"frames": FRAMES})
    return {
        "drawn": drawn,
        "near": statistics.median(near),
        "near_slowest": sorted(near)[int(0.95 * len(near))],
        "far": statistics.median(far),
        "far_slowest": sorted(far)[int(0.95 * len(far))],
    }


def results() -> list[dict[str, Any]]:
    """Return the medians of some repeats for every shape."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    found = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        for k, steps in SHAPES:
            document = large_run(k, steps)
            shown = {"model": "none", "load": {}, "seed": 0, "chosen": ["stratified"]}
            content = html({"mode": "file", **shown, "documents": [document]})
            file = Path(folder) / "tree.html"
            file.write_text(content, encoding="utf-8")
            runs = []
            for _ in range(REPEATS):
                page = browser.new_page(viewport={"width": 1400, "height": 900})
                runs.append(measure(page, file))
                page.close()
            row = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            nodes = sum(len(step["token"]) for step in document["runs"][0]["steps"])
            found.append(
                {"k": k, "steps": steps, "nodes": nodes, "bytes": len(content.encode()), **row}
            )
        browser.close()
    return found


def rows(found: list[dict[str, Any]]) -> list[dict[str, object]]:
    """Return the results as a table for people."""
    return [
        {
            "K": row["k"],
            "steps": row["steps"],
            "tokens kept": row["nodes"],
            "file, MB": round(row["bytes"] / 1e6, 2),
            "until drawn, ms": round(row["drawn"]),
            "frame, ms": round(row["near"], 1),
            "slowest 5%": round(row["near_slowest"], 1),
            "whole tree in view, ms": round(row["far"], 1),
            "slowest 5% there": round(row["far_slowest"], 1),
        }
        for row in found
    ]


def main() -> None:
    """Measure, print, and store the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="store the results in this file")
    parser.add_argument("--readme", type=Path, help="update the table in this page")
    options = parser.parse_args()
    found = results()
    print(table(rows(found)))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.readme:
        text = options.readme.read_text(encoding="utf-8")
        options.readme.write_text(into_readme(text, {"page": rows(found)}), encoding="utf-8")


if __name__ == "__main__":
    main()
