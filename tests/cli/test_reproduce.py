"""``cpsbs reproduce``, small."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cpsbs.cli import reproduction
from cpsbs.cli.options import EngineName
from cpsbs.cli.reproduction import Reproduction
from cpsbs.experiments.compute import Worker
from cpsbs.experiments.plan import EXPERIMENTS, QUICK, Scale
from cpsbs.text import demonstration
from tests.cli.test_commands import run
from tests.workers.computing import Here

TINY = Scale(
    lines=(0,),
    temperatures=(0.1, 0.5),
    sizes=(2,),
    repeats=2,
    baseline_runs=2,
    baseline_size=4,
    baseline_block=2,
    max_length=8,
    decoding_temperatures=(0.1, 0.5),
    decoding_sizes=(2,),
    decoding_sentences=2,
    decoding_block=1,
    runtime_sizes=(2,),
    runtime_repeats=1,
    hindsight_runs=2,
    hindsight_size=2,
)


@pytest.fixture
def test_set(tmp_path: Path) -> list[str]:
    names = ("source", "reference")
    for name, texts in zip(names, zip(*demonstration(), strict=True), strict=True):
        (tmp_path / name).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return [f"--{name}={tmp_path / name}" for name in names]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make quick runs tiny, in this process."""
    monkeypatch.setattr(reproduction, "QUICK", TINY)
    monkeypatch.setattr(
        Reproduction, "_pool", lambda self, timed: Here(partial(Worker, self._subjects))
    )


@pytest.mark.usefixtures("tiny")
def test_all_experiments_end_in_a_report(test_set: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments: list[str | Path] = ["reproduce", "--quick", "--out", out, "--workers=1", *test_set]
    planned = run(*arguments, "--dry-run")
    assert "to compute: about" in planned.stderr
    first = run(*arguments)
    assert first.exit_code == 0, first.stderr
    report = (out / "report.html").read_text(encoding="utf-8")
    for experiment in EXPERIMENTS:
        assert f"<h2>{experiment}: " in report
    assert "<td>lines</td><td>0</td>" in report  # settings are tables
    assert "src=" not in report  # nothing comes from elsewhere
    assert 'href="http' not in report
    figures = {file.name for file in (out / "figures").iterdir()}
    assert {"bleu.svg", "bleu.png", "rmse-bleu.svg", "diversity.png", "hindsight.svg"} <= figures
    tables = {file.stem for file in (out / "tables").iterdir()}
    assert {"claims", "baseline-variance", "diversity", "rmse-entropy", "truncation"} <= tables
    settings = json.loads((out / "settings.json").read_text())
    assert settings["subject"]["model"] == "en-fr"
    claims = (out / "tables" / "claims.md").read_text(encoding="utf-8")
    for shown in (report, claims, first.stderr):
        assert "(quick run)" in shown
    cells = {file.name: file.stat().st_mtime_ns for file in (out / "cells").iterdir()}
    again = run(*arguments, "bleu", "--draw-only")
    assert again.exit_code == 0, again.stderr
    assert {f.name: f.stat().st_mtime_ns for f in (out / "cells").iterdir()} == cells
    figure = (out / "figures" / "bleu.svg").read_bytes()
    run(*arguments, "bleu")
    assert (out / "figures" / "bleu.svg").read_bytes() == figure


@pytest.mark.usefixtures("tiny")
def test_only_complete_experiments_are_plotted(test_set: list[str], tmp_path: Path) -> None:
    arguments = ["reproduce", "--quick", f"--out={tmp_path / 'out'}", "--plot-only", *test_set]
    nothing = run(*arguments)
    assert nothing.exit_code == 1
    assert "has no complete experiment" in nothing.stderr
    run("reproduce", "runtime", *[a for a in arguments[1:] if a != "--plot-only"])
    some = run(*arguments)
    assert some.exit_code == 0, some.stderr
    assert "not complete: bleu, " in some.stderr


def test_what_is_wrong_is_told(test_set: list[str], tmp_path: Path) -> None:
    few = run("reproduce", "--quick", "--out", tmp_path / "out", *test_set)
    assert few.exit_code == 1
    assert "the test set has 30 sentences" in few.stderr
    assert "--lines, from 0 to 29" in few.stderr
    unknown = run("reproduce", "speed", *test_set)
    assert "experiment is 'speed'; allowed are bleu, " in unknown.stderr
    for lines in ("", "1;2", "-1", "1,,2", "one", "1.5"):
        malformed = run("reproduce", "--lines", lines, *test_set)
        assert malformed.exit_code == 1
        assert f"--lines is {lines!r}" in malformed.stderr
    beyond = run("reproduce", "--lines=3,30", *test_set)
    assert "--lines asks for number 30" in beyond.stderr
    one = run("reproduce", test_set[0])
    assert "--source and --reference belong together" in one.stderr


@pytest.mark.usefixtures("tiny")
def test_any_lines_of_any_test_set(test_set: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("reproduce", "runtime", "--quick", "--lines", "29, 7,29", "--out", out, *test_set)
    assert done.exit_code == 0, done.stderr
    assert json.loads((out / "settings.json").read_text())["scale"]["lines"] == [29, 7]


def options(**changes: Any) -> Reproduction:
    names = [field.name for field in fields(Reproduction)]
    given: dict[str, Any] = dict.fromkeys(names) | {
        "experiments": [],
        "quick": True,
        "model": "en-fr",
    }
    given |= {"out": Path("out"), "device": "cpu", "engine": EngineName.local}
    return Reproduction(**(given | changes))


@pytest.mark.parametrize(
    ("variable", "threads", "timed", "workers"),
    [("", 1, 8, 8), ("2", 2, 2, 4), ("3,2", 3, 3, 2), ("16", 16, 16, 1), ("many", 1, 8, 8)],
)
def test_the_threads_of_a_worker_do_not_depend_on_the_number_of_workers(
    variable: str, threads: int, timed: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(reproduction, "_processors", lambda: 8)
    assert options()._workers == workers
    for given in (None, 1, 5):
        assert options(workers=given)._threads(timed=False) == threads
        assert options(workers=given)._threads(timed=True) == timed
    note = "" if timed == 8 else f", {timed} threads"
    assert options()._devices == (f"CPU, 8 processors{note}",)


@pytest.mark.slow
def test_quick_is_quick_and_survives_kill(tmp_path: Path) -> None:
    """The real thing on the embedded model: killed in the middle, then finished."""
    names = ("source", "reference")
    for name, texts in zip(names, zip(*demonstration(), strict=True), strict=True):
        lines = [texts[i % len(texts)] for i in range(max(QUICK.lines) + 1)]
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "cpsbs", "reproduce", "--quick", "--out", str(out)]
    command += [f"--{name}={tmp_path / name}" for name in names]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as begun:
        while len(list((out / "cells").glob("*.parquet"))) < 5:
            assert begun.poll() is None
            time.sleep(0.1)
        begun.kill()
    some = {f.name: f.stat().st_mtime_ns for f in (out / "cells").glob("*.parquet")}
    assert not (out / "report.html").exists()
    done = subprocess.run(command, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    whole = {f.name: f.stat().st_mtime_ns for f in (out / "cells").iterdir()}
    assert some.items() <= whole.items()
    assert (out / "report.html").exists()
