"""The page as people use it: look, step, draw again, force a token, compare, save and load."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Locator, Page, Request, expect

import cpsbs
from cpsbs.explore.explorer import Explorer
from cpsbs.explore.scene import Scene
from tests.browser.conftest import HOSTILE, REFERENCE, TEXT, Opener

pytestmark = pytest.mark.browser

AXE = Path("web/node_modules/axe-core/axe.min.js")
INK = """canvas => {
  const { width, height } = canvas;
  const pixels = canvas.getContext("2d").getImageData(0, 0, width, height).data;
  let ink = 0;
  for (let i = 0; i < pixels.length; i += 4)
    if (Math.abs(pixels[i] - pixels[0]) + Math.abs(pixels[i + 1] - pixels[1]) > 60) ink++;
  return ink;
}"""


@pytest.fixture(scope="module")
def model() -> Iterator[cpsbs.TextModel]:
    """The model of the server, with as many threads as that has: one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield cpsbs.load("en-fr", device="cpu")
    torch.set_num_threads(threads)


def ready(page: Page) -> Page:
    """Wait until the first beam is there."""
    expect(page.locator("#panel tbody tr").first).to_be_visible(timeout=60_000)
    expect(page.get_by_role("button", name="Stop")).to_have_count(0, timeout=60_000)
    return page


def tab(page: Page, name: str) -> Locator:
    page.get_by_role("tab", name=name).click()
    return page.locator("#panel")


def sequences(page: Page) -> list[str]:
    """The texts of the table, character by character; inner_text may collapse white space."""
    rows = tab(page, "Sequences").locator("tbody tr td:last-child")
    return [text.removesuffix(" …") for text in rows.all_text_contents()]


def drawn(page: Page, change: Callable[[], object], **asked: Any) -> Page:
    """Make a change, and wait until the server has drawn what it asks for and the page shows it."""

    def asks(request: Request) -> bool:
        if not request.url.endswith("/api/draw"):
            return False
        given: dict[str, Any] = request.post_data_json or {}
        return all({**given["scene"], **given}[name] == value for name, value in asked.items())

    with page.expect_request(asks, timeout=60_000):
        change()
    return ready(page)


def slide(page: Page, name: str, value: int) -> None:
    page.locator(f"#{name}").evaluate(
        "(slider, value) => { slider.value = value;"
        " slider.dispatchEvent(new Event('input', {bubbles: true})) }",
        value,
    )


def spoken(page: Page) -> str:
    return page.locator("#spoken").inner_text()


def expected_texts(model: cpsbs.TextModel, design: str, **options: Any) -> list[str]:
    given = {"k": 6, "temperature": 0.5, "seed": 0, **options}
    beams = model.beams([TEXT], design=design, **given)
    return list(dict.fromkeys(model.texts(beams)[0]))


def test_it_opens_and_draws_the_beam_that_python_draws(
    opened: Opener, address: str, model: cpsbs.TextModel
) -> None:
    page = ready(opened(address))
    assert sequences(page) == expected_texts(model, "stratified")
    # The canvas is drawn with the next frame.
    page.wait_for_function(f"({INK})(document.querySelector('canvas')) > 5000", timeout=60_000)
    assert "6 sequences in" in spoken(page)
    assert page.title() == "cpsbs explore"


def test_the_numbers_in_the_table_are_those_of_the_beam(
    opened: Opener, address: str, model: cpsbs.TextModel
) -> None:
    page = ready(opened(address))
    beams = model.beams([TEXT], 6, temperature=0.5, seed=0)
    rows = beams.to_rows(model.texts(beams))
    shown = tab(page, "Sequences").locator("tbody tr").all()
    for line, row in zip(shown, rows, strict=True):
        p, pi, weight, bleu = (float(cell) for cell in line.locator("td").all_inner_texts()[:4])
        assert p == pytest.approx(row["p"], rel=0.01)
        assert pi == pytest.approx(row["pi"], rel=0.01)
        assert weight == pytest.approx(row["weight"], rel=0.01)
        assert bleu == pytest.approx(cpsbs.sentence_bleu(row["text"], REFERENCE), rel=0.01)


