"""The files for ``mbrs``: its own rules for reading them give the decisions that we made."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cpsbs
from cpsbs import Beams, Decisions, TableModel, mbr, search
from cpsbs.decisions.mbrs import MbrsFiles
from cpsbs.estimation.metrics import sentence_bleu, sentence_chrf
from cpsbs.text import demonstration

MODEL = TableModel.random(vocab_size=5, length=4, eos=0, seed=8)
SCORES: dict[str, Callable[[str, str], float]] = {"chrf": sentence_chrf, "bleu": sentence_bleu}
NAMES = ["", "the cat", "dog", "the", "sat."]

ODD = [
    "",
    " ",
    "a",
    " a",
    "a\t",
    "a b",
    "ab",
    "a\u2028b",
    "a\u00a0b",
    "\ufeffa",
    "a\0b",
    "été",
    "🙂",
]
"""Texts that a reader of lines may stumble on."""


def decode(sequences: Sequence[Sequence[int]]) -> list[str]:
    return [" ".join(NAMES[token] for token in y) for y in sequences]


def draws(design: str, k: int, count: int, seed: int = 0) -> Beams:
    copies = TableModel(MODEL.tables * count, 0)
    return search(copies, k, design, max_length=4, generator=seed)


def lines(file: Path) -> list[str]:
    """The lines of a file as Python reads it by default, which mbrs does."""
    with file.open(encoding="utf-8") as stored:
        return stored.readlines()


def read(files: MbrsFiles) -> list[tuple[list[str], dict[tuple[str, float], None]]]:
    """What mbrs reads for each source: hypotheses, and distinct pairs of references."""
    every = [lines(f) for f in (files.hypotheses, files.references, files.reference_lprobs)]
    count, rest = divmod(len(every[0]), files.num_candidates)
    assert rest == 0
    assert len(every[1]) == len(every[2]) == count * files.num_references
    found = []
    for i in range(count):
        n, m = files.num_candidates, files.num_references
        hypotheses = [text.strip() for text in every[0][i * n : (i + 1) * n]]
        texts = [text.strip() for text in every[1][i * m : (i + 1) * m]]
        lprobs = [float(text.strip()) for text in every[2][i * m : (i + 1) * m]]
        found.append((hypotheses, dict.fromkeys(zip(texts, lprobs, strict=True))))
    return found


def expected(
    hypotheses: list[str],
    references: dict[tuple[str, float], None],
    utility: Callable[[str, str], float],
) -> dict[str, float]:
    """The expected utilities by mbrs' formula, with a softmax of the log-probabilities."""
    top = max(value for _, value in references)
    total = math.fsum(math.exp(value - top) for _, value in references)
    return {
        c: math.fsum(math.exp(v - top) / total * utility(c, y) for y, v in references)
        for c in hypotheses
    }


def assert_same_decisions(
    decisions: Decisions, files: MbrsFiles, utility: Callable[[str, str], float]
) -> None:
    groups = read(files)
    assert len(groups) == len(decisions)
    totals = [math.fsum(own) for own in decisions.evidence.text_weights()]
    for own, total, (hypotheses, references) in zip(decisions, totals, groups, strict=True):
        scores = expected(hypotheses, references, utility)
        assert hypotheses[0] == own.text.strip()
        assert scores.keys() <= {c.text.strip() for c in own.candidates}
        ours = {c.text.strip(): c.utility / total for c in reversed(own.candidates)}
        assert scores == pytest.approx({c: ours[c] for c in scores}, abs=1e-9)
        # Of equal ones mbrs may choose any, so that ours must be the best alone.
        best = scores.pop(own.text.strip())
        assert all(score < best for score in scores.values())


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("utility", SCORES)
@pytest.mark.parametrize(
    "design", ["stratified", "gumbel-top-k", "conditional-poisson", "independent"]
)
def test_the_files_lead_to_the_same_decisions(
    design: str, utility: str, normalize: bool, tmp_path: Path
) -> None:
    evidence, others = draws(design, 6, 20), draws("top-k", 3, 20)
    found = mbr([others, evidence], evidence, utility, decode=decode, normalize=normalize)
    files = found.to_mbrs(tmp_path)
    assert files.metric == utility
    assert sorted(os.listdir(tmp_path)) == [
        "hypotheses.txt",
        "reference_lprobs.txt",
        "references.txt",
    ]
    assert_same_decisions(found, files, SCORES[utility])


