"""What the README shows is what the code does."""

from __future__ import annotations

import contextlib
import io
import json
import re
import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.estimators import tables
from benchmarks.tables import into_readme
from cpsbs.cli.commands import app
from training.evaluate import shown

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_examples_run_as_written() -> None:
    found = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.DOTALL)
    assert len(found) == README.count("```python") >= 2
    names: dict[str, object] = {}
    for code, expected in found:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "README.md", "exec"), names)
        assert printed.getvalue() == expected


def test_the_demonstration_prints_what_is_shown() -> None:
    """On a terminal of 80 columns; another processor may round the numbers in another way."""
    result = CliRunner().invoke(app, ["demo"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    printed = "\n".join(line.rstrip() for line in result.stdout.splitlines())
    (expected,) = re.findall(r"```text\n(.*?)\n```", README, re.DOTALL)
    number = r"\d+\.\d+(?:e-\d+)?"
    assert re.sub(number, "#", printed.strip()) == re.sub(number, "#", expected)
    found, wanted = ([float(x) for x in re.findall(number, text)] for text in (printed, expected))
    assert found == pytest.approx(wanted, rel=2e-2)


def test_the_tables_are_those_of_the_last_benchmark() -> None:
    results = json.loads((ROOT / "benchmarks/results/conditional_poisson.json").read_text())
    assert "<!-- table: topk -->\n|" in README
    assert into_readme(README, results) == README
    estimators = tables(json.loads((ROOT / "benchmarks/results/estimators.json").read_text()))
    page = (ROOT / "docs/estimation.md").read_text()
    assert "<!-- table: summary -->\n|" in README
    assert "<!-- table: rmse_BLEU -->\n|" in page
    assert into_readme(README, estimators) == README
    assert into_readme(page, estimators) == page
    card = (ROOT / "src/cpsbs/embedded/en-fr/README.md").read_text()
    scores = json.loads((ROOT / "training/results/scores.json").read_text())
    assert "<!-- table: scores -->\n|" in card
    assert into_readme(card, {"scores": shown(scores)}) == card


def test_the_page_on_speed_shows_the_last_results() -> None:
    page = (ROOT / "docs/speed.md").read_text()
    results = json.loads((ROOT / "benchmarks/results/gpu.json").read_text())
    for name in ("selection", "decoding", "corpus", "leak", "scaling"):
        assert f"<!-- table: {name} -->\n|" in page
    assert into_readme(page, results) == page
    fast = {(row["model"], row["what"]): row["times as fast"] for row in results["decoding"]}
    marian, llama = (
        fast[name, "conditional-poisson"] for name in ("MarianMTModel", "LlamaForCausalLM")
    )
    assert f"CPSBS is {marian:.1f} times as fast" in README
    assert f"and {llama:.1f} times for a model of the shape of a 1B Llama" in README
    corpus = {(row["batch"], row["what"]): row for row in results["corpus"]}
    best = corpus[1024, "conditional-poisson, refilled by halves"]
    speed, ratio = best["sentences a second"], best["over transformers' best"]
    told = f"at {speed:,.0f} sentences a second, {ratio:.0f} times transformers' best"
    assert told in README
    on_cpu = json.loads((ROOT / "benchmarks/results/decoding.json").read_text())
    assert "<!-- table: shares -->\n|" in page
    assert into_readme(page, {"shares": on_cpu["shares"]}) == page
    few, many = ({row["design"]: row["ratio"] for row in on_cpu[part]} for part in ("k5", "k20"))
    design = "conditional-poisson"
    assert f"CPSBS took {few[design]:.2f} times as long" in page
    assert f"at K = 5 and {many[design]:.2f} at K = 20" in page
    design = "gumbel-top-k"
    assert f"stochastic beam search {few[design]:.2f} and {many[design]:.2f}" in page


def test_what_the_page_says_of_its_tables() -> None:
    """Figures in the prose are those of the results."""
    page = (ROOT / "docs/estimation.md").read_text()
    rows = json.loads((ROOT / "benchmarks/results/estimators.json").read_text())["rows"]
    cells: dict[tuple[str, float, int], dict[str, float]] = {}
    for row in rows:
        name = row["design"] + (" n." if row["normalized"] else "")
        cells.setdefault((row["f"], row["temperature"], row["k"]), {})[name] = row["rmse"]
    ratios = []
    for cell in cells.values():
        others = [x for n, x in cell.items() if not n.startswith(("stratified", "calibrated"))]
        ratios.append(cell["stratified"] / min(others))
    ahead = sum(ratio <= 1 for ratio in ratios)
    assert f"than every baseline in {ahead} of these {len(ratios)} cells" in page
    assert f"is {statistics.median(ratios):.2f})" in page
    for said, baseline in {
        "Monte Carlo": "independent",
        "arithmetic sampling": "arithmetic",
        "normalised SBS": "gumbel-top-k n.",
        "normalised CPSBS": "conditional-poisson n.",
        "sum-and-sample": "sum-and-sample",
    }.items():
        better = sum(cell["stratified"] < cell[baseline] for cell in cells.values())
        assert re.search(rf"of {said} in {better}\b", page), said

    def covered(design: str, k: tuple[int, ...], temperature: float) -> str:
        found = [
            row["coverage"]
            for row in rows
            if row["design"] == design
            and not row["normalized"]
            and row["f"] != "entropy RB"
            and row["k"] in k
            and row["temperature"] >= temperature
        ]
        return f"{100 * min(found):.0f} to {100 * max(found):.0f}%"

    assert f"`stratified` covers {covered('stratified', (10, 20), 0.1)} for K ≥ 10" in page
    assert f"{covered('stratified', (5,), 0.2)} for K = 5 from τ = 0.2" in page
    assert f"not normalised: {covered('gumbel-top-k', (10, 20), 0.1)} for K ≥ 10" in page
    sums = {
        row["sum_of_weights"] for row in rows if row["design"] == "calibrated" and row["k"] == 20
    }
    assert f"averaged {min(sums):.3f} to {max(sums):.3f} in every cell at K = 20" in page


def test_the_layout_names_what_exists() -> None:
    found = re.search(r"```\n(src/cpsbs/\n.*?)```", README, re.DOTALL)
    assert found
    names = re.findall(r"\b[\w/]+(?:\.py|/)(?=[\s,;])", found[1])
    assert len(names) >= 16
    for name in names:
        places = [ROOT / name, ROOT / "src/cpsbs" / name, *ROOT.glob(f"*/{name}")]
        places += ROOT.glob(f"src/cpsbs/*/{name}")
        assert any(place.exists() for place in places), name
