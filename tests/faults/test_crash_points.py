"""A fault at every single file operation: the same command, run again, makes the right file."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, Any
from unittest import mock

import pytest

from tests.cli.files import OneWindow

JOB = {"seed": 1, "model": "some"}
BATCHES = [[5, 2], [4, 0], [3, 1]]
FOREIGN = {
    "notes.txt": b"mine",
    "out.jsonl.whole": b"mine too",
    "out.parquet.tmp": b"\0",
    ".cpsbs-": b"",
    ".cpsbs-0123456789abcdef": b"not of this run",
}
"""Files of somebody else in the same folder."""

ERRORS = {"no room": errno.ENOSPC, "an error of the disk": errno.EIO}
KINDS = ["death", "death in a write", *ERRORS, "no room in a write", "Ctrl-C", "Ctrl-C afterwards"]


class Death(BaseException):
    """The end of the process, where it is only played."""


def _play_death() -> None:
    raise Death


class Faults:
    """Counts file operations, and lets one of them go wrong.

    Args:
        at: the number of the operation, from 1.
        kind: one of ``KINDS``.
        die: ends the process, or plays its end by an exception. Nothing is done after that.
    """

    def __init__(self, at: int, kind: str, die: Callable[[], None]) -> None:
        self.count = 0
        self._at, self._kind, self._die = at, kind, die

    @property
    def happened(self) -> bool:
        return self.count >= self._at

    def operate(self, real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Do an operation, if nothing goes wrong."""
        self.count += 1
        if self.count < self._at:
            return real(*arguments, **named)
        if "death" in self._kind:
            if self.count == self._at:
                self._do_half(real, *arguments)
            self._die()
        if self.count == self._at:
            if self._kind == "Ctrl-C":
                raise KeyboardInterrupt
            if self._kind in ERRORS:
                raise OSError(ERRORS[self._kind], "told by the system")
            if self._kind == "no room in a write":
                self._do_half(real, *arguments)
                raise OSError(errno.ENOSPC, "told by the system")
        result = real(*arguments, **named)
        if self.count == self._at:  # Ctrl-C afterwards
            if real.__name__ in ("open", "dup"):
                os.close(result)  # as the end of the process does
            raise KeyboardInterrupt
        return result

    def _do_half(self, real: Callable[..., Any], *arguments: Any) -> None:
        if "in a write" in self._kind and real.__name__ == "write":
            (data,) = arguments
            real(bytes(data)[: len(data) // 2])

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let all file operations of result files go through here."""
        replaced: list[tuple[Any, str, Callable[..., Any]]] = [
            (os, name, partial(self.operate, getattr(os, name)))
            for name in ("open", "dup", "lstat", "fstat", "ftruncate", "replace", "unlink")
        ]
        # Only a power failure would show whether data are on the disk; here it is only counted.
        replaced.append((os, "fsync", partial(self.operate, _do_nothing)))
        replaced.append((os, "fdopen", self._fdopen))
        replaced.append((fcntl, "flock", partial(self.operate, fcntl.flock)))
        with ExitStack() as stack:
            for module, name, function in replaced:
                stack.enter_context(mock.patch.object(module, name, function))
            yield

    def _fdopen(self, descriptor: int, mode: str, buffering: int = -1) -> IO[bytes]:
        raw: Any = _File(descriptor, mode, self)
        if buffering == 0:
            return raw  # type: ignore[no-any-return]
        return io.BufferedReader(raw) if mode == "rb" else io.BufferedWriter(raw)


class _File(io.FileIO):
    def __init__(self, descriptor: int, mode: str, faults: Faults) -> None:
        super().__init__(descriptor, mode)
        self._faults = faults

    def readinto(self, buffer: Any) -> int:
        return int(self._faults.operate(super().readinto, buffer))

    def write(self, data: Any) -> int:
        return int(self._faults.operate(super().write, data))


def _do_nothing(*_: Any) -> None:
    pass


def scenario(file: Path) -> None:
    """Do what a command does that is stopped once, goes on, and is then given once more."""
    _go_on(file, len(BATCHES) - 1)
    _go_on(file, len(BATCHES))
    with closing(OneWindow(file, JOB, range(6))) as sink:
        assert sink.complete


def _go_on(file: Path, batches: int) -> None:
    with closing(OneWindow(file, JOB, range(6))) as sink:
        if sink.complete:
            return
        for batch in BATCHES[:batches]:
            new = [number for number in batch if number not in sink.done]
            if new:
                sink.write([{"number": n, "text": "é" * n, "settings": {"k": 2}} for n in new])
        if len(sink.done) == 6:
            sink.finish()


def fresh(parent: Path, name: str) -> Path:
    """Return a folder in which there are only files of somebody else."""
    folder = parent / name
    folder.mkdir()
    for foreign, content in FOREIGN.items():
        (folder / foreign).write_bytes(content)
    return folder


def check(folder: Path, name: str, expected: bytes) -> None:
    """See that the right file and the files of somebody else are there, and nothing else."""
    found = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert found == FOREIGN | {name: expected}


def faulty(file: Path, at: int, kind: str, die: Callable[[], None]) -> bool:
    """Run the scenario with a fault, and return whether it happened."""
    faults = Faults(at, kind, die)
    told: OSError | None = None
    try:
        with faults.installed():
            scenario(file)
    except OSError as error:
        told = error
    except (Death, KeyboardInterrupt):
        assert kind not in ERRORS
    if told is not None:
        assert told.errno is None, "an error of the system was not told in a sentence"
        assert "run the same command again" in str(told)
        assert kind in (*ERRORS, "no room in a write")
    return faults.happened


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_any_operation_loses_nothing(kind: str, tmp_path: Path) -> None:
    name = "out.jsonl"
    scenario(fresh(tmp_path, "expected") / name)
    expected = (tmp_path / "expected" / name).read_bytes()
    assert [json.loads(line)["number"] for line in expected.splitlines()] == list(range(6))
    check(tmp_path / "expected", name, expected)
    points = 0
    for at in count(1):
        folder = fresh(tmp_path, str(at))
        if not faulty(folder / name, at, kind, _play_death):
            break
        points += 1
        scenario(folder / name)
        check(folder, name, expected)
    assert points >= 60


@pytest.mark.slow
@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_process_that_dies_at_any_operation_loses_nothing(name: str, tmp_path: Path) -> None:
    """In processes that really end, made by a small one that has no threads."""
    arguments = [sys.executable, "-m", "tests.faults.test_crash_points", str(tmp_path), name]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    points = json.loads(done.stdout)
    assert list(points) == KINDS
    assert min(points.values()) >= 60


def main(parent: Path, name: str) -> None:
    """Print how many operations could go wrong in each way without any loss."""
    first = fresh(parent, "expected") / name
    assert in_a_process(partial(scenario, first)) == 0
    expected = first.read_bytes()
    points = dict.fromkeys(KINDS, 0)
    for kind in KINDS:
        for at in count(1):
            file = fresh(parent, f"{kind} {at}") / name
            status = in_a_process(partial(faulty, file, at, kind, partial(os._exit, DEAD)))
            assert status in (NOT_HAPPENED, HAPPENED, DEAD), f"{kind} at operation {at}"
            if status == NOT_HAPPENED:
                break
            points[kind] += 1
            assert in_a_process(partial(scenario, file)) == 0, f"{kind} at operation {at}"
            check(file.parent, name, expected)
    sys.stdout.write(json.dumps(points))


NOT_HAPPENED, HAPPENED, DEAD, FAILED = range(4)
"""Exit statuses."""


def in_a_process(work: Callable[[], bool | None]) -> int:
    """Return the exit status of a process that does some work."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    try:
        os._exit(HAPPENED if work() else NOT_HAPPENED)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(FAILED)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
