"""Long work that is stopped: nothing is lost, nothing comes twice, the result is the same."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from cpsbs.cli.outputs import ResumableFile

LINES = [f"the dog sees {n} and {m}" for n in ("one", "two") for m in ("a cat", "it") * 8]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "texts"
    file.write_text("".join(f"{line}\n" for line in LINES))
    return file


def command(texts: Path, causal: Path, output: Path, *more: str) -> list[str]:
    """Two at a time, so that there are many batches."""
    sample = [sys.executable, "-m", "cpsbs", "sample", "-f", str(texts), "-m", str(causal)]
    return [*sample, "-k", "2", "--batch-size", "2", "-o", str(output), *more]


def finish(arguments: list[str], limit: Callable[[], None] | None = None) -> tuple[int, str]:
    done = subprocess.run(arguments, capture_output=True, text=True, preexec_fn=limit)
    return done.returncode, done.stderr


def written(partial: Path) -> int:
    """Whole records, behind the line about the job."""
    return partial.read_bytes().count(b"\n") - 1 if partial.exists() else 0


@pytest.fixture(scope="module")
def expected(causal: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What an uninterrupted run writes."""
    folder = tmp_path_factory.mktemp("expected")
    (folder / "texts").write_text("".join(f"{line}\n" for line in LINES))
    status, _ = finish(command(folder / "texts", causal, folder / "out.jsonl"))
    assert status == 0
    found = (folder / "out.jsonl").read_bytes()
    assert [json.loads(line)["text"] for line in found.splitlines()] == LINES
    assert sorted(f.name for f in folder.iterdir()) == ["out.jsonl", "texts"]
    return found


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_goes_on(
    how: signal.Signals, texts: Path, causal: Path, tmp_path: Path, expected: bytes
) -> None:
    output, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    # Slow enough to be stopped in the middle.
    slow = "import time, cpsbs.cli.outputs as o; w = o.ResumableFile.write\n"
    slow += "o.ResumableFile.write = lambda self, r: (w(self, r), time.sleep(0.3))[0]\n"
    slow += "from cpsbs.__main__ import main; main()"
    arguments = command(texts, causal, output)
    running = subprocess.Popen(
        [sys.executable, "-c", slow, *arguments[3:]], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while written(partial) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    running.send_signal(how)
    _, said = running.communicate(timeout=60)
    assert 4 <= written(partial) < len(LINES)
    assert not output.exists()
    if how is signal.SIGINT:
        assert running.returncode == 130
        assert "the same command goes on" in said
    status, said = finish(arguments)
    assert status == 0, said
    assert "Going on: " in said
    assert output.read_bytes() == expected
    assert not partial.exists()
    assert finish(arguments) == (0, f"{output} is complete already.\n")


def test_a_full_disk_loses_nothing(
    texts: Path, causal: Path, tmp_path: Path, expected: bytes
) -> None:
    output, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    arguments = command(texts, causal, output)

    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    status, said = finish(arguments, little_room)
    assert status == 1
    assert "File too large; " in said
    assert "results are safe. Make room, and give the same command again" in said
    assert said.count("\n") == 1
    assert partial.stat().st_size == 2000  # in the middle of a line
    assert finish(arguments)[0] == 0
    assert output.read_bytes() == expected


JOB = {"seed": 1, "k": 2}


def begun(file: Path, *numbers: int) -> ResumableFile:
    """A file of five records, with some of them written."""
    sink = ResumableFile(file, JOB, range(5))
    if numbers:
        sink.write([{"number": n, "settings": {}} for n in numbers])
    return sink


@pytest.mark.parametrize("left", [b"", b"{", b'{"number": 4', b'{"number": 4, "settings": {}}'])
def test_a_line_cut_short_does_not_count(left: bytes, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    begun(file, 3, 1).close()
    with (tmp_path / "out.jsonl.partial").open("ab") as partial:
        partial.write(left)
    with closing(begun(file)) as sink:
        assert sink.done == {1, 3}
        sink.write([{"number": n, "settings": {}} for n in (4, 0, 2)])
        sink.finish()
    numbers = [json.loads(line)["number"] for line in file.read_bytes().splitlines()]
    assert numbers == [0, 1, 2, 3, 4]
    assert [f.name for f in tmp_path.iterdir()] == ["out.jsonl"]
    assert ResumableFile(file, JOB, range(5)).complete


@pytest.mark.parametrize("cut", range(0, 71, 7))
def test_a_crash_before_the_first_record(cut: int, tmp_path: Path) -> None:
    file, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    begun(file).close()
    whole = partial.read_bytes()
    assert len(whole) > 70
    partial.write_bytes(whole[:cut])
    begun(file, 0).close()
    with closing(begun(file)) as sink:
        assert sink.done == {0}
    assert json.loads(partial.read_bytes().splitlines()[0])["job"] == JOB


def test_a_command_that_got_nowhere_is_in_nobodys_way(tmp_path: Path) -> None:
    begun(tmp_path / "out.jsonl").close()
    with closing(ResumableFile(tmp_path / "out.jsonl", {"seed": 2}, range(5))) as sink:
        sink.write([{"number": 0, "settings": {}}])
    with pytest.raises(ValueError, match=r"in k \(None there, 2 here\), seed \(2 there, 1 here\)"):
        begun(tmp_path / "out.jsonl")


def test_what_is_not_of_this_job_is_not_touched(tmp_path: Path) -> None:
    file, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    begun(file, 0).close()
    before = partial.read_bytes()
    with pytest.raises(ValueError, match=r"it differs in k \(2 there, 3 here\), temperature"):
        ResumableFile(file, {"seed": 1, "k": 3, "temperature": 0.5}, range(5))
    with closing(begun(file)) as sink, pytest.raises(RuntimeError, match="1 of 5 results"):
        sink.finish()
    assert partial.read_bytes() == before
    for notes in ("my notes\n", "my notes", '{"job": "mine"}\n'):
        partial.write_text(notes)
        with pytest.raises(ValueError, match="was not written by cpsbs"):
            begun(file)
        assert partial.read_text() == notes
    file.write_text("my own\n")
    with pytest.raises(ValueError, match="is there already"):
        begun(file)


def test_two_at_once_are_told_apart(tmp_path: Path) -> None:
    held = closing(begun(tmp_path / "out.jsonl", 0))
    with held, pytest.raises(ValueError, match="is being written by another process"):
        begun(tmp_path / "out.jsonl")


def test_parquet_holds_the_same(texts: Path, causal: Path, tmp_path: Path, expected: bytes) -> None:
    from pyarrow.parquet import read_table  # type: ignore[import-untyped]

    output = tmp_path / "out.parquet"
    arguments = command(texts, causal, output)
    assert finish(arguments)[0] == 0
    rows = read_table(output).to_pylist()
    assert [{**row, "settings": json.loads(row["settings"])} for row in rows] == [
        json.loads(line) for line in expected.splitlines()
    ]
    assert "complete already" in finish(arguments)[1]


def test_a_pipe_that_closes_is_no_error(texts: Path, causal: Path) -> None:
    texts.write_text("".join(f"{line}\n" for line in LINES * 10))  # more than a pipe holds
    arguments = [sys.executable, "-m", "cpsbs", "sample", "-f", str(texts), "-m", str(causal)]
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, stdout=pipe, stderr=pipe, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        first = json.loads(running.stdout.readline())
        running.stdout.close()
        assert first["text"] == LINES[0]
        assert running.stderr.read() == ""
    assert running.returncode == 0
