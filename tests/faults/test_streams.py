"""Long inputs: bounded memory, any crash, changed input, bad lines, damaged compression."""

from __future__ import annotations

import gzip
import json
import tempfile
import tracemalloc
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsbs.cli import compression
from cpsbs.cli.formats import PlainTexts
from cpsbs.cli.ordered import Record
from tests.cli.jobs import run, source_of

TEXTS = ["a", "ccc", "bb", "", "dddd", "é", "ffffff", "g", "hh", "", "i", "jj", "k" * 9, "l", "m"]
USABLE = [i for i, text in enumerate(TEXTS) if text]


def finished(file: Path, *, long: bool = False) -> bytes:
    plain = PlainTexts("text", lambda: len(TEXTS)) if file.suffix == ".txt" else None
    run(source_of(TEXTS, skip=True), file, long=long, plain=plain)
    assert not file.with_name(f"{file.name}.partial").exists()
    return file.read_bytes()


@pytest.mark.parametrize(
    ("name", "long"),
    [
        *(("o.jsonl", False), ("o.jsonl", True), ("o.csv", True), ("o.parquet", False)),
        *(("o.parquet", True), ("o.jsonl.gz", False), ("o.csv.gz", True), ("o.txt", False)),
    ],
)
@pytest.mark.parametrize("ahead", [0, 3])
def test_a_run_stopped_after_any_batch_ends_with_the_same_bytes(
    name: str, long: bool, ahead: int, tmp_path: Path
) -> None:
    (tmp_path / "whole").mkdir()
    expected = finished(tmp_path / "whole" / name, long=long)
    plain = PlainTexts("text", lambda: len(TEXTS)) if name == "o.txt" else None
    for stop in count(0):
        file = tmp_path / str(stop) / name
        file.parent.mkdir()
        source = source_of(TEXTS, skip=True)
        try:
            run(source, file, long=long, plain=plain, stop=stop, ahead=ahead)
            break
        except KeyboardInterrupt:
            assert not file.exists()
        assert finished(file, long=long) == expected
        if name != "o.txt":  # it is recognised
            assert run(source_of(TEXTS, skip=True), file, long=long) == 0
    assert stop == 8
    assert file.read_bytes() == expected


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_partial_file_cut_at_any_byte_is_resumed(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "whole").mkdir()
        expected = finished(folder / "whole" / "out.jsonl")
        source = source_of(TEXTS, skip=True)
        with pytest.raises(KeyboardInterrupt):
            run(source, folder / "out.jsonl", stop=data.draw(st.integers(1, 7)))
        partial = folder / "out.jsonl.partial"
        stored = partial.read_bytes()
        partial.write_bytes(stored[: data.draw(st.integers(0, len(stored)))])
        seen: list[Record] = []
        run(source_of(TEXTS, skip=True), folder / "out.jsonl", seen.append)
        assert (folder / "out.jsonl").read_bytes() == expected
        # Every result is seen once, whether it was there or not.
        assert sorted(record["number"] for record in seen) == USABLE
        again: list[Record] = []
        assert run(source_of(TEXTS, skip=True), folder / "out.jsonl", again.append) == 0
        assert [record["number"] for record in again] == USABLE


