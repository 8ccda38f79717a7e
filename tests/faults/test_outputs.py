"""Result files: what is there is complete and of this command, or it is refused and left alone."""

from __future__ import annotations

import errno
import json
import os
import stat
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pytest
import typer
from pyarrow import parquet
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

import cpsbs
from cpsbs.cli import commands, engines, formats, running, stored
from cpsbs.cli import sample as sampling
from cpsbs.cli.draws import sample_records
from cpsbs.cli.ordered import OrderedOutput, Record
from cpsbs.fingerprint import fingerprint, model_fingerprint
from tests.cli.files import OneWindow, window_of
from tests.models.folders import causal_folder

JOB = {"seed": 1, "k": 2}
NUMBERS = [0, 1, 2, 4, 6]
"""Some lines of the input were left out."""


def result_of(number: int) -> Record:
    return {"number": number, "text": "été" * number, "value": number / 3, "settings": {"k": 2}}


def opened(file: Path, job: Record = JOB) -> OneWindow:
    return OneWindow(file, job, NUMBERS)


def begun(file: Path, *numbers: int) -> Path:
    """Write some of the results, and return the partial file."""
    with closing(opened(file)) as sink:
        sink.write([result_of(number) for number in numbers])
    return sink.partial


def finished(file: Path) -> bytes:
    with closing(opened(file)) as sink:
        sink.write([result_of(n) for n in NUMBERS if n not in sink.done])
        sink.finish()
    return file.read_bytes()