def test_a_step_shows_its_candidates_and_what_became_of_them(opened: Opener, address: str) -> None:
    page = ready(opened(address))
    slide(page, "step", 3)
    panel = page.locator("#panel")
    expect(panel.locator("h2")).to_contain_text("stratified, step 3")
    outcomes = panel.locator("tbody tr td:nth-child(3)").all_inner_texts()
    assert "heavy: certain" in outcomes
    assert "light: not picked" in outcomes
    assert sum(outcome != "light: not picked" for outcome in outcomes) == 6
    assert re.search(r"[\d.<]+% was dropped here", panel.inner_text())
    page.keyboard.press("Tab")
    page.locator("canvas").focus()
    page.keyboard.press("]")
    expect(panel.locator("h2")).to_contain_text("step 4")


def test_keys_move_along_the_tree_and_the_page_says_where(opened: Opener, address: str) -> None:
    page = ready(opened(address))
    page.locator("canvas").focus()
    page.keyboard.press("ArrowRight")
    assert "step 1" in spoken(page)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "step 3" in spoken(page)
    assert "kept by stratified" in spoken(page)
    here = spoken(page)
    page.keyboard.press("ArrowDown")
    assert spoken(page) != here
    page.keyboard.press("ArrowLeft")
    assert "step 2" in spoken(page)
    page.keyboard.press("Escape")
    assert "sequences in" in spoken(page)


def test_a_click_selects_a_token(opened: Opener, address: str) -> None:
    page = ready(opened(address))
    page.locator("canvas").focus()
    page.keyboard.press("0")
    found = False
    box = page.locator("canvas").bounding_box()
    assert box is not None
    for y in range(60, int(box["height"]), 6):
        page.mouse.click(box["x"] + 60, box["y"] + y)
        if "step" in spoken(page) and "sequences in" not in spoken(page):
            found = True
            break
    assert found
    expect(page.get_by_role("region", name="Selected prefix")).to_be_visible()


def test_many_seeds_show_that_pi_is_the_frequency(
    opened: Opener, address: str, model: cpsbs.TextModel
) -> None:
    page = ready(opened(address))
    page.get_by_label("Number of seeds").fill("60")
    page.locator("#redraw").click()
    panel = page.locator("#panel")
    expect(panel.locator("h2")).to_contain_text("60 runs", timeout=90_000)
    expect(page.get_by_role("button", name="Stop")).to_have_count(0, timeout=60_000)
    document = (explorer := Explorer(model)).document(
        Scene(TEXT, 6, 0.5, None, 128, "bleu", REFERENCE)
    )
    explorer.redraw(document, "stratified", range(60))
    record = document.as_record()
    drawn = [y for run in record["runs"] for y in run["y"]]
    best = max(set(drawn), key=drawn.count)
    share, _, _, text = panel.locator("tbody tr").first.locator("td").all_inner_texts()
    assert float(share) == pytest.approx(drawn.count(best) / 60, abs=1e-3)
    assert text == record["outputs"][best]["text"]
    # Within 5 standard errors of a share of 60 runs; seeds are fixed.
    for row in panel.locator("tbody tr").all()[:10]:
        observed, expected = (float(cell) for cell in row.locator("td").all_inner_texts()[:2])
        error = (max(expected * (1 - expected), 0.02) / 60) ** 0.5
        assert abs(observed - expected) <= 5 * error
    assert page.locator("#overlay").is_checked()


def test_forcing_a_token_draws_a_branch_that_begins_with_it(opened: Opener, address: str) -> None:
    page = ready(opened(address))
    page.locator("canvas").focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    inspector = page.get_by_role("region", name="Selected prefix")
    dropped = inspector.locator("tr.dropped").first
    token = dropped.locator("td.text").first.text_content() or ""
    before = set(sequences(page))
    dropped.get_by_role("button", name=f"Force {token} and branch").click()
    branch = page.get_by_role("list", name="Branches").locator("li")
    expect(branch).to_have_count(1, timeout=60_000)
    expect(page.get_by_role("button", name="Stop")).to_have_count(0, timeout=60_000)
    prefix = re.search("“(.*)”", branch.text_content() or "", re.DOTALL)
    assert prefix is not None
    assert prefix[1].endswith(token.strip("·"))
    new = set(sequences(page)) - before
    assert len(new) == 6
    assert all(text.startswith(prefix[1]) for text in new)
    branch.get_by_role("button").click()
    expect(branch).to_have_count(0)
    assert set(sequences(page)) == before