def test_repeated_samples_keep_their_weight(tmp_path: Path) -> None:
    """Of equal references with equal log-probability, mbrs keeps one."""
    texts = ["a b", "a b", "c d", "a b ", "a c"]
    found = mbr([["c d", "a b", "a c"]], [texts], "bleu")
    files = found.to_mbrs(tmp_path)
    ((_, references),) = read(files)
    assert {y: math.exp(v) for y, v in references} == pytest.approx(
        {"a b": 0.6, "c d": 0.2, "a c": 0.2}
    )
    assert_same_decisions(found, files, sentence_bleu)


def test_sources_of_unequal_size_are_filled_up(tmp_path: Path) -> None:
    candidates = [["a b c", "a b", "x"], ["a"], ["a c", "b"]]
    evidence = [["a b c"], ["a", "b", "c", "d"], ["a b", "b c"]]
    weights = [[2.0], [1.0, 2.0, 0.0, 1.0], [1.0, 3.0]]
    found = mbr(candidates, evidence, "chrf", weights=weights)
    files = found.to_mbrs(tmp_path / "new" / "folder")
    assert (files.num_candidates, files.num_references) == (3, 3)
    assert files.reference_lprobs.read_text().split().count("-inf") == 3
    assert_same_decisions(found, files, sentence_chrf)


def test_candidates_that_are_tied_with_the_chosen_one_are_left_out(tmp_path: Path) -> None:
    texts = ["Quoi ?", "Quoi?", "Qui?"]
    found = mbr([texts], [texts], "chrf")
    files = found.to_mbrs(tmp_path)
    assert found[0].text == "Quoi ?"
    assert lines(files.hypotheses) == ["Quoi ?\n", "Qui?\n"]
    assert_same_decisions(found, files, sentence_chrf)
    # For a utility that mbrs does not have, nothing is promised, and nothing left out.
    assert mbr([texts], [texts], "exact").to_mbrs(tmp_path).num_candidates == 3


@settings(max_examples=60, deadline=None)
@given(data=st.data(), utility=st.sampled_from(sorted(SCORES)))
def test_any_texts(data: st.DataObject, utility: str) -> None:
    texts = st.one_of(
        st.sampled_from(ODD),
        st.text(st.sampled_from("ab .\t\x0b\x1c\x85\u2028"), max_size=8),
        st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=8),
    )
    several = st.lists(texts, min_size=1, max_size=5)
    sources = data.draw(st.lists(st.tuples(several, several), min_size=1, max_size=3))
    weights = [
        data.draw(
            st.lists(st.floats(0.01, 1), min_size=len(evidence), max_size=len(evidence)),
        )
        for _, evidence in sources
    ]
    found = mbr([c for c, _ in sources], [e for _, e in sources], utility, weights=weights)
    with tempfile.TemporaryDirectory() as folder:
        assert_same_decisions(found, found.to_mbrs(folder), SCORES[utility])


def test_sources_and_the_command(tmp_path: Path) -> None:
    found = mbr([["a", "b"], ["c"]], [["a"], ["b", "c"]], "bleu")
    assert found.to_mbrs(tmp_path).sources is None
    files = found.to_mbrs(tmp_path / "my folder", sources=["one\n", "two"])
    assert files.sources is not None
    assert lines(files.sources) == ["one\n", "two\n"]
    words = shlex.split(files.command)
    assert words[:4] == ["mbrs-decode", str(files.hypotheses), "--num_candidates", "2"]
    assert words[-4:] == ["--source", str(files.sources), "--metric", "bleu"]
    other = mbr([["a"]], [["a"]], "edit").to_mbrs(tmp_path)
    assert other.command.endswith("--metric METRIC")


def test_files_are_replaced_all_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = mbr([["a"]], [["a"]]).to_mbrs(tmp_path)
    sync = os.fsync
    calls: list[int] = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        mbr([["b"]], [["b"]]).to_mbrs(tmp_path)
    assert len(os.listdir(tmp_path)) == 3
    assert lines(first.hypotheses) == lines(first.references) == ["a\n"]
    monkeypatch.undo()
    mbr([["b"]], [["b"]]).to_mbrs(tmp_path)
    assert len(os.listdir(tmp_path)) == 3
    assert lines(first.hypotheses) == lines(first.references) == ["b\n"]