@contextmanager
def little_memory() -> Iterator[None]:
    """Fail if more than a line may take, as bytes and as text and as JSON, is ever needed."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 6 * stored.LONGEST
    finally:
        tracemalloc.stop()


# Complete files


def swapped(lines: list[bytes]) -> list[bytes]:
    return [lines[1], lines[0], *lines[2:]]


def with_other_mark(lines: list[bytes]) -> list[bytes]:
    return [*lines[:2], lines[2].replace(b'"job": "', b'"job": "f'), *lines[3:]]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda lines: [], "it ends after 0 of 5 results"),
        (lambda lines: lines[:1], "it ends after 1 of 5 results"),
        (lambda lines: [*lines[:2], lines[2][:9]], "line 3 is cut short"),
        (lambda lines: [*lines[:4], lines[4][:-1]], "line 5 is cut short"),
        (lambda lines: [lines[0], b"\0\xff" * 99], "line 2 is cut short"),
        (lambda lines: [lines[0], b"\xff\n"], "line 2 is not JSON"),
        (lambda lines: [lines[0], b"\n", *lines[1:]], "line 2 is not JSON"),
        (lambda lines: [lines[0], b"[" * 10**5 + b"\n"], "line 2 is not JSON"),
        (lambda lines: [b'{"number": NaN}\n'], "line 1 is not JSON"),
        (lambda lines: [b"[]\n"], "line 1 is not a JSON object"),
        (lambda lines: [lines[0], *lines], "line 2 is not the result of text 2"),
        (lambda lines: [*lines, lines[0]], "it has more than 5 lines"),
        (swapped, "line 1 is not the result of text 1"),
        (with_other_mark, "line 3 was not written by this command"),
        (lambda lines: [b"my own\n"], "line 1 is not JSON"),
    ],
)
def test_a_file_that_is_not_whole_is_refused_and_kept(
    damage: Callable[[list[bytes]], list[bytes]], reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "out.jsonl"
    damaged = b"".join(damage(finished(file).splitlines(keepends=True)))
    file.write_bytes(damaged)
    with pytest.raises(ValueError, match=f"out.jsonl, which exists already .*: {reason}"):
        opened(file)
    assert file.read_bytes() == damaged
    assert os.listdir(tmp_path) == ["out.jsonl"]


def rewritten(file: Path, change: Callable[[list[Record]], list[Record]]) -> None:
    parquet.write_table(
        pyarrow.Table.from_pylist(change(parquet.read_table(file).to_pylist())), file
    )


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            lambda file: file.write_bytes(file.read_bytes()[:-10]),
            "it is not a complete Parquet file",
        ),
        (lambda file: file.write_bytes(b""), "it is not a complete Parquet file"),
        (lambda file: file.write_text("my own\n"), "it is not a complete Parquet file"),
        (lambda file: rewritten(file, lambda rows: rows[:4]), "it ends after 4 of 5 results"),
        (
            lambda file: rewritten(file, lambda rows: [rows[1], rows[0], *rows[2:]]),
            "row 1 is not the result of text 1",
        ),
        (
            lambda file: rewritten(file, lambda rows: [*rows[:4], rows[4] | {"job": "other"}]),
            "row 5 was not written by this command",
        ),
        (
            lambda file: rewritten(file, lambda rows: [{"number": r["number"]} for r in rows]),
            "it lacks the columns number and job",
        ),
    ],
)
def test_a_parquet_file_that_is_not_whole_is_refused_and_kept(
    damage: Callable[[Path], Any], reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "out.parquet"
    finished(file)
    assert opened(file).complete
    damage(file)
    damaged = file.read_bytes()
    with pytest.raises(ValueError, match=f"out.parquet, which exists already .*: {reason}"):
        opened(file)
    assert file.read_bytes() == damaged


def test_a_parquet_file_is_the_same_in_several_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(number: int) -> Record:
        error = None if number < 3 else number / 3
        return result_of(number) | {"error": error, "drawn": [[]] if number < 2 else [[number]]}

    tables = []
    for size in (formats.GROUP, 1):
        monkeypatch.setattr(formats, "GROUP", size)
        file = tmp_path / f"{size}.parquet"
        with closing(opened(file)) as sink:
            sink.write([record(n) for n in reversed(NUMBERS)])
            sink.finish()
        assert opened(file).complete
        assert parquet.ParquetFile(file).num_row_groups == (5 if size == 1 else 1)
        tables.append(parquet.read_table(file).drop_columns("job").to_pylist())
    assert tables[0] == tables[1]
    assert [row | {"settings": {"k": 2}} for row in tables[0]] == [record(n) for n in NUMBERS]


@pytest.mark.parametrize("begin", [b"", b'{"job": "'])
def test_a_huge_file_without_lines_is_refused_in_little_memory(
    begin: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "out.jsonl"
    file.write_bytes(begin)
    os.truncate(file, 16 * stored.LONGEST)
    with little_memory(), pytest.raises(ValueError, match="line 1 is longer than any"):
        opened(file)


def test_a_huge_partial_file_is_refused_in_little_memory(tmp_path: Path) -> None:
    partial = begun(tmp_path / "out.jsonl", 0, 4)
    os.truncate(partial, 16 * stored.LONGEST)
    with little_memory(), pytest.raises(ValueError, match="partial: line 4 is longer than any"):
        opened(tmp_path / "out.jsonl")
    assert partial.stat().st_size == 16 * stored.LONGEST
    partial.write_bytes(b"")
    os.truncate(partial, 16 * stored.LONGEST)
    with little_memory(), pytest.raises(ValueError, match="was not written by cpsbs"):
        opened(tmp_path / "out.jsonl")


def test_a_result_that_could_not_be_read_again_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cpsbs.cli.outputs.LONGEST", 1000)
    with closing(opened(tmp_path / "out.jsonl")) as sink:
        with pytest.raises(
            ValueError, match=r"text 7 takes 1,\d\d\d bytes; .* --output may have 1,000"
        ):
            sink.write([result_of(6) | {"text": "x" * 1000}])
        assert not sink.done


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    odd = {"value": [float("nan"), float("-inf"), 1.0], "name": "folder\udcff"}
    with closing(opened(file)) as sink:
        sink.write([result_of(n) | odd for n in (4, 2)])
    assert json.loads(finished(file).splitlines()[2]) | {"job": ""} == {
        **result_of(2),
        "value": [None, None, 1.0],
        "name": "folder\udcff",
        "job": "",
    }
    assert opened(file).complete


# What is not a regular file


@pytest.mark.parametrize("which", ["out.jsonl", "out.jsonl.partial"])
@pytest.mark.parametrize("kind", ["a named pipe", "a folder", "a symbolic link to"])
def test_only_regular_files_are_written(which: str, kind: str, tmp_path: Path) -> None:
    place, victim = tmp_path / which, tmp_path / "victim"
    victim.write_text("mine\n")
    match kind:
        case "a named pipe":
            os.mkfifo(place)
        case "a folder":
            place.mkdir()
        case _:
            place.symlink_to(victim)
    with pytest.raises(
        ValueError, match=f"{place} is {kind}.*; results are written to regular files only"
    ):
        opened(tmp_path / "out.jsonl")
    assert victim.read_text() == "mine\n"
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "/dev/full",
            "/dev/full is a device or a socket; results are written to regular files only",
        ),
        ("..", r"\.\. is a folder; results are written to regular files only"),
        (".", r"--output is \., which is a folder; give the name of a file"),
        ("/", "--output is /, which is a folder; give the name of a file"),
    ],
)
def test_devices_and_folders_are_no_places_for_results(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        opened(Path(name))


def test_a_link_that_leads_nowhere_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    file.symlink_to("nowhere")
    with pytest.raises(ValueError, match="is a symbolic link to nowhere; "):
        opened(file)
    assert os.readlink(file) == "nowhere"


def test_files_of_similar_names_are_left_alone(tmp_path: Path) -> None:
    file, victim = tmp_path / "out.jsonl", tmp_path / "victim"
    victim.write_text("mine\n")
    (tmp_path / "out.jsonl.whole").symlink_to(victim)
    (tmp_path / "out.jsonl.tmp").write_text("mine too\n")
    before = os.umask(0o027)
    try:
        finished(file)
    finally:
        os.umask(before)
    assert victim.read_text() == "mine\n"
    assert (tmp_path / "out.jsonl.tmp").read_text() == "mine too\n"
    assert len(os.listdir(tmp_path)) == 4
    assert stat.S_IMODE(file.lstat().st_mode) == 0o640


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    with closing(opened(file)) as sink:
        sink.write([result_of(n) for n in NUMBERS])
        file.write_text("mine\n")
        with pytest.raises(ValueError, match="in the meantime"):
            sink.finish()
    assert file.read_text() == "mine\n"
    file.unlink()
    assert len(finished(file).splitlines()) == 5
    assert os.listdir(tmp_path) == ["out.jsonl"]


# Partial files


def test_a_partial_file_left_behind_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    left = begun(file, *NUMBERS).read_bytes()
    partial = tmp_path / "out.jsonl.partial"
    whole = finished(file)
    partial.write_bytes(left)
    assert opened(file).complete
    assert os.listdir(tmp_path) == ["out.jsonl"]
    assert file.read_bytes() == whole


@pytest.mark.parametrize("content", [b"my notes\n", b'{"cpsbs": "partial", "job": 1}\n', None])
def test_a_partial_file_of_somebody_else_is_left(content: bytes | None, tmp_path: Path) -> None:
    file, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    finished(file)
    if content is None:
        with closing(OneWindow(tmp_path / "other", JOB | {"seed": 2}, [0])) as other:
            other.write([result_of(0)])
        content = other.partial.rename(partial).read_bytes()
    partial.write_bytes(content)
    assert opened(file).complete
    assert partial.read_bytes() == content


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"my notes\n", "is not JSON"),
        (b"\n", "is not JSON"),
        (b"\xff\xfe\n", "is not JSON"),
        (b"[" * 10**5 + b"\n", "is not JSON"),
        (b'{"number": NaN, "job": "MARK"}\n', "is not JSON"),
        (b"[4]\n", "is not a JSON object"),
        (b"4\n", "is not a JSON object"),
        (b'{"number": 4}\n', "was not written by this command"),
        (b'{"number": 4, "job": ["MARK"]}\n', "was not written by this command"),
        (b'{"number": 4, "job": "0123456789abcdef"}\n', "was not written by this command"),
        (b'{"job": "MARK"}\n', "has no number"),
        (b'{"number": true, "job": "MARK"}\n', "has no number"),
        (b'{"number": 4.0, "job": "MARK"}\n', "has no number"),
        (b'{"number": [4], "job": "MARK"}\n', "has no number"),
        (b'{"number": 3, "job": "MARK"}\n', "has the number of no text"),
        (b'{"number": -1, "job": "MARK"}\n', "has the number of no text"),
        (b'{"number": 1, "job": "MARK"}\n', "is another result of text 2"),
    ],
)
@pytest.mark.parametrize("then", [b"", b'{"number'])
def test_a_damaged_partial_file_is_refused_with_its_line(
    line: bytes, reason: str, then: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "out.jsonl"
    partial = begun(file, 6, 1)
    mark = json.loads(partial.read_bytes().splitlines()[1])["job"]
    damaged = partial.read_bytes() + line.replace(b"MARK", mark.encode()) + then
    partial.write_bytes(damaged)
    with pytest.raises(ValueError, match=f"out.jsonl.partial: line 4 {reason}.* Remove this line"):
        opened(file)
    assert partial.read_bytes() == damaged


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (b"my notes\n", "was not written by cpsbs"),
        (b"my notes", "was not written by cpsbs"),
        (b'{"job": {"title": "mine"}}', "was not written by cpsbs"),
        (b'{"cpsbs": "partial", \n', "is damaged: line 1 is not JSON"),
        (b'{"cpsbs": "partial", "job": {}}\n', "is damaged: line 1 has no token"),
        (
            b'{"cpsbs": "partial", "token": "../../../victim", "job": {}}\n',
            "is damaged: line 1 has no token",
        ),
        (
            b'{"cpsbs": "partial", "token": "0123456789abcdef", "job": 5}\n',
            "is damaged: line 1 does not describe the job",
        ),
    ],
)
def test_a_partial_file_with_another_first_line_is_refused(
    first: bytes, reason: str, tmp_path: Path
) -> None:
    partial = tmp_path / "out.jsonl.partial"
    partial.write_bytes(first)
    with pytest.raises(ValueError, match=f"out.jsonl.partial, .*, {reason}. Move it away"):
        opened(tmp_path / "out.jsonl")
    assert partial.read_bytes() == first


def test_a_partial_file_that_is_changed_on_the_way_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    with closing(opened(file)) as sink:
        sink.write([result_of(n) for n in NUMBERS])
        content = sink.partial.read_bytes()
        sink.partial.write_bytes(content.replace(b'"number": 2', b'"number": 1'))
        with pytest.raises(ValueError, match=r"was changed .* in the meantime"):
            sink.finish()
    assert os.listdir(tmp_path) == ["out.jsonl.partial"]


# Errors of the system


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.ENOSPC])
def test_any_error_of_the_disk_is_told_in_a_sentence(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    file = tmp_path / "out.jsonl"
    begun(file, 4)
    with closing(opened(file)) as sink, monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="; 1 of 5 results are safe") as caught:
            sink.write([result_of(2)])
        with pytest.raises(OSError, match="; no earlier result is lost"):
            opened(tmp_path / "other.jsonl")
    message = str(caught.value)
    assert message.startswith(f"--output is {file}, ")
    assert os.strerror(code) in message
    assert ("Free some space" in message) == (code == errno.ENOSPC)
    assert message.endswith("run the same command again")
    assert len(finished(file).splitlines()) == 5


def test_standard_output_that_is_full_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr("sys.stdout", full)
    with pytest.raises(OSError, match="standard output cannot be written: No space left"):
        running.print_json({"number": 0})
    with suppress(OSError):
        full.close()


def test_only_a_reader_of_standard_output_may_go_without_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(typer.Exit) as caught, running.reporting_errors():
        raise BrokenPipeError(errno.EPIPE, "a worker is gone")
    assert caught.value.exit_code == 1

    def broken(*_: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", SimpleNamespace(write=broken, encoding="utf-8"))
    with pytest.raises(running.ReaderGoneError):
        running.print_json({"number": 0})


# Work that is stopped


def test_results_that_wait_are_shown_when_no_more_will_come() -> None:
    seen: list[int] = []
    with closing(OrderedOutput(lambda record: seen.append(record["number"]))) as sink:
        sink.begin(window_of(NUMBERS))
        sink.write([result_of(n) for n in (6, 2, 0)])
        assert seen == [0]
    assert seen == [0, 2, 6]


def test_a_result_whose_showing_is_interrupted_is_not_lost() -> None:
    seen: list[int] = []
    interrupts = iter([KeyboardInterrupt])

    def show(record: Record) -> None:
        for interrupt in interrupts:
            raise interrupt
        seen.append(record["number"])

    with closing(OrderedOutput(show)) as sink:
        sink.begin(window_of(NUMBERS))
        with pytest.raises(KeyboardInterrupt):
            sink.write([result_of(n) for n in (2, 0)])
    assert seen == [0, 2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return causal_folder(tmp_path_factory.mktemp("model"))


TEXTS = ["dog", "the dog", "the dog sees", "the dog sees two"]


def sample(model: Path, *more: str | Path) -> Result:
    size = [] if "--batch-size" in more else ["--batch-size", "1"]
    arguments = ["sample", *TEXTS, "-k", "2", "--max-length", "3", "-m", model, *size, *more]
    return CliRunner().invoke(commands.app, [str(a) for a in arguments])


@pytest.fixture
def stop_after_two(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Arrange that a command is stopped when two batches are done."""

    def arrange(stop: BaseException) -> None:
        count = iter(range(9))

        def stopped(*arguments: Any) -> list[Record]:
            if next(count) == 2:
                raise stop
            return sample_records(*arguments)

        monkeypatch.setattr(sampling, "sample_records", stopped)

    return arrange