def test_the_page_says_why_a_token_was_dropped(opened: Opener, address: str) -> None:
    page = ready(opened(address))
    page.locator("canvas").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    inspector = page.get_by_role("region", name="Selected prefix")
    inspector.locator("tr.dropped td.text button").first.click()
    text = inspector.inner_text()
    assert "It was dropped." in text
    assert "π =" in text
    assert "of all probability was lost with it" in text


def test_designs_stand_side_by_side_on_one_tree(
    opened: Opener, address: str, model: cpsbs.TextModel
) -> None:
    page = ready(opened(address))
    page.get_by_label("independent").check()
    panel = tab(page, "Designs")
    expect(panel.locator("tbody tr")).to_have_count(2, timeout=60_000)
    cells = [row.locator("td").all_inner_texts() for row in panel.locator("tbody tr").all()]
    assert [row[0].strip() for row in cells] == ["stratified", "independent"]
    assert [row[1] for row in cells] == ["6", str(len(expected_texts(model, "independent")))]
    assert set(sequences(page)) == {
        *expected_texts(model, "stratified"),
        *expected_texts(model, "independent"),
    }
    # The last design cannot be taken away.
    page.get_by_label("stratified").uncheck()
    page.get_by_label("independent").click()
    expect(page.get_by_label("independent")).to_be_checked()


def test_k_temperature_and_seed_are_controls(
    opened: Opener, address: str, model: cpsbs.TextModel
) -> None:
    page = ready(opened(address))
    drawn(page, lambda: page.locator("#k").fill("3"), k=3)
    assert sequences(page) == expected_texts(model, "stratified", k=3)
    # Hotter, and the number of threads of either process would change the draw: where thousands
    # of tokens are about as likely, the last bit of a sum decides which one is picked.
    drawn(page, lambda: page.locator("#temperature").fill("1"), k=3, temperature=1)
    assert sequences(page) == expected_texts(model, "stratified", k=3, temperature=1.0)
    drawn(page, lambda: slide(page, "seed", 2), seed=2, temperature=1)
    assert sequences(page) == expected_texts(model, "stratified", k=3, temperature=1.0, seed=2)


def test_every_design_has_room_on_the_page(opened: Opener, file: Path) -> None:
    """The text of a sequence is not squeezed by the columns of two designs."""
    page = ready(opened(file.as_uri()))
    for row in tab(page, "Sequences").locator("tbody tr").all():
        box = row.bounding_box()
        assert box is not None
        assert box["height"] < 100


@pytest.mark.parametrize("width", [1400, 390])
def test_texts_stay_in_view_beside_four_designs(opened: Opener, address: str, width: int) -> None:
    page = ready(opened(address, width))
    for name in ("conditional-poisson", "gumbel-top-k", "independent"):
        drawn(page, page.get_by_label(name).check, design=name)
    button = tab(page, "Sequences").locator("tbody tr td:last-child button").first
    box = button.bounding_box()
    assert box is not None
    assert box["x"] > 0
    assert box["x"] + box["width"] <= width
    # It is on top of the numbers, which go on below it.
    button.scroll_into_view_if_needed()
    assert button.evaluate(
        "b => { const r = b.getBoundingClientRect();"
        " return b.contains(document.elementFromPoint(r.x + 5, r.y + 5)); }"
    )


def test_values_out_of_range_are_refused_on_the_spot(opened: Opener, address: str) -> None:
    page = ready(opened(address))
    page.locator("#k").fill("500")
    assert page.locator("#k").evaluate("input => !input.validity.valid")
    assert len(sequences(page)) == 6


def test_what_is_not_complete_is_not_drawn(opened: Opener, address: str) -> None:
    page = ready(opened(address))
    page.locator("#function").select_option("contains")
    page.locator("#argument").fill("")
    expect(page.locator("aside")).to_contain_text("Type a phrase.")
    drawn(page, lambda: page.locator("#argument").fill("vélo"), argument="vélo")
    page.locator("#k").fill("5")
    page.locator("#text").fill("")
    expect(page.locator("aside")).to_contain_text("Type a text")
    # Longer than a draw is put off; nothing must have been asked for, nor refused.
    page.wait_for_timeout(800)
    assert page.get_by_role("alert").count() == 0


