"""Long work that is stopped: nothing is lost, nothing comes twice, the result is the same."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cpsbs.__main__ import main
from cpsbs.cli.commands import app
from cpsbs.cli.ordered import Record
from cpsbs.cli.outputs import ResumableFile
from tests.cli.files import OneWindow

LINES = [f"the dog sees {n} and {m}" for n in ("one", "two") for m in ("a cat", "it") * 8]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "texts"
    file.write_text("".join(f"{line}\n" for line in LINES))
    return file


def command(texts: Path, causal: Path, output: Path) -> list[str]:
    """Two at a time, so that there are many batches."""
    sample = ["sample", "-f", str(texts), "-m", str(causal)]
    return [*sample, "-k", "2", "--batch-size", "2", "--max-length", "8", "-o", str(output)]


def finish(arguments: list[str]) -> tuple[int, str]:
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, done.stderr


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


def resumed(arguments: list[str], expected: bytes) -> None:
    """Finish a run that was stopped, and check that nothing shows that it was."""
    output = Path(arguments[-1])
    partial = output.with_name("out.jsonl.partial")
    assert 4 <= written(partial) < len(LINES)
    assert not output.exists()
    status, message = finish(arguments)
    assert status == 0, message
    assert "Resuming: " in message
    assert output.read_bytes() == expected
    assert not partial.exists()
    status, message = finish(arguments)
    assert status == 0
    assert "already complete" in message


def test_a_killed_run_is_resumed(
    texts: Path, causal: Path, tmp_path: Path, expected: bytes
) -> None:
    """In a process of its own, which kills itself after two batches."""
    arguments = command(texts, causal, tmp_path / "out.jsonl")
    code = "import os, signal, cpsbs.cli.outputs as outputs\n"
    code += "write = outputs.ResumableFile.write\n"
    code += "def deadly(self, records):\n"
    code += "    write(self, records)\n"
    code += "    if self.count == 4: os.kill(os.getpid(), signal.SIGKILL)\n"
    code += "outputs.ResumableFile.write = deadly\n"
    code += "from cpsbs.__main__ import main; main()"
    killed = subprocess.run([sys.executable, "-c", code, *arguments])
    assert killed.returncode == -signal.SIGKILL
    resumed(arguments, expected)


def test_an_interrupted_run_is_resumed(
    texts: Path, causal: Path, tmp_path: Path, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = command(texts, causal, tmp_path / "out.jsonl")
    write = ResumableFile.write

    def interrupted(self: ResumableFile, records: list[Record]) -> None:
        write(self, records)
        if self.count == 4:
            signal.raise_signal(signal.SIGINT)  # as Ctrl-C does

    with monkeypatch.context() as patch:
        patch.setattr(ResumableFile, "write", interrupted)
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            status, message = finish(arguments)
        finally:
            signal.signal(signal.SIGINT, previous)
    assert status == 130
    assert message.startswith("stopped: ")
    assert message.count("\n") == 1
    resumed(arguments, expected)


def test_a_full_disk_loses_nothing(
    texts: Path, causal: Path, tmp_path: Path, expected: bytes
) -> None:
    output, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    arguments = command(texts, causal, output)
    size = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, size[1]))
    try:
        status, message = finish(arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, size)
    assert status == 1
    assert "File too large" in message
    assert "results are safe" in message
    assert message.count("\n") == 1
    assert partial.stat().st_size == 2000  # in the middle of a line
    assert finish(arguments)[0] == 0
    assert output.read_bytes() == expected


JOB = {"seed": 1, "k": 2}


def begun(file: Path, *numbers: int) -> OneWindow:
    """A file of five records, with some of them written."""
    sink = OneWindow(file, JOB, range(5))
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
    assert OneWindow(file, JOB, range(5)).complete


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
    with closing(OneWindow(tmp_path / "out.jsonl", {"seed": 2}, range(5))) as sink:
        sink.write([{"number": 0, "settings": {}}])
    with pytest.raises(ValueError, match=r"in k \(None there, 2 here\), seed \(2 there, 1 here\)"):
        begun(tmp_path / "out.jsonl")


def test_what_is_not_of_this_job_is_not_touched(tmp_path: Path) -> None:
    file, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    begun(file, 0).close()
    before = partial.read_bytes()
    with pytest.raises(ValueError, match=r"differs in k \(2 there, 3 here\), temperature"):
        OneWindow(file, {"seed": 1, "k": 3, "temperature": 0.5}, range(5))
    with closing(begun(file)) as sink, pytest.raises(RuntimeError, match="1 of 5 results"):
        sink.finish()
    assert partial.read_bytes() == before
    for notes in ("my notes\n", "my notes", '{"job": "mine"}\n'):
        partial.write_text(notes)
        with pytest.raises(ValueError, match="was not written by cpsbs"):
            begun(file)
        assert partial.read_text() == notes
    file.write_text("my own\n")
    with pytest.raises(ValueError, match="exists already"):
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
    assert "already complete" in finish(arguments)[1]


def test_a_pipe_that_closes_is_no_error(
    texts: Path, causal: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    texts.write_text("".join(f"{line}\n" for line in LINES * 10))  # more than a pipe holds
    ours, theirs = os.pipe()
    first: list[str] = []

    def read_one_line() -> None:
        with open(ours) as pipe:
            first.append(pipe.readline())

    reader = threading.Thread(target=read_one_line)
    reader.start()
    with open(theirs, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        patch.setattr(sys, "argv", ["cpsbs", "sample", "-f", str(texts), "-m", str(causal)])
        with pytest.raises(SystemExit) as caught:
            main()
    reader.join()
    assert json.loads(first[0])["text"] == LINES[0]
    assert caught.value.code == 0
    assert capfd.readouterr().err == ""