@pytest.mark.parametrize(
    ("stop", "status", "said"),
    [
        (
            KeyboardInterrupt(),
            130,
            "stopped: with --output, run the same command again to resume",
        ),
        (RuntimeError("the model fell over"), 1, "error: the model fell over"),
    ],
)
def test_a_stopped_command_prints_what_is_done(
    stop: BaseException,
    status: int,
    said: str,
    model: Path,
    stop_after_two: Callable[[BaseException], None],
) -> None:
    stop_after_two(stop)
    result = sample(model)
    # The first window is a batch; in the second one the longest text is the first.
    assert [json.loads(line)["text"] for line in result.stdout.splitlines()] == TEXTS[:3:2]
    assert (result.exit_code, result.stderr) == (status, f"{said}\n")


# What a job is


@pytest.fixture
def own_model(model: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may change."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_a_run_does_not_go_on_with_other_weights(
    own_model: Path, tmp_path: Path, stop_after_two: Callable[[BaseException], None]
) -> None:
    output = tmp_path / "out.jsonl"
    stop_after_two(KeyboardInterrupt())
    assert sample(own_model, "-o", output).exit_code == 130
    weights = own_model / "model.safetensors"
    before = weights.read_bytes()
    changed = {name: value + 0.1 for name, value in load_file(weights).items()}
    save_file(changed, weights, metadata={"format": "pt"})
    refused = sample(own_model, "-o", output)
    assert refused.exit_code == 1
    assert "differs in model_content (" in refused.stderr
    weights.write_bytes(before)
    assert sample(own_model, "-o", output).exit_code == 0
    assert "already complete" in sample(own_model, "-o", output).stderr
    (own_model / "config.json").write_bytes((own_model / "config.json").read_bytes() + b"\n")
    assert "was not written by this command" in sample(own_model, "-o", output).stderr


