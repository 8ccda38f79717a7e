"""``cpsbs mbr``: the decisions of the library, tables, files that can be resumed, and scores."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

import cpsbs
from cpsbs.cli import running
from cpsbs.cli.decided import decision_table, exported_choice
from cpsbs.cli.formats import PlainTexts, one_line
from cpsbs.cli.ordered import Record
from cpsbs.cli.outputs import ResumableFile
from cpsbs.cli.stored import to_line
from cpsbs.text import demonstration
from tests.cli.test_commands import records, run

PAIRS = demonstration()[:3]
TEXTS, REFERENCES = [text for text, _ in PAIRS], [reference for _, reference in PAIRS]
FEW = ("-k", "4", "--candidates", "beam:2+evidence", "--max-length", "24")


@pytest.fixture(scope="module")
def decided() -> list[dict[str, Any]]:
    """What the command says of all texts at once."""
    result = run("mbr", *TEXTS, *FEW, "--seed", "3")
    assert result.exit_code == 0, result.output
    return records(result.stdout)


def test_records_are_those_of_the_library(decided: list[dict[str, Any]]) -> None:
    expected = (
        cpsbs.load("en-fr")
        .mbr(TEXTS, candidates="beam:2+evidence", k=4, max_length=24, seed=3)
        .to_dicts()
    )
    assert [record["text"] for record in decided] == TEXTS
    for record, entry in zip(decided, expected, strict=True):
        assert record["chosen"] == entry["chosen"]
        assert record["utility"] == pytest.approx(entry["utility"])
        assert record["lead_error"] == pytest.approx(entry["lead_error"])
        assert [c["text"] for c in record["candidates"]] == [c["text"] for c in entry["candidates"]]
        assert record["settings"]["candidates"] == "beam:2+evidence"


def test_decisions_do_not_depend_on_the_batch(decided: list[dict[str, Any]]) -> None:
    alone = records(run("mbr", *TEXTS, *FEW, "--seed", "3", "--batch-size", "1").stdout)
    for one, other in zip(alone, decided, strict=True):
        assert (one["number"], one["chosen"]) == (other["number"], other["chosen"])
        assert one["utility"] == pytest.approx(other["utility"], abs=1e-4)


def shown(record: dict[str, Any]) -> str:
    console = Console(width=100, record=True, force_terminal=False)
    console.print(decision_table(record))
    return " ".join(console.export_text().split())


def test_the_table_has_the_chosen_text_first(decided: list[dict[str, Any]]) -> None:
    for record in decided:
        table = shown(record)
        first, *others = record["candidates"]
        assert table.startswith(record["text"])
        assert "±" in table
        places = [table.index(c["text"]) for c in (first, *others[:1])]
        assert places == sorted(places)
        assert f"{len(record['candidates'])} candidates" in table
        assert ("is certainly the best" in table) == record["certain"]
    only = decided[0] | {"candidates": decided[0]["candidates"][:1], "captured": None}
    assert "The only candidate. Evidence: 1 round." in shown(only)
    many = decided[0] | {"candidates": decided[0]["candidates"][:1] * 12}
    assert "… and 2 worse ones" in shown(many)


def test_a_terminal_shows_tables_and_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "wants_json", lambda _: False)
    monkeypatch.setattr("cpsbs.cli.mbr.wants_json", lambda _: False)
    result = run("mbr", TEXTS[0], *FEW, "-r", REFERENCES[0])
    assert result.exit_code == 0, result.output
    assert "candidates. Evidence: 1 round" in " ".join(result.stdout.split())
    assert "chrF2|nrefs:1" in result.stdout


def score_lines(texts: list[str], references: list[str]) -> list[str]:
    """What sacrebleu says, as it says it."""
    metrics: list[Any] = [CHRF(), BLEU()]
    return [
        m.corpus_score(texts, [references]).format(width=2, signature=str(m.get_signature()))
        for m in metrics
    ]


def test_scores_are_those_of_sacrebleu(tmp_path: Path, decided: list[dict[str, Any]]) -> None:
    given = [part for reference in REFERENCES for part in ("-r", reference)]
    expected = score_lines([record["chosen"] for record in decided], REFERENCES)
    arguments = ("mbr", *TEXTS, *FEW, "--seed", "3")
    printed = run(*arguments, *given)
    assert len(records(printed.stdout)) == len(TEXTS)
    assert printed.stderr.splitlines() == expected
    plain = run(*arguments, "-o", tmp_path / "out.txt", *given)
    assert [record["line"] for record in records(plain.stdout)] == expected
    assert run(*arguments, "-o", tmp_path / "out.jsonl").exit_code == 0
    again = run(*arguments, "-o", tmp_path / "out.jsonl", *given)  # from the complete file
    assert "already complete" in again.stderr
    assert [record["line"] for record in records(again.stdout)] == expected


def test_skipped_lines_are_empty_and_not_scored(tmp_path: Path) -> None:
    source, references, out = (tmp_path / name for name in ("en", "fr", "out.txt"))
    source.write_text(f"\n{TEXTS[0]}\n\n{TEXTS[1]}\n\n")
    references.write_text(f"a\n{REFERENCES[0]}\nb\n{REFERENCES[1]}\nc\n")
    arguments = ("mbr", "-f", source, *FEW, "--skip", "-o", out, "--reference-file", references)
    result = run(*arguments)
    assert result.exit_code == 3, result.output
    lines = out.read_text().split("\n")
    assert [bool(line) for line in lines] == [False, True, False, True, False, False]
    expected = score_lines([lines[1], lines[3]], REFERENCES[:2])
    assert [record["line"] for record in records(result.stdout)] == expected


def test_a_text_file_is_never_taken_for_a_result(tmp_path: Path) -> None:
    """Nothing in plain text says which command wrote it: it may be the reference."""
    file = tmp_path / "fr.txt"
    file.write_text("\n".join(REFERENCES) + "\n", encoding="utf-8")
    result = run("mbr", *TEXTS, *FEW, "-o", file, "--reference-file", file)
    assert result.exit_code == 1
    assert "plain text does not tell which command wrote it" in result.output
    assert file.read_text(encoding="utf-8").splitlines() == REFERENCES


WORDS = [f"the {one} {two}" for one in ("dog", "cat", "old house") for two in ("sees", "eats")]


@pytest.mark.parametrize("name", ["out.txt", "out.jsonl", "out.parquet"])
def test_a_resumed_run_writes_the_same(
    name: str, causal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(output: Path) -> tuple[str | Path, ...]:
        small = ("-k", "3", "--candidates", "beam:2+stratified:2", "--max-length", "6")
        return ("mbr", *WORDS, "-m", causal, *small, "--batch-size", "2", "-o", output)

    (tmp_path / "whole").mkdir()
    whole, output = tmp_path / "whole" / name, tmp_path / name
    assert run(*command(whole)).exit_code == 0
    write = ResumableFile.write

    def interrupted(self: ResumableFile, new: list[Record]) -> None:
        write(self, new)
        if self.count == 4:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(ResumableFile, "write", interrupted)
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            assert run(*command(output)).exit_code == 130
        finally:
            signal.signal(signal.SIGINT, previous)
    assert not output.exists()
    other = run(*command(output), "--utility", "exact")
    assert "differs in utility (chrF there, exact match here)" in other.output
    resumed = run(*command(output))
    assert resumed.exit_code == 0, resumed.output
    assert "Resuming: 4 of 6" in resumed.output
    assert output.read_bytes() == whole.read_bytes()
    assert not output.with_name(f"{name}.partial").exists()
    again = run(*command(output))
    if name == "out.txt":
        assert len(output.read_text().splitlines()) == len(WORDS)
        assert again.exit_code == 1
        assert "plain text does not tell which command wrote it" in again.output
        assert output.read_bytes() == whole.read_bytes()
    else:
        assert "already complete" in again.output


def test_plain_texts(tmp_path: Path) -> None:
    file, plain = tmp_path / "out.txt", PlainTexts("chosen", lambda: 4)
    texts = {0: "a\r\nb\nc\u2028d", 2: "é"}
    with file.open("wb") as out:
        plain.write(
            out, lambda: (to_line({"number": n, "chosen": text}) for n, text in texts.items())
        )
    assert file.read_text() == "a b c d\n\né\n\n"
    assert one_line(texts[0]) == "a b c d"
    with file.open("rb") as stored, pytest.raises(ValueError, match="does not tell which command"):
        plain.check(stored, iter([(0, ""), (2, "")]))


def test_other_commands_write_json_to_txt(causal: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    assert run("sample", "the dog", "-m", causal, "-k", "2", "-o", out).exit_code == 0
    assert records(out.read_text())[0]["text"] == "the dog"


Words = tuple[str | Path, ...]
"""The words of a command line."""


def files_in(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_files_for_mbrs_are_those_of_the_library(tmp_path: Path) -> None:
    decisions = cpsbs.load("en-fr").mbr(
        TEXTS, candidates="beam:2+evidence", k=4, max_length=24, seed=3
    )
    expected = decisions.to_mbrs(tmp_path / "library", sources=TEXTS)
    folder = tmp_path / "mbrs"
    arguments: Words = ("mbr", *TEXTS, *FEW, "--seed", "3", "--export-mbrs", folder)
    printed = run(*arguments)
    assert printed.exit_code == 0, printed.output
    told, command = printed.stderr.splitlines()
    assert told == f"Wrote files for mbrs to {folder}. To decide by them, run"
    assert command == expected.command.replace(str(tmp_path / "library"), str(folder))
    (first, *_) = records(printed.stdout)
    assert [row["text"] for row in first["evidence"]] == decisions.evidence.texts[0]
    whole = files_in(folder)
    for name in ("hypotheses.txt", "references.txt", "sources.txt"):
        assert whole[name] == (tmp_path / "library" / name).read_bytes()
    values = [
        [float(line) for line in (file / "reference_lprobs.txt").read_text().split()]
        for file in (folder, tmp_path / "library")
    ]
    assert values[0] == pytest.approx(values[1], abs=1e-4)
    for name in ("out.jsonl", "out.parquet"):
        for _ in range(2):  # the second time from the complete file
            shutil.rmtree(folder)
            assert run(*arguments, "-o", tmp_path / name).exit_code == 0
            assert files_in(folder) == whole


def test_a_resumed_run_exports_all_texts(
    causal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, folder, whole = (tmp_path / name for name in ("out.jsonl", "mbrs", "whole"))
    small = ("-k", "3", "--candidates", "beam:2+evidence", "--max-length", "6")
    command: Words = ("mbr", *WORDS, "-m", causal, *small, "--batch-size", "2")
    assert run(*command, "--export-mbrs", whole).exit_code == 0
    write = ResumableFile.write

    def interrupted(self: ResumableFile, new: list[Record]) -> None:
        write(self, new)
        if self.count == 4:
            raise OSError("the power is gone")

    with monkeypatch.context() as patch:
        patch.setattr(ResumableFile, "write", interrupted)
        assert run(*command, "-o", output, "--export-mbrs", folder).exit_code == 1
    assert not folder.exists()
    without = run(*command, "-o", output)
    assert "differs in export_mbrs (True there, None here)" in without.output
    resumed = run(*command, "-o", output, "--export-mbrs", folder)
    assert resumed.exit_code == 0, resumed.output
    assert "Resuming: 4 of 6" in resumed.output
    assert files_in(folder) == files_in(whole)


def test_a_complete_file_without_evidence_cannot_be_exported(causal: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    small = ("-k", "2", "--max-length", "4")
    command: Words = ("mbr", *WORDS[:2], "-m", causal, *small, "-o", output)
    assert run(*command).exit_code == 0
    refused = run(*command, "--export-mbrs", tmp_path / "mbrs")
    assert refused.exit_code == 1
    assert "was not written by this command. Delete it, or choose another name" in refused.output
    assert not (tmp_path / "mbrs").exists()


def test_skipped_lines_are_not_exported(tmp_path: Path) -> None:
    (tmp_path / "en").write_text(f"\n{TEXTS[0]}\n\n{TEXTS[1]}\n")
    options: Words = (*FEW, "--skip", "--export-mbrs", tmp_path / "mbrs", "--utility", "exact")
    result = run("mbr", "-f", tmp_path / "en", *options)
    assert result.exit_code == 3, result.output
    assert "--metric METRIC" in result.stderr
    assert (tmp_path / "mbrs" / "sources.txt").read_text() == f"{TEXTS[0]}\n{TEXTS[1]}\n"
    assert len((tmp_path / "mbrs" / "references.txt").read_text().splitlines()) == 8


def test_line_breaks_within_exported_texts_become_spaces() -> None:
    row = {"text": "a\r\nb\n", "behind": 0.0, "weight": 1.0}
    found = exported_choice({"candidates": [row], "evidence": [row], "utility": 1.0})
    assert list(found.candidates) == list(found.evidence) == ["a b "]


def test_unclear_decisions_get_more_evidence(causal: Path) -> None:
    arguments = ["mbr", *WORDS[:3], "-m", str(causal), "-k", "3", "--max-length", "4"]
    (first, *others) = records(run(*arguments, "--confidence", "0.9", "--rounds", "2").stdout)
    assert max(record["rounds"] for record in (first, *others)) == 2
    assert first["settings"]["confidence"] == 0.9
    again = records(run(*arguments, "--confidence", "0.9", "--rounds", "2").stdout)
    assert again == [first, *others]
    assert all(record["rounds"] == 1 for record in records(run(*arguments).stdout))


def test_beam_search_can_be_the_evidence(causal: Path) -> None:
    arguments = ["mbr", *WORDS[:2], "-m", str(causal), "-k", "3", "--max-length", "4"]
    options = ["--design", "top-k", "--candidates", "evidence", "--p-weighted"]
    for record in records(run(*arguments, *options).stdout):
        assert record["settings"]["weights"] == "probability"
        assert record["standard_error"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--utility", "nothing"), "utility is 'nothing'; it must be one of chrf, bleu"),
        (("--candidates", "beam"), "candidates is 'beam'; it must be a sum"),
        (("--candidates", "beam:0"), "candidates is 'beam:0'"),
        (("--candidates", "nothing:3"), "nothing"),
        (("--confidence", "1"), "--confidence is 1.0; it must be between 0 and 1"),
        (("--confidence", "nan"), "--confidence is nan"),
        (("--rounds", "3"), "--rounds is 3, which needs --confidence"),
        (("--design", "top-k"), "design is 'top-k', which has no weights"),
        (("--p-weighted", "--confidence", "0.9"), "confidence is 0.9, but evidence with weights"),
        (("-r", "one", "-r", "two"), "there are 2 references for 1 texts"),
        (("-o", "out.csv"), "--output is out.csv"),
        (("--export-mbrs", __file__), "which is a file; it must be a folder"),
        (("--export-mbrs", "x", "--confidence", "0.9"), "does not go with --confidence 0.9"),
        (("--export-mbrs", "x", "-o", "out.txt"), "--output is out.txt, which keeps the chosen"),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_loaded(
    options: tuple[str, ...], message: str
) -> None:
    result = run("mbr", "Hello.", *options, "-m", "no/such/model")
    assert result.exit_code == 1
    assert message in result.output
    assert result.output.count("\n") == 1
