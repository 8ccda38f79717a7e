"""Tables in the pages, and figures in their prose, are those of the last measurements."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import cpsbs
from benchmarks import (
    answers,
    bars,
    causal_bars,
    front,
    gradients,
    mbr,
    mbr_time,
    minimum_risk,
    more,
    page,
    streaming,
    utilities,
)
from benchmarks.estimators import tables
from benchmarks.tables import into_readme
from training.evaluate import shown

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"


DRAWN = ("CPSBS", "stratified")
"""The designs that the tables of engines on a GPU have at two temperatures"""


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def assert_shown(page: str, measured: Mapping[str, object], names: tuple[str, ...]) -> None:
    """Assert that a page has tables of these names, with what was measured in them."""
    text = read(page)
    for name in names:
        assert f"<!-- table: {name} -->\n|" in text, name
    assert into_readme(text, measured) == text


def test_a_draw_costs_what_the_page_says() -> None:
    assert_shown("docs/cost.md", results("conditional_poisson"), ("topk", "growth_n", "textbook"))


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/how-to/which-design.md"])
def test_the_first_page_promises_what_was_measured(page: str) -> None:
    found = results("front")
    assert all(of_set["repeats"] >= 100 for of_set in found.values())
    assert_shown(page, {"front": front.rows(found)}, ("front",))


def test_the_page_on_designs_shows_the_last_results() -> None:
    assert_shown("docs/how-to/which-design.md", tables(results("estimators")), ("summary",))


def test_the_page_on_more_shows_the_last_results() -> None:
    found = {"more": more.rows_of(results("more")["cells"])}
    assert_shown("docs/how-to/more.md", found, ("more",))


def test_the_page_on_exploring_shows_the_last_results() -> None:
    assert_shown("docs/how-to/explore.md", {"page": page.rows(results("page"))}, ("page",))


def test_the_page_on_estimators_shows_the_last_results() -> None:
    assert_shown("docs/estimation.md", tables(results("estimators")), ("rmse_BLEU",))


def test_the_page_on_answers_shows_the_last_results() -> None:
    found = results("answers")
    names = ("answers", "answer_entropy")
    assert_shown("docs/how-to/answers.md", answers.tables(found), names)
    for row in (*found["short"], *found["translation"]):
        assert row["truth"] < row["rmse"] / 2, row
        assert row["entropy_truth"] < row["entropy"] / 2, row


def test_the_page_on_gradients_shows_the_last_results() -> None:
    found = results("gradients")
    names = ("gradients", "gradients_peaked", "gradients_bias")
    assert_shown("docs/how-to/gradients.md", gradients.tables(found), names)
    page = read("docs/how-to/gradients.md")
    own = {
        (row["eta"], row["estimator"], row["k"]): (row["deviation"], row["bias"])
        for row in found["rows"]
    }
    for eta, name, said in (
        (-4, "RLOO", "RLOO has a standard deviation of {:.4f}"),
        (-4, "independent, b = E f", "a fixed baseline makes that {:.4f}"),
        (-4, "stratified, b = E f", "with the fixed baseline has {:.4f}"),
        (-4, "conditional Poisson, loo", '`baseline="loo"` {:.4f}'),
        (-4, "unordered set", "the unordered set estimator {:.4f}"),
        (0, "conditional Poisson, loo", "{:.3f} (conditional Poisson) against"),
        (0, "RLOO", "against {:.3f} (RLOO)"),
        (0, "stratified, cross", "hardly better than RLOO up to K = 4 ({:.3f})"),
        (0, "SBS, loo", "probabilities are equal ({:.2f}"),
    ):
        assert said.format(own[eta, name, 4][0]) in page, name
    loo, none = (own[-4, f"conditional Poisson{x}", 2][0] for x in (", loo", ""))
    assert f"({loo:.3f}, without a baseline {none:.4f})" in page
    lost = [100 * own[0, "stratified, own", k][1] / -found["truth"]["0"] for k in (2, 4)]
    assert f"({lost[0]:.0f}% at K = 2 and {lost[1]:.0f}% at K = 4" in page
    ratio = own[-4, "stratified, cross", 4][0] / own[-4, "stratified, b = E f", 4][0]
    assert f"it has {ratio:.1f} times the deviation" in page


def test_what_the_page_says_of_mbr_decoding() -> None:
    file = "docs/how-to/mbr.md"
    page, found = read(file), results("mbr_newstest2014")
    shown_tables = mbr.tables(found, "newstest2014")
    shown_tables |= mbr.tables(results("mbr_newstest2013"), "newstest2013")
    shown_tables |= mbr_time.tables(results("mbr_time")) | utilities.tables(results("utilities"))
    names = ("mbr_newstest2014", "mbr_newstest2014_gain", "mbr_newstest2013")
    assert_shown(file, shown_tables, (*names, "mbr_time", "utilities"))
    own = {(row["row"], row["size"]): row for row in found["rows"]}
    sizes = (8, 16, 32, 64, 128)
    best = own[mbr.BASELINE, 8]
    for size in (32, 64):
        row = own[mbr.DEFAULT, size]
        gain, loss = row["chrF"] - best["chrF"], best["BLEU"] - row["BLEU"]
        assert re.search(rf"gains {gain:.2f}(?: chrF)? and loses {loss:.2f}\b", page), size
    for size in (32, 64, 128):
        assert own[mbr.DEFAULT, size]["chrF − beam"][0] > 0.6
        for (name, other), row in own.items():
            if other == size and name != mbr.DEFAULT:
                low = row["chrF − default"][1]
                assert low <= 0, name
    weighted = "beam search, p-weighted"
    lead = [
        own[weighted, size]["BLEU"]
        - max(r["BLEU"] for (name, n), r in own.items() if n == size and name != weighted)
        for size in sizes
    ]
    assert f"at every size**, by {min(lead):.1f} to {max(lead):.1f}" in page
    lost = [-own["¼ beam + independent 0.7", size]["chrF − default"][0] for size in sizes]
    assert f"loses {min(lost):.2f} to {max(lost):.2f} chrF" in page
    for size, unit in ((8, (" chrF", " BLEU over the default")), (16, ("", ""))):
        adaptive, default = own["adaptive 0.7", size], own[mbr.DEFAULT, size]
        chrf, bleu = (adaptive[m] - default[m] for m in ("chrF", "BLEU"))
        assert f"with {size}, {chrf:.2f}{unit[0]} and {bleu:.2f}{unit[1]}" in page


def test_the_page_on_gradients_shows_minimum_risk_training() -> None:
    found, page = results("minimum_risk"), read("docs/how-to/gradients.md")
    assert_shown("docs/how-to/gradients.md", minimum_risk.tables(found), ("minimum_risk",))

    def mean(name: str, value: str) -> float:
        runs = found["methods"][name]
        if value == "spread":
            return float(statistics.mean(run["history"][0]["spread"] for run in runs))
        before = found["embedded"]["test"][value]
        return float(statistics.mean(run["test"][value] for run in runs) - before)

    noise = mean("stratified", "spread") / mean("RLOO", "spread")
    assert f"has {noise:.2f} times the standard deviation of RLOO's gradient" in page
    assert f"RLOO would need {noise**-2:.1f} times as many" in page
    assert (
        f"it has {mean('stratified, cross', 'spread') / mean('RLOO', 'spread'):.2f} times" in page
    )
    seconds = {
        name: statistics.mean(run["seconds_a_step"] for run in runs)
        for name, runs in found["methods"].items()
    }
    more_time = [
        100 * (seconds[name] / seconds["RLOO"] - 1) for name in ("stratified", "stratified, cross")
    ]
    assert f"a step takes {more_time[0]:.0f}% more time with `stratified`" in page
    assert f"and {more_time[1]:.0f}% more with two searches" in page
    gains = [f"{mean(name, 'BLEU'):.2f} for" for name in ("stratified", "RLOO")]
    assert f"by {gains[0]} `stratified` and {gains[1]} RLOO" in page


def test_the_model_card_shows_the_last_scores() -> None:
    scores = json.loads((ROOT / "training/results/scores.json").read_text())
    assert_shown("src/cpsbs/embedded/en-fr/README.md", {"scores": shown(scores)}, ("scores",))


def test_the_page_on_speed_shows_the_last_results() -> None:
    page = read("docs/speed.md")
    names = ("first", "first_before", "selection", "decoding", "weights", "corpus", "scaling")
    on_gpu = results("gpu")
    assert_shown("docs/speed.md", on_gpu, names)
    assert_shown("docs/speed.md", results("ablations"), ("growing", "logits"))
    assert [row["bytes more"] for row in on_gpu["leak"]] == [0]
    assert "not a byte more is allocated" in page
    ours = [
        row for row in on_gpu["decoding"] if row["what"] in ("conditional-poisson", "stratified")
    ]
    fast = [row["times as fast"] for row in ours]
    assert f"on an H200 is {min(fast):.1f} to {max(fast):.1f} times as fast" in page
    share = max(
        row["share of the selection"]
        for row in on_gpu["decoding"]
        if row["share of the selection"] != "-"
    )
    assert f"and at most {share:.3f} of a further step on a GPU" in page
    steps = {(row["shape"], row["what"]): row for row in on_gpu["weights"]}
    designs = ("conditional-poisson", "stratified")
    ms = [steps["1B", design]["ms a further step"] for design in designs]
    longer = [steps["7B", design]["times as long"] for design in designs]
    assert f"a 1B Llama takes {ms[0]:.2f} ms with CPSBS and {ms[1]:.2f} with `stratified`" in page
    assert f"takes {longer[0]:.2f} and {longer[1]:.2f} times as long as the reading" in page
    assert f"which it misses by {100 * (longer[0] / 1.5 - 1):.0f}%" in page
    compiled = steps["1B", "torch.compile, the model alone"]["ms a further step"]
    assert all(round(x / compiled, 1) == 0.5 for x in ms)
    now, before = (
        next(
            row["seconds for the first result"]
            for row in on_gpu[name]
            if row["design"] == "stratified" and row["kernels"] == "compiled now"
        )
        for name in ("first", "first_before")
    )
    assert f"comes {now:.2f} seconds after the model is loaded; once it was {before:.1f}" in page
    on_cpu = results("decoding")
    assert_shown("docs/speed.md", on_cpu, ("shares", "k5", "k20"))
    selection, reading = (max(row[x] for row in on_cpu["shares"]) for x in ("selection", "reading"))
    assert f"is at most {selection:.2f} of a search on a CPU" in page
    assert (
        f"at most {selection:.2f} of a search, and reading the scores takes at most {reading:.2f}"
        in page
    )
    copies = [row["copies"] for row in on_cpu["memory"] if row["design"] == "conditional-poisson"]
    assert f"at most {max(copies):.2f} times the memory of its scores" in page


def test_selections_on_a_gpu_take_what_the_page_says() -> None:
    page = read("docs/speed.md")
    sizes: dict[str, dict[str, dict[str, float]]] = {}
    for row in results("gpu")["selection"]:
        sizes.setdefault(row["scores"], {})[row["what"].removesuffix(", recorded")] = row
    first, second = sizes.values()
    for size in (first, second):
        ours = [size[name] for name in size if name not in ("copy", "topk", "log-softmax and topk")]
        assert max(row["time over topk"] for row in ours) < 0.333
        assert size["stratified"]["time over topk"] < 0.25
        assert size["top-k"]["ms"] <= 2 * size["copy"]["ms"]
    longer = [size["conditional-poisson"]["ms"] / size["copy"]["ms"] for size in (first, second)]
    said = f"takes {longer[0]:.2f} and {longer[1]:.2f} times as long as a copy"
    assert f"{said}: {first['conditional-poisson']['ms']:.3f} ms at the first size" in page
    misses = [
        [100 * (size[name]["ms"] / size["copy"]["ms"] / 2 - 1) for size in (first, second)]
        for name in ("stratified", "gumbel-top-k")
    ]
    assert misses[0][0] < 0
    assert f"`stratified` but for {misses[0][1]:.0f}% at the second" in page
    assert f"by {misses[1][0]:.0f}% at the first size and by {misses[1][1]:.0f}% at" in page
    assert first["conditional-poisson"]["ms"] < 0.15
    assert f"a selection of CPSBS takes {first['conditional-poisson']['ms']:.3f} ms (aim" in page


def test_the_page_on_speed_says_how_steps_grow() -> None:
    rows = results("growth")["growth_cpu"]
    page, ratios, proportional = read("docs/speed.md"), [], []
    for design in ("top-k", "conditional-poisson", "stratified"):
        by = {(row["grows"], row[row["grows"]]): row[design] for row in rows}
        ratios.append(by["vocabulary", 128_000] / by["vocabulary", 16_000])
        proportional.append(by["sources", 64] / by["sources", 32])
    assert f"takes {min(ratios):.1f} to {max(ratios):.1f} times as long" in page
    assert all(1.9 < ratio < 2.1 for ratio in proportional)


def test_the_page_on_gpus_tells_the_last_speeds() -> None:
    page, measured = read("docs/how-to/gpu.md"), results("gpu")
    fast = {(row["model"], row["what"]): row["times as fast"] for row in measured["decoding"]}
    models = ("MarianMTModel", "LlamaForCausalLM")
    marian, llama = (fast[name, "conditional-poisson"] for name in models)
    assert f"(`conditional-poisson`) is {marian:.1f} times as fast" in page
    assert f"and {llama:.1f} times for a model of the shape of a 1B Llama" in page
    marian, llama = (fast[name, "stratified"] for name in models)
    assert f"`stratified` takes longer for a step: {marian:.1f} and {llama:.1f} times" in page
    rates = {r["what"]: r["sentences a second"] for r in results("engines_cuda")["engines_cuda"]}
    speeds = [rates[f"{name}, τ = 1"] for name in DRAWN]
    ratio = speeds[0] / rates["transformers, beam search"]
    assert f"at {speeds[0]:,.0f} sentences a second, {ratio:.0f} times as fast as" in page
    assert f"and with `stratified` at {speeds[1]:,.0f}" in page


def test_what_the_page_says_of_its_tables() -> None:
    """Figures in the prose are those of the results."""
    page, rows = read("docs/estimation.md"), results("estimators")["rows"]
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

    sums = {
        row["sum_of_weights"] for row in rows if row["design"] == "calibrated" and row["k"] == 20
    }
    assert f"averaged {min(sums):.3f} to {max(sums):.3f} in every cell at K = 20" in page


def test_what_the_page_says_of_error_bars() -> None:
    measured = results("bars")
    page, rows = read("docs/estimation.md"), measured["rows"]
    assert_shown("docs/estimation.md", bars.tables(measured), ("bars_BLEU", "bars_event"))

    on_causal = causal_bars.tables(results("causal_bars"))
    assert_shown("docs/estimation.md", on_causal, ("causal_bars",))

    def share(design: str, sizes: tuple[int, ...]) -> str:
        found = [
            row["coverage"]
            for row in rows
            if row["design"] == design and row["f"] != "event" and row["k"] in sizes
        ]
        return f"{100 * min(found):.0f} to {100 * max(found):.0f}%"

    def widest(*functions: str) -> str:
        own = [row for row in rows if row["design"] == "stratified" and row["k"] >= 10]
        return f"{max(row['width'] for row in own if row['f'] in functions):.2f}"

    assert f"intervals cover {share('stratified', (10, 20))} for K ≥ 10" in page
    assert f"and {share('stratified', (5,))} for K = 5" in page
    assert f"at most {widest('BLEU', 'entropy', 'entropy RB')} times the real" in page
    assert f"it covers {share('SBS n.', (5, 10, 20))}" in page


def test_the_page_on_speed_shows_the_engines() -> None:
    page, measured = read("docs/speed.md"), results("engines_cpu")
    parameters = sum(x.numel() for x in cpsbs.load("en-fr", device="cpu").model.parameters())
    assert f"and {parameters / 1e6:.1f} million parameters" in page
    assert_shown("docs/speed.md", measured, ("engines_cpu",))
    rows, before = measured["engines_cpu"], results("engines_cpu_earlier")["engines_cpu"]
    ahead, ahead_before = (
        [r["over CTranslate2"] for r in run if r["what"].startswith(("cpsbs", "CPSBS", "strat"))]
        for run in (rows, before)
    )
    assert min(*ahead, *ahead_before) > 1
    assert f"{min(ahead):.2f} to {max(ahead):.2f} times as many sentences a second as with" in page
    assert f"gave ratios of {min(ahead_before):.2f} to {max(ahead_before):.2f}" in page
    beam = {(row["batch"], row["what"], row["weights"]): row for row in rows}
    eight = [
        beam["8", f"{name}, beam search", "float32"]["sentences a second"]
        for name in ("cpsbs", "transformers")
    ]
    assert f"Our beam search is {eight[0] / eight[1]:.1f} times as fast as transformers'" in page
    ours, exact = (beam["own", "cpsbs, beam search", weights] for weights in ("int8", "float32"))
    gap = abs(float(ours["BLEU"]) - float(beam["own", "CTranslate2, beam search", "int8"]["BLEU"]))
    assert f"differs by {gap:.2f} on all sentences" in page
    faster = ours["sentences a second"] / exact["sentences a second"]
    lost = float(exact["BLEU"]) - float(ours["BLEU"])
    assert f"is {faster:.1f} times as fast as float32" in page
    assert f"and {lost:.2f} BLEU lower" in page
    on_gpu = results("engines_cuda")
    assert_shown("docs/speed.md", on_gpu, ("engines_cuda", "engines_cuda_64"))
    own, few = (
        {row["what"]: row["over CTranslate2"] for row in on_gpu[name]}
        for name in ("engines_cuda", "engines_cuda_64")
    )
    cool, warm = ([own[f"{design}, τ = {t}"] for design in DRAWN] for t in (0.5, 1))
    assert f"{min(cool):.2f} to {max(cool):.2f} times as many sentences a second as CTrans" in page
    assert f"and {min(warm):.2f} to {max(warm):.2f} times as many at τ = 1" in page
    assert f"our beam search translates {own['cpsbs, beam search']:.2f} times as many" in page
    then = [few[f"{design}, τ = {t}"] for design in DRAWN for t in (0.5, 1)]
    assert f"translated {min(then):.2f} to {max(then):.2f} times as many with an earlier" in page
    theirs, *work = (row["over CTranslate2, processor time"] for row in on_gpu["engines_cuda"])
    assert theirs == 1 > max(work)
    faster = [own[f"stratified, τ = {t}"] > own[f"CPSBS, τ = {t}"] for t in (1, 0.5)]
    assert faster == [True, False]
    assert "it is faster than CPSBS at τ = 1 and slower at τ = 0.5" in page
    theirs, ours = on_gpu["cut_off"]["sentences a second"].values()
    said = f"had measured {theirs:,.0f} sentences a second for CTranslate2 and {ours:,.0f} for our"
    assert f"{said} beam search, {ours / theirs:.2f} times as many" in page


def test_streaming_costs_what_the_page_says() -> None:
    found = results("streaming")
    assert_shown("docs/how-to/command-line.md", streaming.tables(found), ("streaming",))
    assert found["costless"]["lines"] == 1_000_000
    early, late = (mb for _, mb in found["costless"]["peaks_mb"][1::2])
    assert late < 1.1 * early  # a quarter of the lines, and all of them
    own = found["model"]
    assert own["lines"] == 30_000
    assert own["processor_seconds"] < 1.1 * own["search_processor_seconds"]


def test_a_cluster_is_as_fast_as_the_page_says() -> None:
    assert_shown("docs/how-to/cluster.md", results("cluster"), ("cluster",))