def test_a_run_does_not_go_on_with_another_batch_size(
    model: Path, tmp_path: Path, stop_after_two: Callable[[BaseException], None]
) -> None:
    output = tmp_path / "out.jsonl"
    stop_after_two(KeyboardInterrupt())
    assert sample(model, "-o", output).exit_code == 130
    refused = sample(model, "-o", output, "--batch-size", "2")
    assert refused.exit_code == 1
    assert "differs in batch_size (1 there, 2 here)" in refused.stderr
    assert sample(model, "-o", output).exit_code == 0


def test_a_model_is_read_once_more_only_for_an_output(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_wanted(*_: Any) -> str:
        raise RuntimeError("the fingerprint was taken")

    monkeypatch.setattr(engines, "model_fingerprint", not_wanted)
    assert sample(model).exit_code == 0
    assert "the fingerprint was taken" in sample(model, "-o", tmp_path / "out.jsonl").stderr


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        *((f"some{suffix}", True) for suffix in (".json", ".safetensors", ".model", ".spm")),
        *((f"some{suffix}", True) for suffix in (".txt", ".jinja", ".py", ".gguf")),
        ("pytorch_model.bin", False),
        ("README.md", False),
    ],
)
def test_a_fingerprint_is_of_the_files_that_make_a_model(
    name: str, counts: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    seen = [fingerprint(tmp_path)]
    for content in ("a", "b"):
        (tmp_path / name).write_text(content)
        seen.append(fingerprint(tmp_path))
    assert len(set(seen)) == (3 if counts else 1)
    (tmp_path / name).rename(tmp_path / f"other-{name}")
    assert (fingerprint(tmp_path) != seen[-1]) == counts


def test_a_fingerprint_tells_where_a_file_ends_and_needs_little_memory(tmp_path: Path) -> None:
    contents = [{"a.json": "1", "b.json": "2"}, {"a.json": "1b.json2"}]
    seen = set()
    for i, files in enumerate(contents):
        (tmp_path / str(i)).mkdir()
        for name, content in files.items():
            (tmp_path / str(i) / name).write_text(content)
        seen.add(fingerprint(tmp_path / str(i)))
    assert len(seen) == 2
    (tmp_path / "0" / "large.safetensors").touch()
    os.truncate(tmp_path / "0" / "large.safetensors", 2**27)
    tracemalloc.start()
    fingerprint(tmp_path / "0")
    assert tracemalloc.get_traced_memory()[1] < 2**21
    tracemalloc.stop()


def test_a_model_is_known_by_its_content_or_its_commit(model: Path) -> None:
    def found(name: str, commit: str | None) -> str:
        return model_fingerprint(name, SimpleNamespace(_commit_hash=commit))

    assert found(str(model), None) == fingerprint(model)
    assert found("en-fr", None) == fingerprint(cpsbs.text.EMBEDDED / "en-fr")
    assert found("some/model", "0123abcd") == "some/model@0123abcd"
    assert found("some/model", None) == "some/model"