def test_the_estimate_has_its_error_and_the_exact_value(opened: Opener, address: str) -> None:
    page = ready(opened(address))
    panel = tab(page, "Estimate")
    assert "E[BLEU] =" in panel.inner_text()
    assert "certainly in" in panel.inner_text()
    panel.get_by_role("button", name="Find the exact value").click()
    expect(panel).to_contain_text("of the probability", timeout=120_000)
    assert re.search("exact value is|certainly between", panel.inner_text())


def test_a_run_is_saved_and_loaded_again(opened: Opener, address: str, tmp_path: Path) -> None:
    page = ready(opened(address))
    with page.expect_download() as download:
        page.get_by_role("button", name="Save", exact=True).click()
    saved = tmp_path / "run.json"
    download.value.save_as(saved)
    assert json.loads(saved.read_text())["scene"]["text"] == TEXT
    before = sequences(page)
    again = ready(opened(address))
    again.locator("#k").fill("2")
    expect(again.locator("#panel tbody tr")).to_have_count(2, timeout=60_000)
    again.get_by_label("Saved run").set_input_files(saved)
    expect(again.locator("#panel tbody tr")).to_have_count(6)
    assert sequences(again) == before
    assert "Loaded 1 run of en-fr." in again.locator(".status").inner_text()


@pytest.mark.parametrize("content", ["{", "[]", '{"format": "cpsbs-explore", "version": 99}'])
def test_a_file_that_is_no_run_is_refused(
    opened: Opener, address: str, tmp_path: Path, content: str
) -> None:
    page = ready(opened(address))
    wrong = tmp_path / "wrong.json"
    wrong.write_text(content)
    page.get_by_label("Saved run").set_input_files(wrong)
    expect(page.get_by_role("alert")).to_contain_text("cannot be loaded")
    assert len(sequences(page)) == 6


def test_a_damaged_run_does_not_blank_the_page(
    opened: Opener, address: str, tmp_path: Path
) -> None:
    page = ready(opened(address))
    with page.expect_download() as download:
        page.get_by_role("button", name="Save", exact=True).click()
    record = json.loads(Path(download.value.path()).read_text())
    record["runs"][0]["steps"][1]["parent"] = [99] * len(record["runs"][0]["steps"][1]["parent"])
    wrong = tmp_path / "wrong.json"
    record["scene"]["text"] = "another"
    wrong.write_text(json.dumps(record))
    page.get_by_label("Saved run").set_input_files(wrong)
    expect(page.get_by_role("alert")).to_contain_text("it is damaged")
    assert len(sequences(page)) == 6


def test_a_run_of_another_model_is_shown_as_such(
    opened: Opener, address: str, tmp_path: Path
) -> None:
    page = ready(opened(address))
    with page.expect_download() as download:
        page.get_by_role("button", name="Save", exact=True).click()
    record = json.loads(Path(download.value.path()).read_text())
    record["model"] = "some/other"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(record))
    page.get_by_label("Saved run").set_input_files(other)
    expect(page.locator(".model")).to_have_text("some/other")
    expect(page.locator("#k")).to_have_attribute("readonly", "")
    page.get_by_role("button", name="Copy as Python").click()
    assert 'cpsbs.load("some/other")' in page.get_by_role("dialog", name="Python").inner_text()


def test_copied_python_draws_the_same_sequences(opened: Opener, address: str) -> None:
    page = ready(opened(address))
    shown = sequences(page)
    page.get_by_role("button", name="Copy as Python").click()
    code = page.get_by_role("dialog", name="Python").locator("pre").inner_text()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    *lines, estimate = printed.getvalue().strip().splitlines()
    assert [line.split("  ", 1)[1] for line in lines] == shown
    page.get_by_role("dialog", name="Python").get_by_role("button", name="Close").click()
    assert estimate in (tab(page, "Estimate").text_content() or "")


# ---------------------------------------------------------------------- safety