@pytest.mark.parametrize(
    ("candidates", "evidence", "arguments", "message"),
    [
        (["a\nb"], ["a"], {}, r"candidates of source 0 have the text 'a\\nb'; .* on one line"),
        (["a"], ["b", "a\r\nb"], {}, r"evidence of source 0 have the text 'a\\r\\nb'"),
        (["\ud800"], ["a"], {}, r"candidates of source 0 have the text '\\ud800'; it must be"),
        (["a"], ["a"], {"sources": ["x", "y"]}, "sources has 2 texts for 1 decisions"),
        (["a"], ["a"], {"sources": ["x\ny"]}, r"sources of source 0 have the text 'x\\ny'"),
    ],
)
def test_what_cannot_be_written_is_refused(
    candidates: list[str],
    evidence: list[str],
    arguments: dict[str, Any],
    message: str,
    tmp_path: Path,
) -> None:
    found = mbr([candidates], [evidence])
    with pytest.raises(ValueError, match=message):
        found.to_mbrs(tmp_path / "new", **arguments)
    assert not list(tmp_path.iterdir())


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="which is a file; it must be a folder"):
        mbr([["a"]], [["a"]]).to_mbrs(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_several_rounds_of_evidence_are_refused(tmp_path: Path) -> None:
    found = mbr(
        draws("stratified", 6, 10),
        draws("stratified", 3, 10, seed=1),
        decode=decode,
        confidence=0.99,
        rounds=2,
        draw=lambda sources, number: draws("stratified", 3, len(sources), seed=1 + number),
    )
    assert max(own.rounds for own in found) == 2
    with pytest.raises(ValueError, match=r"decided by 2 rounds of evidence.*without confidence"):
        found.to_mbrs(tmp_path)


def mbrs_decode() -> str:
    """The program, which needs an environment of its own: mbrs does not go with transformers 5."""
    program = os.environ.get("CPSBS_MBRS_DECODE") or shutil.which("mbrs-decode")
    if program is None:
        pytest.skip("mbrs-decode is missing; set CPSBS_MBRS_DECODE to where it is installed")
    return program


def decided_by_mbrs(files: MbrsFiles) -> list[dict[str, Any]]:
    """What mbrs chooses for each source, with its index and its expected score."""
    words = [*shlex.split(files.command), "--metric.num_workers", "2", "--format", "json"]
    words[0] = mbrs_decode()
    # Our own environment is not the one that it is installed in.
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*words, "--quiet"], capture_output=True, env=clean, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return [json.loads(line) for line in done.stdout.decode().split("\n") if line]


@pytest.mark.slow
@pytest.mark.parametrize("design", ["stratified", "independent"])
@pytest.mark.parametrize("utility", SCORES)
def test_mbrs_makes_the_same_decisions(utility: str, design: str, tmp_path: Path) -> None:
    mbrs_decode()
    model = cpsbs.load("en-fr", device="cpu")
    sentences = [sentence for sentence, _ in demonstration()]
    found = model.mbr(sentences, utility=utility, k=16, design=design, seed=1)
    chosen = decided_by_mbrs(found.to_mbrs(tmp_path))
    assert [row["sentence"] for row in chosen] == [text.strip() for text in found.texts]
    for row, own, weights in zip(chosen, found, found.evidence.text_weights(), strict=True):
        # It computes in float32.
        assert row["expected_score"] == pytest.approx(100 * own.utility / sum(weights), abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("utility", SCORES)
def test_mbrs_reads_odd_texts_as_we_do(utility: str, tmp_path: Path) -> None:
    candidates = [ODD, ODD[::-1], [""], ["a", "b"]]
    evidence = [ODD[::-1], ["a b", " a b", "a b", "b"], ["a"], [""]]
    found = mbr(candidates, evidence, utility)
    chosen = decided_by_mbrs(found.to_mbrs(tmp_path))
    assert [row["sentence"] for row in chosen] == [text.strip() for text in found.texts]