def test_batches_that_are_complete_are_not_computed_again(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(source_of(TEXTS, skip=True), tmp_path / "o.jsonl", stop=5)
    assert run(source_of(TEXTS, skip=True), tmp_path / "o.jsonl") == 8 - 5


@pytest.mark.parametrize("changed", range(len(TEXTS)))
def test_a_run_does_not_go_on_with_another_input(changed: int, tmp_path: Path) -> None:
    """Windows are of 2, 4 and 8 lines, of which the first two and a batch of the third are done."""
    file = tmp_path / "o.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(source_of(TEXTS, skip=True), file, stop=4)
    before = (tmp_path / "o.jsonl.partial").read_bytes()
    other = [text + "!" * (i == changed) for i, text in enumerate(TEXTS)]
    if changed < 14:
        with pytest.raises(ValueError, match=r"for another input: the first (2|6|14) texts"):
            run(source_of(other, skip=True), file)
        assert (tmp_path / "o.jsonl.partial").read_bytes() == before
        run(source_of(TEXTS, skip=True), file)
        with pytest.raises(ValueError, match="was computed from another input"):
            run(source_of(other, skip=True), file)
    else:  # nothing of its window was computed
        run(source_of(other, skip=True), file)


def test_an_input_that_became_longer_or_shorter_is_another_one(tmp_path: Path) -> None:
    file = tmp_path / "o.jsonl"
    finished(file)
    with pytest.raises(ValueError, match=r"ends after 13 of 14 results|from another input"):
        run(source_of([*TEXTS, "more"], skip=True), file)
    with pytest.raises(ValueError, match="more than 12 lines"):
        run(source_of(TEXTS[:-1], skip=True), file)


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_bad_line_stops_before_its_window_and_after_all_others(
    ahead: int, tmp_path: Path
) -> None:
    file = tmp_path / "o.jsonl"
    texts = [*"abcdef", "g", "", *"ij", ""]  # in the third window
    with pytest.raises(
        ValueError,
        match=r"text 8 is empty \(and 1 more texts .*; nothing of texts 7 to 11 was computed",
    ):
        run(source_of(texts), file, ahead=ahead)
    stored = (tmp_path / "o.jsonl.partial").read_bytes().splitlines()[1:]
    assert sorted(json.loads(line)["number"] for line in stored) == [0, 1, 2, 3, 4, 5]
    shown: list[Record] = []
    with pytest.raises(ValueError, match="text 8 is empty"):
        run(source_of(texts), None, shown.append, ahead=ahead)
    assert [record["number"] for record in shown] == [0, 1, 2, 3, 4, 5]


def test_skipped_lines_are_told_as_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    told: dict[int, str] = {}

    def show(record: Record) -> None:
        told[record["number"]] = capsys.readouterr().err

    source = source_of(["", "a", "b", "", "c", "", *("" for _ in range(99)), "d"], skip=True)
    run(source, None, show)
    assert told[1] == "note: line 1 is empty; it is skipped\n"
    assert told[2].count("\n") == 2
    assert told[2].startswith("note: line 4 is empty; it is skipped\n")
    assert told[105].count("it is skipped") == 17
    assert told[105].endswith("note: further lines that are skipped are counted only\n")
    assert source.skipped_lines() == "102 of 106 lines were skipped; line 1 is empty"


def endless(lines: int) -> Iterator[str]:
    for i in range(lines):
        yield f"line {i} " + "x" * (i * 7919 % 50)


@pytest.mark.parametrize("to_file", [True, False])
def test_memory_does_not_grow_with_the_input(to_file: bool, tmp_path: Path) -> None:
    peaks = []
    for lines in (2_000, 20_000):
        file = tmp_path / f"{lines}.jsonl"
        tracemalloc.start()
        run(source_of(endless(lines)), file if to_file else None, size=4)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0] + 100_000
    if to_file:
        assert file.read_bytes().count(b"\n") == 20_000


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_compressed_content_that_is_damaged_is_refused(ending: str, tmp_path: Path) -> None:
    if ending == "zst":
        pytest.importorskip("zstandard")
    file = tmp_path / f"x.{ending}"
    content = b"".join(b"%d\n" % i for i in range(50_000))
    with file.open("wb") as raw, compression.compressing(raw, file) as compressed:
        compressed.write(content)
    whole = file.read_bytes()

    def read() -> bytes:
        with file.open("rb") as raw:
            return compression.decompressed(raw, file).read()

    assert read() == content
    file.write_bytes(whole * 2)  # as after cat a.gz b.gz
    assert read() == content * 2
    file.write_bytes(whole + b"\0" * 200_000)  # as on a tape
    assert read() == content
    for damaged, reason in (
        (whole[:-9], "cut short"),
        (whole[: len(whole) // 2], "cut short"),
        (b"plain text\n", "damaged"),
        (whole + b"more", "damaged"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"its compressed content is {reason}"):
            read()
    file.write_bytes(b"")
    assert read() == b""


def test_compressed_results_are_checked_whole(tmp_path: Path) -> None:
    file = tmp_path / "o.jsonl.gz"
    whole = finished(file)
    assert gzip.decompress(whole).count(b"\n") == len(USABLE)
    file.write_bytes(whole[:-4])
    with pytest.raises(ValueError, match=r"not what this command writes: .* cut short"):
        finished(file)
    with pytest.raises(ValueError, match=r"Parquet is compressed inside; leave out \.gz"):
        finished(tmp_path / "o.parquet.gz")


@pytest.mark.parametrize("mended", ["fixed", "skipped"])
def test_a_run_that_a_bad_line_stopped_goes_on(mended: str, tmp_path: Path) -> None:
    """Results of the windows before the bad line are taken over."""
    file = tmp_path / "o.jsonl"
    bad = [*"abcdefg", "", *"ijk"]
    with pytest.raises(ValueError, match="text 8 is empty"):
        run(source_of(bad), file)
    whole = [*"abcdefg", "h", *"ijk"] if mended == "fixed" else bad
    skip = mended == "skipped"
    assert run(source_of(whole, skip=skip), file) == (2 if skip else 3)
    run(source_of(whole, skip=skip), tmp_path / "expected.jsonl")
    assert file.read_bytes() == (tmp_path / "expected.jsonl").read_bytes()