def test_hostile_texts_stay_texts(opened: Opener, address: str, tmp_path: Path) -> None:
    page = ready(opened(address))
    examples = page.locator("select").first
    drawn(page, lambda: examples.select_option(label=HOSTILE), text=HOSTILE)
    expect(page.locator("#text")).to_have_value(HOSTILE)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save", exact=True).click()
    record = json.loads(Path(download.value.path()).read_text())
    for output in record["outputs"]:
        output["text"] = HOSTILE
    record["pieces"] = dict.fromkeys(record["pieces"], HOSTILE)
    record["scene"]["text"] = HOSTILE * 2
    evil = tmp_path / "evil.json"
    evil.write_text(json.dumps(record))
    page.get_by_label("Saved run").set_input_files(evil)
    expect(page.locator("#text")).to_have_value(HOSTILE * 2)
    assert HOSTILE in page.locator("#panel").inner_text()
    for name in ("Step", "Redraws", "Estimate", "Designs"):
        tab(page, name)
    page.locator("canvas").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    assert page.title() == "cpsbs explore"


def test_white_space_is_seen_as_it_is(opened: Opener, address: str, tmp_path: Path) -> None:
    page = ready(opened(address))
    with page.expect_download() as download:
        page.get_by_role("button", name="Save", exact=True).click()
    record = json.loads(Path(download.value.path()).read_text())
    spaced = "  two  before,\nthen\ta tab "
    record["outputs"][0]["text"] = spaced
    record["scene"]["text"] = "spaces"
    file = tmp_path / "spaces.json"
    file.write_text(json.dumps(record))
    page.get_by_label("Saved run").set_input_files(file)
    expect(page.locator("#text")).to_have_value("spaces")
    assert spaced in sequences(page)
    # What a person sees; a browser gives the text as it is laid out.
    seen = page.locator("#panel td.text button").all_inner_texts()
    assert spaced in seen


def test_scripts_that_were_not_built_do_not_run(browser: Browser, address: str) -> None:
    page = browser.new_context().new_page()
    blocked: list[str] = []
    page.on("console", lambda m: blocked.append(m.text) if m.type == "error" else None)
    ready_page = page
    ready_page.goto(address)
    page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'document.title = 3';"
        " document.body.append(s); }"
    )
    assert page.title() == "cpsbs explore"
    assert any("Content Security Policy" in text for text in blocked)
    page.context.close()


def test_a_search_can_be_stopped(opened: Opener, address: str) -> None:
    page = ready(opened(address))
    page.locator("#temperature").fill("2")
    ready(page)
    page.get_by_label("Number of seeds").fill("1000")
    page.locator("#redraw").click()
    page.get_by_role("button", name="Stop").click(timeout=60_000)
    expect(page.get_by_role("button", name="Stop")).to_have_count(0, timeout=60_000)
    drawn(page, lambda: slide(page, "seed", 5), seed=5)
    assert len(sequences(page)) >= 6


def test_errors_are_sentences(opened: Opener, address: str) -> None:
    page = ready(opened(address))
    page.locator("#text").fill("word " * 400)
    expect(page.get_by_role("alert")).to_contain_text("takes at most 256", timeout=60_000)


# ---------------------------------------------------------------------- as a file


def test_a_file_shows_the_same_without_a_server(opened: Opener, file: Path) -> None:
    page = ready(opened(file.as_uri()))
    assert len(sequences(page)) >= 6
    panel = tab(page, "Designs")
    expect(panel.locator("tbody tr")).to_have_count(2)
    page.get_by_role("button", name="Show 12 seeds").click()
    expect(page.locator("#panel h2").first).to_contain_text("12 runs")
    assert re.search("exact value is|certainly between", tab(page, "Estimate").inner_text())
    slide(page, "seed", 4)
    assert len(sequences(page)) >= 6
    assert "not in the file" in tab(page, "Step").inner_text()
    expect(page.locator("#k")).to_have_attribute("readonly", "")
    page.locator("canvas").focus()
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("button", name="Expand from here").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_it_is_accessible_in_light_and_dark_and_on_a_phone(
    opened: Opener, file: Path, scheme: str, width: int
) -> None:
    page = ready(opened(file.as_uri(), width, 844, color_scheme=scheme, bypass_csp=True))
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    page.add_script_tag(path=AXE)
    for name in ("Sequences", "Redraws", "Estimate", "Designs", "Step"):
        tab(page, name)
        found = page.evaluate("axe.run()")
        problems = [
            f"{v['id']}: {v['nodes'][0]['html'][:200]} {v['nodes'][0]['failureSummary']}"
            for v in found["violations"]
        ]
        assert problems == [], name


def test_the_theme_can_be_switched(opened: Opener, file: Path) -> None:
    page = ready(opened(file.as_uri(), color_scheme="light"))
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 27)"
